# SPDX-License-Identifier: Apache-2.0
"""A ladder of one's own, in a YAML or a Python file.

A YAML file has the fields of `Ladder` and `Stage`, with lengths such as 64K and budgets such as 1B.
Base, partial rotary factor and original length of a rotation are the card's unless stated. A Python
file defines one `Ladder`; it is run as any program of its author, by the command that names it.
"""

import importlib.util
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator

from custom_modules.rope.config import RopeScaling
from data.files.nearest import near_path
from data.files.user_file import read_yaml
from recipes.ladders import LADDERS
from recipes.notation import gate, mix, rope_file
from recipes.notation.rope import rope_from, rope_with
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import NAME, budget_from, budget_word, length_from, length_word
from recipes.spec.schema import decode
from recipes.spec.stage import (
    OWN_SOURCE,
    Cosine,
    DocumentPolicy,
    Ladder,
    Linear,
    OptimizerState,
    Stage,
)
from recipes.spec.train_short import Positions

SUFFIXES = (".yaml", ".yml", ".py")
SCHEDULES: dict[str, type[Cosine] | type[Linear]] = {"cosine": Cosine, "linear": Linear}


def _length(value: Any) -> Any:
    return length_from(value) if isinstance(value, str) else value


def _budget(value: Any) -> Any:
    return budget_from(value) if isinstance(value, str) else value


def _number(value: Any) -> Any:
    """Return the number of a text such as 1e-5, which YAML reads as a number only as 1.0e-5."""
    stated = isinstance(value, str) and re.fullmatch(r"[0-9.]+e[+-]?[0-9]+", value, re.I)
    try:
        return float(value) if stated else value
    except ValueError:
        return value


Length = Annotated[int, BeforeValidator(_length)]
Budget = Annotated[int, BeforeValidator(_budget)]
Number = Annotated[float, BeforeValidator(_number)]


@dataclass(frozen=True, kw_only=True)
class _Rate:
    """Learning rate of a stage."""

    peak: Number
    schedule: Literal["cosine", "linear"] = "cosine"
    final_ratio: Number = 0.1
    warmup_ratio: Number = 0.1


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """A stage as the file states it."""

    seq_length: Length
    tokens: Budget
    tokens_per_batch: Length
    lr: _Rate
    rope: str | dict[str, Any] = "native"
    documents: DocumentPolicy = "across"
    positions: dict[str, Any] = field(default_factory=dict)
    mix: dict[str, Any] | None = None
    recovers: Length | None = None
    adam_beta2: Number = 0.95
    weight_decay: Number = 0.1
    start: Literal["scratch", "card", "previous"] | None = None
    optimizer: OptimizerState = "new"
    gate: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Ladder:
    """A ladder as the file states it."""

    name: str
    stages: tuple[_Stage, ...]
    source: str = OWN_SOURCE
    cards: tuple[str, ...] = ()
    data: str = ""
    starts_from: str = ""
    native_context: Length | None = None
    suites: tuple[dict[str, Any], ...] = ()


def read(path: Path, card: ModelCard | None = None) -> Ladder:
    """Return the ladder of a file, with what its rotations leave out from the card.

    Raises ValueError, with the path and the stage, for anything that a ladder cannot have.
    """
    _require_file(path)
    ladder = _of_python(path) if path.suffix == ".py" else _of_yaml(path, card)
    if NAME.fullmatch(ladder.name) is None:
        raise ValueError(
            f"{path}: name is {ladder.name!r}; folders and jobs are named by it, so use lower-case "
            "letters, digits, dots and _"
        )
    return ladder


def cards(path: Path) -> tuple[str, ...]:
    """Return the cards that a file names; its rotations may leave out what they have.

    Raises ValueError for a file that is not a ladder. Its stages are not checked.
    """
    _require_file(path)
    if path.suffix == ".py":
        return _of_python(path).cards
    return _stated(read_yaml(path), path).cards


def _require_file(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        kind = "a folder" if path.is_dir() else "not a ladder file"
        *most, last = SUFFIXES
        raise ValueError(f"{path} is {kind}; a ladder is a file *{', *'.join(most)} or *{last}")
    if not path.is_file():
        raise ValueError(
            f"there is no ladder file {path}{near_path(path)}"
            f"; `longhaul ladders new {shlex.quote(str(path))}` writes one"
        )


def _of_python(path: Path) -> Ladder:
    """Return the only `Ladder` of its own that a Python file defines."""
    shipped = LADDERS.values()
    values = _run(path.resolve(), path.stat().st_mtime_ns)
    ladders = [value for value in values if not any(value is one for one in shipped)]
    if len(ladders) != 1:
        raise ValueError(
            f"{path} defines {len(ladders)} ladders; it must define one `Ladder`, or name another "
            "file"
        )
    return ladders[0]


class _LeavesNothing(SourceFileLoader):
    """Imports a file without a `__pycache__` beside it: the folder is its author's."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Keep no bytecode."""


@cache
def _run(path: Path, _: int) -> tuple[Ladder, ...]:
    """Run a Python file, once per version of it, and return its ladders; it prints to stderr."""
    name = f"ladder_file_{path.stem}"
    loader = _LeavesNothing(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the author's program raises
        del sys.modules[name]
        where = getattr(error, "lineno", None) or _line(error, path)
        raise ValueError(f"{path} line {where}: {type(error).__name__}: {error}") from error
    found = [value for value in vars(module).values() if isinstance(value, Ladder)]
    return tuple({id(value): value for value in found}.values())


def _line(error: BaseException, path: Path) -> int:
    """Return the last line of a file that an exception passed through."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if os.path.abspath(trace.tb_frame.f_code.co_filename) == os.path.abspath(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _of_yaml(path: Path, card: ModelCard | None) -> Ladder:
    return _of_content(read_yaml(path), path, card)


def from_text(text: str, path: Path, card: ModelCard | None = None) -> Ladder:
    """Return the ladder of a YAML text that is going to be a file."""
    return _of_content(yaml.safe_load(text), path, card)


def _stated(content: Any, path: Path) -> _Ladder:
    if not isinstance(content, dict):
        kind = "empty" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{path} is {kind}, not a mapping; `longhaul ladders new FILE` writes one")
    return decode(_Ladder, content, str(path))


def _of_content(content: Any, path: Path, card: ModelCard | None) -> Ladder:
    stated = _stated(content, path)
    card = card and card.trained_at(stated.native_context)
    stages = []
    for number, stage in enumerate(stated.stages):
        try:
            stages.append(_stage(stage, number, path.parent, card))
        except ValueError as error:
            raise ValueError(f"{path}: stages[{number}]: {error}") from None
    try:
        return Ladder(
            name=stated.name,
            source=stated.source,
            stages=tuple(stages),
            cards=stated.cards,
            data=stated.data,
            starts_from=stated.starts_from,
            native_context=stated.native_context,
            suites=gate.read_suites(stated.suites, path.parent),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _stage(stated: _Stage, number: int, folder: Path, card: ModelCard | None) -> Stage:
    rate = SCHEDULES[stated.lr.schedule](
        peak=stated.lr.peak,
        final_ratio=stated.lr.final_ratio,
        warmup_ratio=stated.lr.warmup_ratio,
    )
    return Stage(
        seq_length=stated.seq_length,
        rope="native" if stated.rope == "native" else _rope(stated.rope, folder, card),
        tokens=stated.tokens,
        tokens_per_batch=stated.tokens_per_batch,
        lr=rate,
        documents=stated.documents,
        positions=_positions(stated.positions, stated.seq_length),
        mix=None if stated.mix is None else mix.read(stated.mix),
        recovers=stated.recovers,
        adam_beta2=stated.adam_beta2,
        weight_decay=stated.weight_decay,
        start=stated.start or ("previous" if number else "card"),
        optimizer=stated.optimizer,
        gate=gate.read(stated.gate, folder),
    )


def _positions(stated: Mapping[str, Any], seq_length: int) -> Positions:
    target = (
        {"target_length": _length(stated["target_length"])} if "target_length" in stated else {}
    )
    found = decode(Positions, {**stated, **target}, "positions")
    if found.target_length is not None and found.target_length < seq_length:
        raise ValueError(
            f"positions.target_length is {found.target_length:,} and seq_length {seq_length:,}; "
            "positions are drawn from a longer context, so raise it"
        )
    return found


def _rope(stated: str | dict[str, Any], folder: Path, card: ModelCard | None) -> RopeScaling:
    """Return a rotation by word, by file (relative to the ladder's folder) or by its fields."""
    if isinstance(stated, str) and (stated.endswith(".json") or "/" in stated):
        return rope_file.read(folder / stated)
    if isinstance(stated, dict) and stated.get("method") == "native":
        raise ValueError(
            "rope has the method native, which is no method: the card's own rotation is written as "
            "rope: native"
        )
    of_card = {} if card is None else of_native(card)
    try:
        if isinstance(stated, str):
            trained = None if card is None else card.native_context
            own = None if card is None else card.native_rope
            return rope_from(stated, of_card, own, trained)
        return rope_with({name: _number(value) for name, value in stated.items()}, of_card)
    except TypeError as error:
        missing = "base" if "base" in str(error) else "method"
        of_a_card = "" if missing == "method" else ", or name the card: --card"
        raise ValueError(f"rope has no {missing}; state it{of_a_card}") from None


def of_native(card: ModelCard) -> dict[str, Any]:
    """Return the fields of a rotation that a file or a word need not repeat for a card."""
    native = card.native_rope
    return {
        "base": native.base,
        "partial_rotary_factor": native.partial_rotary_factor,
        "interleaved": native.interleaved,
        "original_length": native.original_length or card.native_context,
    }


def template(path: Path) -> str:
    """Return a commented file of two stages, named after its path."""
    text = (resources.files("recipes.ladders") / "template.yaml").read_text("utf-8")
    return _filled(text, _names(path))


def of_one_stage(
    path: Path, card: ModelCard, *, seq_length: int, tokens: int, tokens_per_batch: int
) -> str:
    """Return a commented file of one stage for a card, stretched by YaRN beyond its context.

    A card without weights of its own is trained from scratch, with its rotation as it is. Raises
    ValueError if the batch is not a multiple of the length.
    """
    native = card.native_rope
    trained = native.original_length or card.native_context
    from_scratch = card.hf_id is None and not card.path
    reach = 0 if native.method == "llama3" else native.reach or 0  # its factor does not tell
    stretched = seq_length > max(card.native_context, reach) and not from_scratch
    rope = f"{{method: yarn, factor: {_factor(trained, seq_length)!r}}}" if stretched else "native"
    text = (resources.files("recipes.ladders") / "one_stage.yaml").read_text("utf-8")
    values = {
        "CARD": card.word,
        "SEQ_LENGTH": length_word(seq_length).upper(),
        "ROPE": rope,
        "TOKENS_PER_BATCH": length_word(tokens_per_batch).upper(),
        "BUDGET": budget_word(tokens),
        "START": "scratch" if from_scratch else "card",
        "PEAK": "1.0e-3" if from_scratch else "1.0e-5",
        **_names(path),
    }
    text = _filled(text, values)
    if card.stated_context is not None:
        text = text.replace("\nstages:", f"native_context: {card.stated_context}\n\nstages:")
    from_text(text, path, card)
    return text


def _factor(trained: int, seq_length: int) -> float | int:
    """Return the factor that stretches a trained context to a length, not a token less."""
    if seq_length % trained == 0:
        return seq_length // trained
    factor = seq_length / trained
    return (
        factor if math.floor(trained * factor) >= seq_length else math.nextafter(factor, math.inf)
    )


def _names(path: Path) -> dict[str, str]:
    name = re.sub(r"[^a-z0-9_]+", "_", path.stem.lower()).strip("_") or "mine"
    return {"LADDER_FILE": shlex.quote(str(path)), "LADDER_NAME": name}


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with words in capitals replaced, in one pass: values may contain such words."""
    return re.sub(rf"\b({'|'.join(values)})\b", lambda found: values[found[0]], text)
