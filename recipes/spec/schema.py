# SPDX-License-Identifier: Apache-2.0
"""Decode JSON and YAML as typed records with pydantic; errors are sentences with their place.

A record is a dataclass or a pydantic model, and its annotations are the schema: nothing is
converted but a whole number to a float, a list to a tuple, and a date from ISO 8601.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from recipes.spec.suggest import did_you_mean

T = TypeVar("T")
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A float that JSON states as null if it is NaN."""
MOST_SHOWN = 5
"""Mistakes that an error lists."""
OF_A_UNION = ("str", "int", "bool")
"""Ends of a place that name the kind of a union that was tried."""
LONGEST_SHOWN = 60
"""Characters of a value that an error repeats."""
EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping of fields",
    "date_from_datetime_parsing": "a date",
    "date_parsing": "a date",
    "date_type": "a date",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "model_type": "a mapping of fields",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
}
"""What a field of the wrong type needs, by pydantic's type of error."""


class NotJsonError(ValueError):
    """Raised for text that is not JSON."""


def decode_json(
    kind: type[T], text: bytes | str, where: str, *, unknown: Literal["ignore", "forbid"] = "forbid"
) -> T:
    """Return the record that JSON text states.

    Raises NotJsonError, or ValueError with a sentence for each mistake, which begins with `where`.
    """
    try:
        record: T = _adapter(cast(Any, kind)).validate_json(text, strict=True, extra=unknown)
    except ValidationError as error:
        mistakes = list(_mistakes(kind, where, error))
    else:
        return record
    more = len(mistakes) - MOST_SHOWN
    raise ValueError(
        "; ".join([*mistakes[:MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])])
    )


def decode(kind: type[T], value: Any, where: str) -> T:
    """Return the record that a value of a YAML file states; raise ValueError as `decode_json`."""
    return decode_json(kind, json.dumps(value, default=_as_json), where)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _as_json(value: Any) -> str:
    """Return the text of a YAML value that JSON does not have."""
    return value.isoformat() if isinstance(value, date) else repr(value)


def _mistakes(kind: Any, where: str, error: ValidationError) -> Iterator[str]:
    """Yield a sentence for each mistake: its place, the value, and what is expected.

    Unknown fields come first, since a misspelled one is missing as well.
    """
    others: list[str] = []
    lacking: dict[str, list[str]] = {}
    unions: dict[str, list[str]] = {}
    for mistake in error.errors():
        if mistake["type"] == "json_invalid":
            raise NotJsonError(f"{where} is not JSON: {mistake['ctx']['error']}") from None
        place = tuple(part for part in mistake["loc"] if part != "[key]")
        at = f"{where}: {_dotted(place)}" if place else where
        above = f"{where}: {_dotted(place[:-1])}" if place[:-1] else where
        if mistake["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            near = did_you_mean(str(place[-1]), _fields(kind, place[:-1]))
            yield f"{above} has no field {str(place[-1])!r}; {near}"
        elif mistake["type"] == "missing" and isinstance(place[-1], int):
            others.append(f"{above} has too few values; add value {place[-1] + 1}")
        elif mistake["type"] == "missing":
            lacking.setdefault(above, []).append(repr(place[-1]))
        elif place and place[-1] in OF_A_UNION and mistake["type"] in EXPECTED:
            beginning = f"{above} is {_short(mistake['input'])}"
            unions.setdefault(beginning, []).append(EXPECTED[mistake["type"]])
        elif isinstance(mistake["input"], dict | list) and mistake["type"] == "value_error":
            others.append(f"{at}: {_expected(mistake)}")
        else:
            others.append(f"{at} is {_short(mistake['input'])}; {_expected(mistake)}")
    yield from (f"{at} lacks {', '.join(names)}; add it" for at, names in lacking.items())
    yield from (f"{at}; expected {' or '.join(kinds)}" for at, kinds in unions.items())
    yield from others


def _expected(mistake: Mapping[str, Any]) -> str:
    """Return the end of a sentence: what a field needs."""
    if mistake["type"] in EXPECTED:
        return f"expected {EXPECTED[mistake['type']]}"
    if mistake["type"] == "too_long":
        return f"expected {mistake['ctx']['max_length']} values"
    return mistake["msg"].removeprefix("Value error, ").replace("Input", "it")


def _dotted(place: Sequence[int | str]) -> str:
    """Return a place as text: `stages[1].loss`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def _fields(kind: Any, place: Sequence[int | str]) -> list[str]:
    """Return the names of the fields of the record at a place below `kind`."""
    for part in place:
        kind = _record_of(kind)
        kind = get_args(kind)[-1] if get_origin(kind) is dict else get_type_hints(kind)[str(part)]
    return list(get_type_hints(_record_of(kind)))


def _record_of(kind: Any) -> Any:
    """Return the type without None."""
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not NoneType)
    return kind


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
