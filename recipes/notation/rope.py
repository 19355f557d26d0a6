# SPDX-License-Identifier: Apache-2.0
"""Rotations as one word of the command line: `yarn:factor=8,beta_fast=16`, or a file."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from custom_modules.rope.config import RopeMethod, RopeScaling
from recipes.notation import rope_file
from recipes.spec.naming import length_from
from recipes.spec.suggest import did_you_mean

_TAKES = ("factor=8", "original_length=8192", "base=1e6")


def rope_from(
    word: str,
    of_model: Mapping[str, Any],
    own: RopeScaling | None = None,
    trained: int | None = None,
) -> RopeScaling:
    """Return the rotation that `word` describes: METHOD[:KEY=VALUE,...], or a file.

    `of_model` are fields that the word need not repeat: base, partial_rotary_factor, and
    original_length if the method takes one. `before=own` stretches `own`, the model's rotation,
    further instead of replacing it, from the context that the model was `trained` at. Raises
    ValueError for an unknown key and for values out of the method's range.
    """
    method, _, rest = word.partition(":")
    if Path(word).is_file() or method.endswith(".json"):
        return rope_file.read(Path(word))
    given: dict[str, Any] = {"method": method}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r} of {word!r} is not KEY=VALUE, as {', '.join(_TAKES)}")
        if key in given:
            raise ValueError(f"{word!r} states {key} twice; leave one of them out")
        if key == "before":
            if value != "own" or own is None:
                raise ValueError(f"before is {value!r}; it must be own, the model's own rotation")
            given[key] = own
        else:
            given[key] = _value(key, value)
    if "before" in given and "original_length" not in given:
        if trained is None:
            raise ValueError(
                f"{word!r} stretches the model's own rotation but has no original_length, the "
                "context in tokens that the model was trained at; state it"
            )
        given["original_length"] = trained
    return rope_with(given, of_model)


def rope_with(given: Mapping[str, Any], of_model: Mapping[str, Any]) -> RopeScaling:
    """Return the rotation with the fields that are given, and the model's for those left out.

    Raises ValueError for an unknown field, a value out of the method's range, and no factor.
    """
    method = given.get("method")
    known = {field.name for field in fields(RopeScaling)}
    strange = [key for key in given if key not in known]
    if strange:
        raise ValueError(f"a rotation has no {strange[0]!r}; {did_you_mean(strange[0], known)}")
    if method in get_args(RopeMethod) and method != "default" and "factor" not in given:
        raise ValueError(
            f"rotation {method} has no factor by which to stretch the context; write "
            f"{method}:factor=8, or factor: 8 in a file"
        )
    inherited = {key: value for key, value in of_model.items() if key not in given}
    if method == "default" or "before" in given:
        inherited.pop("original_length", None)
    if isinstance(given.get("original_length"), str):
        given = {**given, "original_length": length_from(given["original_length"])}
    return RopeScaling(**{**inherited, **given})


def _value(key: str, text: str) -> Any:
    """Return the value of the text: JSON (a number, true or false) or a length."""
    if key == "original_length" and text[-1:].upper() in ("K", "M"):
        return length_from(text)
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{key} is {text!r}; it takes a number, true or false") from None
