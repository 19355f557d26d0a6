# SPDX-License-Identifier: Apache-2.0
"""Find the model, rotation and origin of a checkpoint from the files next to it.

A stage's folder has its resolved recipe (`config.yaml`) next to `checkpoints/`. The recipe states
the shape and the start of the stage (`resume.start`). These starts are followed back, stage by
stage, to the import that the first stage started from, whose `hugging_face/` keeps the original
files.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.layers import LayerPattern
from data.files.json_object import json_object
from data.files.nearest import near_path
from data.files.user_file import read_yaml
from recipes.checkpoints.files import HUGGING_FACE
from recipes.checkpoints.marker import (
    MARKER,
    NATIVE_CONTEXT,
    RECIPE,
    checkpoint_facts,
    checkpoints_in,
    is_marked,
    newest_checkpoint,
)
from recipes.hugging_face.config import ROTATION, card_of, read_config, require_same
from recipes.spec.families import FAMILIES
from recipes.spec.model_card import ModelCard
from recipes.spec.moved_names import current_name

OF_RECIPES = {
    "_target_", "apply_rope_fusion", "attention_kernel", "bias_activation_fusion",
    "bias_dropout_fusion", "cp", "cross_entropy_loss_fusion", "ffn_hidden_size",
    "gradient_accumulation_fusion", "hidden_size", "init_method_std", "kv_channels",
    "layernorm_epsilon", "masked_softmax_fusion", "moe_ffn_hidden_size", "moe_grouped_gemm",
    "moe_permute_fusion", "moe_router_fusion", "moe_router_topk", "num_attention_heads",
    "num_layers", "num_moe_experts", "num_query_groups", "offload", "pattern",
    "persist_layer_norm",
    "recompute", "rope", "seq_length", "share_embeddings_and_output_weights", "tiling",
    "transformer_engine", "use_cpu_initialization", "vocab_size",
}  # fmt: skip
"""Fields of a model's config that recipes set; the card has them, or they concern kernels."""

_OF_TRAINING = {"attention_dropout", "hidden_dropout", "moe_aux_loss_coeff", "moe_z_loss_coeff"}
"""Other fields that a user may set and that do not change what a trained model computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A checkpoint with all facts that its export needs."""

    checkpoint: Path
    card: ModelCard
    rope: RopeScaling
    length: int
    """Maximum context in tokens."""
    like: Path | None
    """Folder with the original config.json and tokenizer; None for a model from scratch."""
    store: Path | None
    """Token store that it was trained on; None for an import."""
    facts: dict[str, Any]
    """Those of the checkpoint's marker."""


def trained(source: Path, like: Path | None = None) -> Trained:
    """Return the checkpoint in a stage folder, its `checkpoints`, one of these, or an import.

    `like` is a Hugging Face folder that replaces the import's. Raises ValueError if there is no
    complete checkpoint, if the import cannot be found, and if the model in `like` has another shape
    (for an import also if it has another rotation).
    """
    checkpoint = checkpoint_of(source)
    if (checkpoint / HUGGING_FACE).is_dir():
        return _imported(checkpoint, like)
    recipe = _recipe(_stage(checkpoint))
    facts = _facts(checkpoint)
    rope = RopeScaling.from_dict(facts["rope"])
    length = _length(recipe, rope)
    like = like or _origin(recipe)
    card = _card(recipe, rope, length)
    if like is not None:
        of_like = _published(like)
        require_same(card, of_like, f"the model of {like}", but=ROTATION)
        unchanged = rope == of_like.native_rope
        length = max(length, of_like.native_context) if unchanged else length
    return Trained(
        checkpoint=checkpoint,
        card=card,
        rope=rope,
        length=length,
        like=like,
        store=Path(recipe["data"]["store"]),
        facts=facts,
    )


def checkpoint_of(source: Path) -> Path:
    """Return the newest complete checkpoint of a stage, of its `checkpoints`, or the one named.

    Raises ValueError if there is none; for a run, with its stages that have one.
    """
    if not source.is_dir():
        what = f"{source} is a file" if source.exists() else f"there is no folder {source}"
        raise ValueError(
            f"{what}{near_path(source)}; name the folder of a trained stage or of an import"
        )
    checkpoint = newest_checkpoint(checkpoints_in(source))
    if checkpoint is None:
        saved = _saved_stages(source)
        if saved:
            named = ", ".join(shlex.quote(str(stage)) for stage in saved)
            raise ValueError(f"{source} is a run; name one of its stages: {named}")
        has_no = "is a run without a" if (source / "stages").is_dir() else "has no"
        raise ValueError(
            f"{source} {has_no} complete checkpoint; name the folder of a trained stage or of an "
            "import"
        )
    return checkpoint


def _saved_stages(run: Path) -> list[Path]:
    """Return the stages of a run that have a complete checkpoint, the newest one last.

    They are in the order of the run's record; those that were trained apart come after, by time.
    """
    listed = json_object(run / "run.json").get("stages")
    order = listed if isinstance(listed, list) else []
    found = []
    for folder in run.glob("stages/*/checkpoints"):
        markers = [one / MARKER for one in folder.iterdir() if is_marked(one)]
        if markers:
            name = folder.parent.name
            place = order.index(name) if name in order else len(order)
            found.append((place, max(one.stat().st_mtime for one in markers), folder.parent))
    return [stage for *_, stage in sorted(found)]


def published_folder(checkpoint: Path) -> Path | None:
    """Return the folder with the published files of the model that a checkpoint comes from.

    None for a model from scratch, and if the import is not there any more.
    """
    if (checkpoint / HUGGING_FACE).is_dir():
        return checkpoint / HUGGING_FACE
    try:
        return _origin(_recipe(_stage(checkpoint)))
    except (OSError, ValueError):
        return None


def _imported(checkpoint: Path, like: Path | None) -> Trained:
    card = _published(checkpoint / HUGGING_FACE)
    if like is not None:
        other = _published(like).trained_at(card.stated_context)
        require_same(replace(card, name="the import"), other, f"the model of {like}")
    return Trained(
        checkpoint=checkpoint,
        card=card,
        rope=card.native_rope,
        length=card.native_context,
        like=like or checkpoint / HUGGING_FACE,
        store=None,
        facts=_facts(checkpoint),
    )


def card_in(folder: Path, name: str, hf_id: str | None = None) -> ModelCard:
    """Return the card of a Hugging Face folder, with the native context that its import records.

    Raises ValueError for a model that is not supported.
    """
    record = checkpoint_facts(folder.parent) if folder.name == HUGGING_FACE else None
    card = card_of(read_config(folder), name, hf_id)
    return card.trained_at((record or {}).get(NATIVE_CONTEXT))


def _published(folder: Path) -> ModelCard:
    try:
        return card_in(folder, folder.name)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _facts(checkpoint: Path) -> dict[str, Any]:
    facts = checkpoint_facts(checkpoint)
    assert facts is not None, "newest_checkpoint returned it"
    return facts


def _stage(checkpoint: Path) -> Path:
    """Return the stage folder of a checkpoint."""
    return checkpoint.absolute().parents[1]


def _recipe(stage: Path) -> dict[str, Any]:
    try:
        recipe: dict[str, Any] = read_yaml(stage / RECIPE)
        recipe["model"]["config"], recipe["data"]["store"], recipe["resume"]["start"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{stage / RECIPE} is not the resolved recipe of a stage ({error!r}); export from the "
            "folder that the stage was trained in"
        ) from error
    return recipe


def _length(recipe: dict[str, Any], rope: RopeScaling) -> int:
    """Return the context that a stage trains for: its target if it trains short."""
    if recipe["data"].get("rope_scale") is not None:
        return rope.reach or int(recipe["data"]["seq_length"])
    skips = recipe["data"].get("positions")
    if skips is not None:
        return int(skips["target_length"])
    return int(recipe["data"].get("recovers") or recipe["data"]["seq_length"])


def _origin(recipe: dict[str, Any]) -> Path | None:
    """Return the `hugging_face` folder of the import that the stages started from, or None."""
    for start in _starts(recipe):
        if (start / HUGGING_FACE).is_dir():
            return start / HUGGING_FACE
    return None


def _starts(recipe: dict[str, Any]) -> Iterator[Path]:
    """Yield the start checkpoint of this stage, of the one before, and so on."""
    while recipe["resume"]["start"] is not None:
        start = Path(recipe["resume"]["start"])
        found = newest_checkpoint(start)
        if found is None and not (start / "weights").is_dir():
            raise ValueError(
                f"the stage started from {start}, which no longer has a checkpoint; name a Hugging "
                "Face folder of the same model with --like"
            )
        yield found or start
        if found is None or not (_stage(found) / RECIPE).is_file():
            return
        recipe = _recipe(_stage(found))


def _family(target: str) -> str:
    """Return the family of one of our config classes."""
    for family in FAMILIES.values():
        if family.config_class == current_name(target):
            return family.name
    raise ValueError(f"{RECIPE} has a model of {target}, whose family cannot be exported")


def _pattern(content: dict[str, Any] | None) -> LayerPattern | None:
    """Return the pattern of layers that a resolved recipe states; None if all are alike."""
    if content is None:
        return None
    stated = _stated(content)
    own = stated.get("local_rope")
    return LayerPattern.from_dict(stated if own is None else {**stated, "local_rope": _stated(own)})


def _stated(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a node of the tree that are set."""
    return {key: value for key, value in content.items() if key != "_target_" and value is not None}


def _card(recipe: dict[str, Any], rope: RopeScaling, length: int) -> ModelCard:
    """Return the shape that a resolved recipe states."""
    config = recipe["model"]["config"]
    for name in sorted(config.keys() - OF_RECIPES - _OF_TRAINING):
        raise ValueError(
            f"{RECIPE} of {recipe['log']['name']} sets model.config.{name}, which no recipe sets "
            "and the family's Hugging Face model may not support; it could compute something "
            "else"
        )
    try:
        return ModelCard(
            name=str(recipe["log"]["name"]),
            family=_family(config["_target_"]),
            layers=config["num_layers"],
            hidden=config["hidden_size"],
            ffn_hidden=config["ffn_hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_query_groups"],
            head_dim=config["kv_channels"],
            experts=config.get("num_moe_experts") or 0,
            experts_per_token=config.get("moe_router_topk") or 0,
            vocab=config["vocab_size"],
            tied_embeddings=config["share_embeddings_and_output_weights"],
            norm_epsilon=float(config["layernorm_epsilon"]),
            init_std=float(config["init_method_std"]),
            native_context=length,
            native_rope=rope,
            pattern=_pattern(config.get("pattern")),
            hf_id=None,
            source=RECIPE,
        )
    except KeyError as missing:
        raise ValueError(f"{RECIPE} of {recipe['log']['name']} has no {missing}") from None
