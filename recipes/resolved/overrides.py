# SPDX-License-Identifier: Apache-2.0
"""Apply overrides of the command line to a recipe: `key=value` words, a rotation, a device."""

import difflib
import inspect
import logging
import re
from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import fiddle as fdl
import nemo_run
from nemo_run.cli.cli_parser import CLIException, parse_cli_args

from custom_modules.rope.config import RopeScaling
from recipes.nemo2.cpu import on_cpu
from recipes.nemo2.settings import as_config_node
from recipes.notation.rope import rope_from
from recipes.resolved.check import check
from recipes.resolved.read import device_of, trained_length
from recipes.resolved.values import alternatives
from recipes.spec.naming import length_from

LENGTHS = (
    "seq_length", "original_length", "target_length", "source_length", "tokens_per_batch",
    "loss_tile", "mlp_tile",
)  # fmt: skip
"""Fields of a recipe in tokens, which may be written as lengths such as 8K."""


def override(recipe: nemo_run.Partial, words: Sequence[str]) -> nemo_run.Partial:
    """Return the recipe with nemo-run's `key=value` words applied and checked again."""
    for word in words:
        if word.startswith("-") or "=" not in word:
            raise ValueError(
                f"{word!r} is not an override; expected KEY=VALUE, for example trainer.max_steps=20"
            )
    # nemo-run logs its exceptions with the whole recipe; the message below replaces them.
    logging.getLogger("nemo_run.cli.cli_parser").setLevel(logging.CRITICAL)
    own = fdl.build(recipe.model.config.rope)
    words = [_in_tokens(word) for word in words]
    try:
        recipe = parse_cli_args(recipe, list(words))
    except (CLIException, AttributeError, TypeError, IndexError) as error:
        raise ValueError(_not_applied(recipe, words, error)) from error
    if str(recipe.trainer.devices).isdigit():  # nemo-run reads a number as text here
        recipe.trainer.devices = int(recipe.trainer.devices)
    _validate_within_the_stage(recipe, words)
    check(recipe)
    _require_rotation(recipe, own)
    return recipe


def _validate_within_the_stage(recipe: nemo_run.Partial, words: Sequence[str]) -> None:
    """Validate after the last step if overrides leave fewer steps than the interval.

    Lightning refuses an interval longer than the number of steps that samples are drawn for.
    """
    trainer = recipe.trainer
    if any(word.startswith("trainer.val_check_interval") for word in words):
        return
    interval, steps = trainer.val_check_interval, trainer.max_steps
    if isinstance(interval, int) and isinstance(steps, int) and 0 < steps < interval:
        trainer.val_check_interval = steps


def _in_tokens(word: str) -> str:
    """Return an override with a length such as 8K written as a number, for nemo-run."""
    key, _, value = word.partition("=")
    if key.rpartition(".")[2] in LENGTHS and re.fullmatch(r"[\d,]+[KM]|\d+(,\d{3})+", value, re.I):
        return f"{key}={length_from(value)}"
    return word


def _require_rotation(recipe: nemo_run.Partial, own: RopeScaling) -> None:
    """Raise ValueError if the recipe's rotation was changed to one that does not fit it."""
    chosen, context = fdl.build(recipe.model.config.rope), trained_length(recipe)
    if chosen == own:
        return
    require_same_rotary_dims(chosen, own, "the recipe's own rotation")
    if (chosen.original_length or 0) > context:
        raise ValueError(
            f"the rotation's original_length is {chosen.original_length:,}, above the {context:,} "
            "tokens that the stage is for; write the context before extension"
        )


def require_same_rotary_dims(chosen: RopeScaling, model: RopeScaling, what: str) -> None:
    """Raise ValueError if other dimensions of a head would be rotated than in the model."""
    for name in ("partial_rotary_factor", "interleaved"):
        of_chosen, of_model = getattr(chosen, name), getattr(model, name)
        if of_chosen != of_model:
            raise ValueError(
                f"{name} of the rotation is {of_chosen} and that of {what} {of_model}; it is a "
                "fact of the model's weights, so leave it alone"
            )


def _not_applied(recipe: nemo_run.Partial, words: Sequence[str], error: Exception) -> str:
    """Return a message with the word that could not be applied and the nearest key.

    Keys are checked first, since the error contains the whole recipe with the applied values.
    """
    for word in words:
        key = word.partition("=")[0]
        node: Any = recipe
        for part in key.rstrip("+-*/|&").split("."):
            known = [name for name in dir(node) if not name.startswith("_")]
            name = part.partition("[")[0]
            if isinstance(node, nemo_run.Config | nemo_run.Partial) and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {key.replace(name, near[0])}?" if near else ""
                return f"the recipe has no {key}{hint}"
            node = getattr(node, name, None)
    for word in words:
        key, _, value = word.partition("=")
        if repr(value)[1:-1] in str(error):
            node, takes = recipe, ""
            for part in key.rstrip("+-*/|&").split("."):
                takes = _takes(node, part)
                node = getattr(node, part.partition("[")[0], None)
            return f"{key} cannot be {value!r}: {_kind(node)}{takes}"
    return f"cannot apply {' '.join(words)}: {str(error).splitlines()[0][:200]}"


def _kind(value: Any) -> str:
    return f"it is {value!r} now, of type {type(value).__name__}"


def _takes(node: Any, name: str) -> str:
    """Return the end of a message with the values that a field's annotation admits, or ''."""
    if not isinstance(node, nemo_run.Config | nemo_run.Partial):
        return ""
    # Not get_type_hints: NeMo's classes quote names that they import only for type checkers.
    parameter = inspect.signature(node.__fn_or_cls__).parameters.get(name)
    annotation = parameter and parameter.annotation
    kinds = tuple(kind for kind in alternatives(annotation) if kind is not NoneType)
    if all(kind in (int, float) for kind in kinds):
        return "; it takes a number"
    if all(get_origin(kind) is Literal for kind in kinds):
        choices = [choice for kind in kinds for choice in get_args(kind)]
        return f"; it is one of {', '.join(map(str, choices))}"
    return ""


def with_rope(recipe: nemo_run.Partial, word: str) -> nemo_run.Partial:
    """Return the recipe with the rotation that `word` describes (`recipes.notation.rope`).

    Fields that the word omits are those of the recipe's own rotation.
    """
    own = fdl.build(recipe.model.config.rope)
    kept = ("base", "partial_rotary_factor", "interleaved", "original_length")
    of_model = {name: getattr(own, name) for name in kept if name in own.non_default_fields()}
    recipe.model.config.rope = as_config_node(rope_from(word, of_model, own=own))
    _require_rotation(recipe, own)
    return recipe


def on_device(recipe: nemo_run.Partial, device: str | None) -> None:
    """Put the recipe on the requested device; raise ValueError if this machine lacks it."""
    laid_out_for = device_of(recipe)
    if device == "cpu" and laid_out_for == "cuda":
        on_cpu(recipe)
        check(recipe)
    elif device == "cuda" and laid_out_for == "cpu":
        raise ValueError(f"{recipe.log.name} is laid out for CPU ranks; it has no GPU layout")
