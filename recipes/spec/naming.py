# SPDX-License-Identifier: Apache-2.0
"""Names and default folders of recipes, runs and stages."""

import re
from pathlib import Path

from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Ladder, Stage
from recipes.spec.units import K, M

RUNS = Path("runs")
STORES = Path("stores")
MODELS = Path("models")
NAME = re.compile(r"[a-z0-9][a-z0-9_.]*")
"""A name of a card or a ladder, which folders, jobs and recipes are named by."""
BUDGET_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
"""Units of token budgets, which papers count in powers of ten; lengths and batches are binary."""


def family_name(card: ModelCard, ladder: Ladder) -> str:
    """Return `<card>_<ladder>`, or the card's name if the ladder was made for it."""
    return card.name if card.name == ladder.name else f"{card.name}_{ladder.name}"


def recipe_name(card: ModelCard, ladder: Ladder, stage: Stage) -> str:
    """Return `<card>_<ladder>_<length>`.

    The name of a ladder of one stage may already end in the context, as in `ultralong_1m`; it is
    then not repeated.
    """
    family = family_name(card, ladder)
    if len(ladder.stages) == 1 and ladder.name.endswith(f"_{length_word(stage.target_length)}"):
        return family
    return f"{family}_{length_word(stage.seq_length)}"


def length_word(tokens: int) -> str:
    """Return an exact length in the largest binary unit it is a multiple of: 512, 64k, 1m."""
    for unit, letter in ((M, "m"), (K, "k")):
        if tokens and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


def length_shown(tokens: int) -> str:
    """Return an exact length for display: 512, 38,400, 64K, 1M."""
    word = length_word(tokens)
    return f"{tokens:,}" if word.isdigit() else word.upper()


def length_from(word: str) -> int:
    """Return the number of tokens in a word of the command line: 512, 38,400, 64K, 1M.

    Raises ValueError for any other word.
    """
    found = re.fullmatch(r"(\d{1,15}|\d{1,3}(?:,\d{3}){1,4})([KM]?)", word.strip(), re.A | re.I)
    if found is None:
        raise ValueError(
            "a length is a number, with K or M for binary thousands and millions, as 64K; "
            f"not {word}"
        )
    number, unit = found.groups()
    tokens = int(number.replace(",", "")) * {"": 1, "K": K, "M": M}[unit.upper()]
    if not tokens:
        raise ValueError(f"a length is at least one token; not {word}")
    return tokens


def budget_from(word: str) -> int:
    """Return the tokens of a budget: 5B, 0.5T, 400M or 1,000,000; K to T are powers of ten."""
    found = re.fullmatch(
        r"(\d{1,18}(?:\.\d{1,18})?|\d{1,3}(?:,\d{3}){1,5})([KMBT]?)", word.strip(), re.A | re.I
    )
    if found is None or ("." in word and not found[2]):
        raise ValueError(
            f"a budget is a number of tokens, as 1B, 0.5T, 400M or 1,000,000; not {word}"
        )
    number, power = found[1].replace(",", ""), BUDGET_UNITS[found[2].upper()]
    tokens = round(float(number) * power) if "." in number else int(number) * power
    if not tokens:
        raise ValueError(f"a budget is at least one token; not {word}")
    return tokens


def budget_word(tokens: int) -> str:
    """Return an exact budget in the largest unit it is a multiple of: 1B, 1500M, 369001."""
    for unit, size in reversed(BUDGET_UNITS.items()):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    raise AssertionError("the unit of one divides every number")


def run_folder(card: ModelCard, ladder: Ladder) -> Path:
    """Return the default folder of a run of the ladder."""
    return RUNS / family_name(card, ladder)


def store_folder(card: ModelCard) -> Path:
    """Return the default folder of the token store of a card."""
    return STORES / card.name


def stage_folder(run: Path, name: str) -> Path:
    """Return the folder of one stage of a run."""
    return run / "stages" / name


def start_folder(card: ModelCard, ladder: Ladder, stage: Stage, run: Path) -> Path | None:
    """Return the folder of the checkpoint that a stage starts from, None for random weights."""
    if stage.start == "scratch":
        return None
    if stage.start == "card":
        return Path(card.start) if card.start else MODELS / card.name
    before = ladder.stages[ladder.stages.index(stage) - 1]
    return stage_folder(run, recipe_name(card, ladder, before)) / "checkpoints"


def counted(number: int, what: str) -> str:
    """Return a number with its noun: `1 GPU`, `2 micro-batches`."""
    plural = "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{plural if number != 1 else ''}"


def amount(tokens: int) -> str:
    """Return a number of tokens or weights to three figures: 369K, 2.1B, 1.5T."""
    for unit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if tokens >= unit:
            shown = tokens / unit
            return f"{shown:,.0f}{letter}" if shown >= 100 else f"{shown:.3g}{letter}"
    return str(tokens)
