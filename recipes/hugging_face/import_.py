# SPDX-License-Identifier: Apache-2.0
"""Import a Hugging Face checkpoint as a checkpoint that a stage can start from.

    FOLDER/weights/         Megatron's distributed checkpoint, in NeMo's names
    FOLDER/hugging_face/    the original config.json, generation_config.json and tokenizer files
    FOLDER/longhaul.json    the marker of completeness, as of a finished stage of 0 steps

Bits and dtype of weights do not change. The checkpoint is written by
`recipes.checkpoints.streamed_weights`, which reads each tensor when it is written, so memory is
that of the largest one. `recipes.hugging_face.weight_map` and `convert` read and
convert; `recipes.hugging_face.config` and `safetensors_files` refuse unsupported models before this
module is imported.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData

from data.files.appearing import appearing
from data.hub import TOKENIZER_FILES, matching
from data.store import TokenizerFacts, tokenizer_marker
from data.tokenization import tokenizer
from recipes.checkpoints.files import FILES, HUGGING_FACE, described, for_marker
from recipes.checkpoints.marker import (
    NATIVE_CONTEXT,
    ORIGIN,
    PATTERN,
    VOCABULARY,
    origin_of,
    write_marker,
)
from recipes.checkpoints.streamed_weights import write_weights
from recipes.hugging_face import weight_map
from recipes.hugging_face.convert import DTYPES, to_megatron
from recipes.hugging_face.safetensors_files import Stored
from recipes.hugging_face.side_files import copy_side_files
from recipes.hugging_face.weight_map import WeightShard
from recipes.spec.model_card import ModelCard


def write_checkpoint(
    folder: Path,
    source: Path,
    card: ModelCard,
    stored: Mapping[str, Stored],
    *,
    origin: str = "",
) -> None:
    """Write the checkpoint of a model atomically into a new folder.

    `stored` are the tensors of `source`, checked by `recipes.hugging_face.config`. The marker
    records `origin`, the name on the hub or the folder, by default `source`. Raises ValueError if
    `source` has no usable tokenizer.
    """
    if not matching(source, TOKENIZER_FILES):
        raise ValueError(
            f"{source} has no tokenizer: no tokenizer.json, tokenizer.model or vocab.json is "
            "there; put the files of the model's tokenizer next to its weights"
        )
    with appearing(folder) as part:
        copy_side_files(source, part / HUGGING_FACE)
        marker = {
            "step": 0,
            "max_steps": 0,
            "seq_length": card.native_context,
            "rope": card.native_rope.to_dict(),
            **({} if card.pattern is None else {PATTERN: card.pattern.to_dict()}),
            "temperature": card.native_rope.temperature,
            **tokenizer_marker(tokenizer_facts(source)),
            VOCABULARY: card.vocab,
            **({} if card.stated_context is None else {NATIVE_CONTEXT: card.stated_context}),
            ORIGIN: origin_of(origin or str(source)),
        }
        published = _Published(card, stored)
        states = weight_map.states(card)
        write_weights(part / "weights", published.tensors(), states, published.read)
        write_marker(part, marker | {FILES: for_marker(described(part))})


def tokenizer_facts(source: Path) -> TokenizerFacts:
    """Return what a store made with this tokenizer says of it, computed from its saved form.

    Raises ValueError if `source` has no usable tokenizer.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return tokenizer.load(str(source)).save(Path(scratch) / "tokenizer")


class _Published:
    """The pieces of a published model, each converted when it is read."""

    def __init__(self, card: ModelCard, stored: Mapping[str, Stored]) -> None:
        self._card = card
        self._stored = stored
        self._pieces: dict[tuple[str, torch.Size], WeightShard] = {}
        self._files: dict[Path, Any] = {}

    def tensors(self) -> Iterator[tuple[str, TensorWriteData]]:
        """Yield one chunk for each piece."""
        for piece in weight_map.weight_map(self._card):
            offsets = torch.Size((*piece.at, *(0 for _ in piece.shape)))
            self._pieces[piece.megatron, offsets] = piece
            sizes = torch.Size((*(1 for _ in piece.at), *piece.shape))
            dtype = DTYPES[self._stored[piece.hugging_face[0]].dtype]
            yield (
                piece.megatron,
                TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                    properties=TensorProperties(dtype=dtype),
                    size=torch.Size((*piece.of, *piece.shape)),
                ),
            )

    def read(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """Read and convert one piece."""
        piece = self._pieces[name, chunk.offsets]
        part = to_megatron(piece, [self._tensor(each) for each in piece.hugging_face], self._card)
        return part.reshape(chunk.sizes)

    def _tensor(self, name: str) -> torch.Tensor:
        file = self._stored[name].file
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        tensor: torch.Tensor = self._files[file].get_tensor(name)
        return tensor
