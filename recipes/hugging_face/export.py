# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint to a Hugging Face folder that transformers and vLLM load unchanged.

    DIR/config.json                 the model at its new length and rotation
    DIR/generation_config.json      the original; for a model from scratch its special tokens
    DIR/tokenizer*                  the original, model_max_length raised
    DIR/model*.safetensors          the weights, in files of bounded size, and their index
    DIR/longhaul_rotation.json      the rotation in effect, its SHA-256, and the checkpoint
    DIR/SHA256SUMS                  the SHA-256 of the files above

One layer at a time (one expert at a time) is read, from a checkpoint written under any layout, and
written: no model is built, and memory is that of a layer, or of the embedding if it is larger. Bits
and dtype are those of the checkpoint unless another dtype is requested. The exported weights are
those that the model computed with (in a bf16 run the bf16 weights, not the optimizer's fp32
copies).
"""

import warnings
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from custom_modules.rope.rotary import stated_rotation
from data.files.appearing import appearing
from data.store import (
    Manifest,
    differing_tokenizer,
    require_tokenizer,
    tokenizer_marker,
)
from recipes.checkpoints.files import HUGGING_FACE, require_undamaged
from recipes.checkpoints.rotation import rotation_before
from recipes.checkpoints.verified import one_rank, verified
from recipes.hugging_face.as_computed import require_as_computed
from recipes.hugging_face.checksums import write_sums
from recipes.hugging_face.config import CONFIG, exported_config, read_config
from recipes.hugging_face.convert import DTYPES, WORDS, content, to_hugging_face
from recipes.hugging_face.import_ import tokenizer_facts
from recipes.hugging_face.safetensors_files import Shards
from recipes.hugging_face.side_files import (
    GENERATION_CONFIG,
    copy_side_files,
    raise_model_max_length,
    special_tokens,
    write_json,
)
from recipes.hugging_face.source_checkpoint import Trained, trained
from recipes.hugging_face.weight_map import PREFIX, WeightShard, weight_map

Described = Mapping[str, ShardedTensor]
ROTATION_FILE = "longhaul_rotation.json"
"""File of an export: frequencies and temperature that transformers was found to compute."""


def export(
    source: Trained,
    to: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_gib: float = 5.0,
    verify: bool = True,
) -> None:
    """Write a new Hugging Face folder atomically.

    `dtype` is that of all weights, None for the checkpoint's own. With `verify` the checksums of
    the checkpoint's files are verified. Raises ValueError if one is damaged, if the tensors are not
    those of the recipe's model, if the tokenizer is not the one it was trained with, if a weight
    is beyond the range of `dtype`, and if transformers would rotate otherwise than in training.
    """
    weights = source.checkpoint / "weights"
    if verify and source.like is not None and source.like.name == HUGGING_FACE:
        require_undamaged(source.like.parent, HUGGING_FACE)
    if source.like is not None and differing_tokenizer(
        tokenizer_marker(tokenizer_facts(source.like)), source.facts
    ):
        raise ValueError(
            f"{source.checkpoint} was trained with another tokenizer than that of {source.like}; "
            "name a Hugging Face folder with its tokenizer by --like"
        )
    reading = verified(source.checkpoint, verify=verify)
    with appearing(to) as part, one_rank(), reading, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from Megatron's calls of torch
        stored = _stored(weights)
        require_pieces(source, stored)
        of_weights = dtype or stored[f"{PREFIX}embedding.word_embeddings.weight"].dtype
        _write_side_files(source, part, of_weights)
        _write_rotation(source, part)
        _write_weights(source, weights, stored, part, dtype, max_shard_gib)
        write_sums(part)


def export_stage(source: str, to: str, verify: bool = True) -> None:
    """Export the folder of a trained stage in a job; an existing export is kept."""
    if not Path(to).exists():
        export(trained(Path(source)), Path(to), verify=verify)


def require_pieces(source: Trained, stored: Described) -> None:
    """Raise ValueError unless the checkpoint has exactly the card's model tensors."""
    wanted = {piece.megatron: piece for piece in weight_map(source.card)}
    ours = {name for name in stored if name.startswith(PREFIX)}
    where = source.checkpoint
    if missing := sorted(wanted.keys() - ours):
        raise ValueError(f"{where} has no {missing[0]}, which a {source.card.family} model has")
    if unknown := sorted(ours - wanted.keys()):
        raise ValueError(
            f"{where} has {unknown[0]}, which a {source.card.family} model of Hugging Face does "
            "not have; it would be lost"
        )
    for name, piece in wanted.items():
        shape, expected = stored[name].global_shape, (*piece.of, *piece.shape)
        padded = piece.kind == "rows" and shape[0] >= expected[0] and shape[1:] == expected[1:]
        if shape != expected and not padded:
            raise ValueError(f"{name} of {where} is {shape}; by its recipe it would be {expected}")


def _write_side_files(source: Trained, part: Path, dtype: torch.dtype) -> None:
    of_tokenizer = source.like or _store_tokenizer(source)
    copy_side_files(of_tokenizer, part)
    raise_model_max_length(part, source.length)
    word = str(dtype).removeprefix("torch.")
    base = None if source.like is None else read_config(source.like)
    config = exported_config(base, source.card, source.rope, source.length, word)
    if base is None:
        special = special_tokens(part)
        config |= special
        write_json(part / GENERATION_CONFIG, special)
    write_json(part / CONFIG, config)


def _write_rotation(source: Trained, part: Path) -> None:
    """Write the rotation in effect; raise RotationError if transformers would have another.

    For a checkpoint that does not record it, it is what its rotation states.
    """
    recorded = rotation_before(source.checkpoint)
    length = source.rope.original_length or source.length
    trained = recorded or stated_rotation(
        source.rope, source.card.head_dim, length, source.card.pattern
    )
    require_as_computed(part, trained, length)
    content = {
        "checkpoint": source.checkpoint.name,
        "recorded_in_training": recorded is not None,
        "in_effect": trained.to_dict(),
    }
    write_json(part / ROTATION_FILE, content)


def _store_tokenizer(source: Trained) -> Path:
    """Return the tokenizer folder of the store that a model from scratch was trained on."""
    assert source.store is not None, "an import has its own"
    manifest = Manifest.load(source.store)
    require_tokenizer(manifest, source.facts, of=f"{source.checkpoint} was trained with")
    return manifest.tokenizer_path


def _write_weights(
    source: Trained,
    weights: Path,
    stored: Described,
    part: Path,
    dtype: torch.dtype | None,
    max_shard_gib: float,
) -> None:
    planned = {
        name: (WORDS[dtype or stored[piece.megatron].dtype], shape)
        for piece in weight_map(source.card)
        for name, shape in zip(piece.hugging_face, piece.shapes, strict=True)
    }
    shards = Shards(part, planned, max_shard_gib)
    for _, group in groupby(
        weight_map(source.card), key=lambda piece: (piece.at, piece.kind == "rows")
    ):
        together = list(group)
        parts = _read(weights, together, stored)
        for piece in together:
            tensors = to_hugging_face(piece, parts.pop(piece.megatron), source.card)
            for name, tensor in zip(piece.hugging_face, tensors, strict=True):
                shards.write(name, content(_cast(name, tensor, DTYPES[planned[name][0]])))
    shards.finish()


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype; raise ValueError if a number becomes infinite."""
    cast = tensor.to(dtype)
    if dtype != tensor.dtype and (lost := cast.isinf() & tensor.isfinite()).any():
        raise ValueError(
            f"{name} has {tensor[lost][0]:g}, beyond the {torch.finfo(dtype).max:g} that "
            f"{str(dtype).removeprefix('torch.')} reaches; export in bfloat16 or float32"
        )
    return cast


def _read(weights: Path, together: list[WeightShard], stored: Described) -> dict[str, Tensor]:
    """Return the parts of these pieces, with their padding."""
    wanted = {}
    for piece in together:
        whole, axes = stored[piece.megatron], range(len(piece.at))
        shape = (*(1 for _ in axes), *whole.global_shape[len(axes) :])
        wanted[piece.megatron] = ShardedTensor.from_rank_offsets(
            piece.megatron,
            torch.empty(shape, dtype=whole.dtype),
            *zip(axes, piece.at, piece.of, strict=True),
        )
    loaded = dist_checkpointing.load(
        dict(wanted),
        str(weights),
        validate_access_integrity=False,  # only some of the tensors are read
    )
    return {piece.megatron: loaded[piece.megatron].view(-1, *piece.shape[1:]) for piece in together}


def _stored(weights: Path) -> Described:
    """Return the tensors of a checkpoint by name, without their data."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(weights)):
        raise ValueError(
            f"{weights} is not in Megatron's format torch_dist (a stage under Megatron FSDP writes "
            "fsdp_dtensor); train its last steps without FSDP and export that"
        )
    described: Described = dist_checkpointing.load_tensors_metadata(str(weights))
    return described
