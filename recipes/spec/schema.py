# SPDX-License-Identifier: Apache-2.0
"""Decode JSON and YAML as typed records with pydantic; errors are sentences with their place.

A record is a dataclass or a pydantic model, and its annotations are the schema: nothing is
converted but a whole number to a float, a list to a tuple, and a date from its text.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
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
DEEPEST = 50
"""Levels of mappings and lists in a value; records have fewer than ten."""
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
    "string_too_short": "text that is not empty",
    "tuple_type": "a list",
    "list_type": "a list",
}
"""Expected type of a field, by pydantic's type of error."""


class NotJsonError(ValueError):
    """Raised for text that is not JSON."""


def decode_json(
    kind: type[T],
    text: bytes | str,
    where: str,
    *,
    unknown: Literal["ignore", "forbid"] = "forbid",
    unlisted: Collection[str] = (),
) -> T:
    """Return the record that JSON text states.

    Fields that only the program sets are `unlisted`: they are not suggested for a misspelled name.
    Raises NotJsonError, or ValueError with a sentence for each mistake, which begins with `where`.
    """
    try:
        record: T = _adapter(cast(Any, kind)).validate_json(text, strict=True, extra=unknown)
    except ValidationError as error:
        mistakes = list(_mistakes(kind, where, error, unlisted))
    else:
        return record
    more = len(mistakes) - MOST_SHOWN
    raise ValueError(
        "; ".join([*mistakes[:MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])])
    )


def decode(
    kind: type[T],
    value: Any,
    where: str,
    *,
    unknown: Literal["ignore", "forbid"] = "forbid",
    unlisted: Collection[str] = (),
) -> T:
    """Return the record that a value of a YAML or JSON file states; see `decode_json`.

    Raises ValueError also for what JSON does not have: a key that is not text, a date, a set.
    """
    text = json.dumps(_plain(value, where, ()))
    return decode_json(kind, text, where, unknown=unknown, unlisted=unlisted)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _plain(value: Any, where: str, place: tuple[int | str, ...]) -> Any:
    """Return a value that JSON can state; raise ValueError with the place of one that it cannot."""
    at = f"{where}: {_dotted(place)}" if place else where
    if len(place) > DEEPEST:
        raise ValueError(f"{at} is nested too deeply; a record has fewer than {DEEPEST} levels")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{at} has the key {_short(key)}, which is not text; quote it")
        return {key: _plain(each, where, (*place, key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, where, (*place, i)) for i, each in enumerate(value)]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"{at} is {_short(value)}, which is neither text nor a number; quote it")


def _mistakes(
    kind: Any, where: str, error: ValidationError, unlisted: Collection[str]
) -> Iterator[str]:
    """Yield a sentence for each mistake: its place, the value, and what is expected.

    Unknown fields come first, since a misspelled one is missing as well.
    """
    others: dict[str, None] = {}
    lacking: dict[str, list[str]] = {}
    unions: dict[str, list[str]] = {}
    for mistake in error.errors():
        if mistake["type"] == "json_invalid":
            raise NotJsonError(f"{where} is not JSON: {mistake['ctx']['error']}") from None
        place = tuple(part for part in mistake["loc"] if part != "[key]")
        at = f"{where}: {_dotted(place)}" if place else where
        above = f"{where}: {_dotted(place[:-1])}" if place[:-1] else where
        if mistake["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            names = [name for name in _fields(kind, place[:-1]) if name not in unlisted]
            near = did_you_mean(str(place[-1]), names) if names else "leave it out"
            yield f"{above} has no field {str(place[-1])!r}; {near}"
        elif mistake["type"] == "missing" and isinstance(place[-1], int):
            others[f"{above} has too few values; expected {_size(kind, place[:-1])}"] = None
        elif mistake["type"] == "missing":
            lacking.setdefault(above, []).append(repr(place[-1]))
        elif mistake["type"] in EXPECTED and _is_union(_type_at(kind, place[:-1])):
            beginning = (
                f"{above} is {_short(mistake['input'])}"  # the last part is one of its types
            )
            unions.setdefault(beginning, []).append(EXPECTED[mistake["type"]])
        elif isinstance(mistake["input"], dict | list) and mistake["type"] == "value_error":
            others[f"{at}: {_expected(mistake)}"] = None
        else:
            others[f"{at} is {_short(mistake['input'])}; {_expected(mistake)}"] = None
    for at, names in lacking.items():
        yield f"{at} lacks {', '.join(names)}; add {'them' if names[1:] else 'it'}"
    for at, (*most, last) in unions.items():
        yield f"{at}; expected {', '.join(most)} or {last}"
    yield from others


def _expected(mistake: Mapping[str, Any]) -> str:
    """Return the end of a sentence: what a field needs."""
    if mistake["type"] in EXPECTED:
        return f"expected {EXPECTED[mistake['type']]}"
    if mistake["type"] == "too_long":
        return f"expected {mistake['ctx']['max_length']} values"
    return str(mistake["msg"]).removeprefix("Value error, ").replace("Input", "it")


def _dotted(place: Sequence[int | str]) -> str:
    """Return a place as text: `stages[1].loss`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def _type_at(kind: Any, place: Sequence[int | str]) -> Any:
    """Return the annotation of the value at a place below `kind`; None if it cannot be found."""
    for part in place:
        kind = _bare(kind)
        inner = get_args(kind)
        if get_origin(kind) is dict:
            kind = inner[1]
        elif get_origin(kind) is list or inner[1:] == (...,):
            kind = inner[0]
        elif get_origin(kind) is tuple:
            kind = inner[part] if isinstance(part, int) and part < len(inner) else None
        else:
            kind = _hints(kind).get(str(part))
    return _bare(kind)


def _bare(kind: Any) -> Any:
    """Return an annotation without its metadata, and without None if one other type is left."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        types = [each for each in get_args(kind) if each is not NoneType]
        return _bare(types[0]) if len(types) == 1 else kind
    return kind


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True) if isinstance(kind, type) else {}


def _fields(kind: Any, place: Sequence[int | str]) -> list[str]:
    """Return the names of the fields of the record at a place below `kind`."""
    return list(_hints(_type_at(kind, place)))


def _size(kind: Any, place: Sequence[int | str]) -> int:
    """Return the values of the tuple at a place below `kind`."""
    return len(get_args(_type_at(kind, place)))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
