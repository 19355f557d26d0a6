# SPDX-License-Identifier: Apache-2.0
"""Records are decoded strictly; every mistake is a sentence with its place, and none is a crash."""

import datetime
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field

from recipes.spec.schema import NotJsonError, Number, decode, decode_json


@dataclass(frozen=True)
class Inner:
    loss: Number
    name: str = ""


@dataclass(frozen=True)
class Outer:
    name: str
    count: int = 1
    pair: tuple[int, int] = (0, 0)
    stages: tuple[Inner, ...] = ()
    listed: list[Inner] = field(default_factory=list)
    by_name: dict[str, Inner] = field(default_factory=dict)
    either: dict[str, str | int] = field(default_factory=dict)
    perhaps: Inner | None = None
    flag: bool = False
    filled: Annotated[str, Field(min_length=1)] = "x"

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count is {self.count}; it counts")


def test_values_become_the_types_of_their_fields():
    text = (
        '{"name": "a", "pair": [1, 2], "stages": [{"loss": null}, {"loss": 1}], '
        '"by_name": {"b": {"loss": 0.5, "name": "c"}}, "either": {"x": 1, "y": "2"}}'
    )
    found = decode_json(Outer, text, "file")
    assert found.pair == (1, 2)
    assert math.isnan(found.stages[0].loss)
    assert found.stages[1] == Inner(1.0)
    assert found.by_name == {"b": Inner(0.5, "c")}
    assert found.either == {"x": 1, "y": "2"}
    assert found.perhaps is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "f is []; expected a mapping of fields"),
        ({}, "f lacks 'name'; add it"),
        (
            {"nme": "a"},
            "f has no field 'nme'; did you mean name or by_name?; f lacks 'name'; add it",
        ),
        ({"name": 1}, "f: name is 1; expected text"),
        ({"name": "a", "count": True}, "f: count is True; expected a whole number"),
        ({"name": "a", "count": 1.0}, "f: count is 1.0; expected a whole number"),
        ({"name": "a", "count": -1}, "f: count is -1; it counts"),
        ({"name": "a", "flag": "no"}, "f: flag is 'no'; expected true or false"),
        ({"name": "a", "filled": ""}, "f: filled is ''; expected text that is not empty"),
        ({"name": "a", "pair": []}, "f: pair has too few values; expected 2"),
        ({"name": "a", "pair": [1, 2, 3]}, "f: pair is [1, 2, 3]; expected 2 values"),
        ({"name": "a", "pair": [1, "x"]}, "f: pair[1] is 'x'; expected a whole number"),
        ({"name": "a", "stages": [{}]}, "f: stages[0] lacks 'loss'; add it"),
        ({"name": "a", "stages": [{"los": 1}]}, "f: stages[0] has no field 'los'; did you mean"),
        ({"name": "a", "listed": [{"los": 1}]}, "f: listed[0] has no field 'los'; did you mean"),
        ({"name": "a", "by_name": {"b": {"los": 1}}}, "f: by_name.b has no field 'los'; did you"),
        ({"name": "a", "perhaps": {"los": 1}}, "f: perhaps has no field 'los'; did you mean loss"),
        ({"name": "a", "either": {"x": []}}, "f: either.x is []; expected text or a whole number"),
        ({"name": "a", "by_name": {"int": 3}}, "f: by_name.int is 3; expected a mapping of fields"),
        ({"name": "a", "either": {1: "x"}}, "f: either has the key 1, which is not text; quote it"),
        ({"name": "a", "either": {"x": {2}}}, "f: either.x is {2}, which is neither text nor a"),
        ({"name": datetime.date(2026, 1, 1)}, "f: name is datetime.date(2026, 1, 1), which is"),
        ({"name": b"a"}, "f: name is b'a', which is neither text nor a number; quote it"),
    ],
    ids=str,
)
def test_a_mistake_is_a_sentence_with_its_place(value, said):
    with pytest.raises(ValueError, match="f") as told:
        decode(Outer, value, "f")
    assert str(told.value).startswith(said)


def test_mistakes_beyond_the_first_five_are_counted():
    with pytest.raises(ValueError, match=r"; and 3 more$"):
        decode(Outer, {"name": "a", "stages": [{} for _ in range(8)]}, "f")


def test_unknown_fields_are_ignored_where_asked_and_unlisted_ones_not_suggested():
    assert decode(Outer, {"name": "a", "nme": 1}, "f", unknown="ignore").name == "a"
    with pytest.raises(ValueError, match=r"has no field 'nme'; .* by_name"):
        decode(Outer, {"name": "a", "nme": 1}, "f", unlisted=("name",))


def test_text_that_is_not_json_is_another_error():
    with pytest.raises(NotJsonError, match="line 3 is not JSON"):
        decode_json(Outer, '{"name": ', "line 3")


def test_a_value_is_refused_that_is_nested_too_deeply():
    value: Any = "a"
    for _ in range(200):
        value = {"a": value}
    with pytest.raises(ValueError, match="is nested too deeply; a record has fewer than 50 levels"):
        decode(Outer, {"name": "a", "either": value}, "f")


def test_text_with_bytes_of_another_encoding_is_read():
    assert decode(Outer, {"name": "st\udcffre"}, "f").name == "st\\udcffre"


def test_yaml_s_own_types_are_refused_with_their_place():
    content = yaml.safe_load("name: a\neither: {no: 1, 2024-01-01: 5}")
    with pytest.raises(ValueError, match="f: either has the key False, which is not text"):
        decode(Outer, content, "f")
