# SPDX-License-Identifier: Apache-2.0
"""Import a Hugging Face checkpoint as a checkpoint that a stage can start from.

    FOLDER/weights/         Megatron's distributed checkpoint, in NeMo's names
    FOLDER/hugging_face/    the original config.json, generation_config.json and tokenizer files
    FOLDER/longhaul.json    the marker of completeness, as of a finished stage of 0 steps

Bits and dtype of weights do not change. The checkpoint is written by
`recipes.checkpoints.streamed_weights` through a planner that reads each tensor when it is written,
so memory is that of the largest one. `recipes.hugging_face.weight_map` and `convert` read and
convert; `recipes.hugging_face.config` and `safetensors_files` refuse unsupported models before this
module is imported.
"""

import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

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
        write_weights(part / "weights", _Streamed(card, stored))
        write_marker(part, marker | {FILES: for_marker(described(part))})


def tokenizer_facts(source: Path) -> TokenizerFacts:
    """Return what a store made with this tokenizer says of it, computed from its saved form.

    Raises ValueError if `source` has no usable tokenizer.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return tokenizer.load(str(source)).save(Path(scratch) / "tokenizer")


class _Streamed(SavePlanner):
    """Plan one chunk per piece, and convert it when it is written."""

    def __init__(self, card: ModelCard, stored: Mapping[str, Stored]) -> None:
        self._card = card
        self._stored = stored
        self._pieces: dict[tuple[str, tuple[int, ...]], WeightShard] = {}
        self._files: dict[Path, Any] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: there is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """Return one chunk per piece, and an empty state for each module that needs one."""
        items = [self._item(piece) for piece in weight_map.weight_map(self._card)]
        items += [
            WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)
            for key in weight_map.states(self._card)
        ]
        return SavePlan(items)

    def _item(self, piece: WeightShard) -> WriteItem:
        offsets = torch.Size((*piece.at, *(0 for _ in piece.shape)))
        self._pieces[piece.megatron, tuple(offsets)] = piece
        dtype = DTYPES[self._stored[piece.hugging_face[0]].dtype]
        return WriteItem(
            index=MetadataIndex(piece.megatron, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(
                    offsets=offsets, sizes=torch.Size((*(1 for _ in piece.at), *piece.shape))
                ),
                properties=TensorProperties(dtype=dtype),
                size=torch.Size((*piece.of, *piece.shape)),
            ),
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of this single process, and the metadata of its tensors."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read, convert and return one chunk."""
        if write_item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)  # a list of one, as Megatron saves its sharded objects
            return empty
        offset = write_item.index.offset
        assert offset is not None
        piece = self._pieces[write_item.index.fqn, tuple(offset)]
        tensors = [self._read(name) for name in piece.hugging_face]
        part = to_megatron(piece, tensors, self._card)
        return part.reshape(*(1 for _ in piece.at), *piece.shape)

    def _read(self, name: str) -> torch.Tensor:
        file = self._stored[name].file
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        tensor: torch.Tensor = self._files[file].get_tensor(name)
        return tensor
