# SPDX-License-Identifier: Apache-2.0
"""The page docs/ladders.md: the figures of each shipped ladder next to those of its source.

    python -m tests.recipes.support.ladder_table

What a source states is in `stated_figures` beside this file, which `tests.recipes.test_ladders`
compares with the ladders; the rest of a row is the ladder's own.
"""

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipes.ladders import LADDERS
from recipes.spec.stage import Ladder, Stage
from recipes.spec.units import K
from tests.recipes.support.stated_figures import OTHERWISE, OUR_LENGTHS, STATED, TOTALS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "ladders.md"
OF_NO_SOURCE = ("tiny", "nemo")
"""Ladders whose figures no source states as those of a training."""
HEAD = (
    "ladder", "length", "rotation", "tokens per step", "steps", "tokens", "rate", "warm-up",
    "decay", "documents", "optimizer",
)  # fmt: skip
BLANK = "\N{SYMBOL FOR SPACE}"
"""Stands for a blank at which no line is broken."""
METHODS = {"default": "base", "yarn": "YaRN", "llama3": "llama3", "longrope": "LongRoPE"}

INTRODUCTION = """\
# Ladders and their sources

This page compares the figures of each shipped ladder with those of its source. It is generated
from the ladders and from a table of what the sources state; a test compares the two.

How to read a cell:

- A figure in plain type is stated by the source, and the ladder has the same.
- A figure in *italics* is ours: it is not stated by the source.
- Two figures, as in "400B; *419B*", are the source's and ours, which differ.

The columns:

- **length** is that of the training sequences, in binary units: 64K is 65,536 tokens. "For 128K"
  is a longer context that the stage trains for.
- **rotation** is the base of RoPE, or a method with its factor and the length before extension.
  YaRN, llama3 (the scaling of Llama 3.1) and LongRoPE change the frequencies; "base" alone
  changes only the base. Bases are decimal: 8M is 8,000,000.
- **tokens per step**, **steps** and **tokens** are decimal and rounded. Tokens per step are plain
  if the source states sequences per step; tokens are plain if it states them, or both steps and
  tokens per step. The row "all" has the total that the source states. A source that counts 4M
  tokens per step in binary has totals up to 5% below ours.
- **rate** is the peak and the final learning rate, **warm-up** its steps, **decay** the weight
  decay.
- **documents** says whether attention crosses the documents of a sequence (`across`, `within`),
  and **optimizer** whether a stage starts with new moments or carries those of the stage before.

[Sources, choices and departures](#sources-choices-and-departures) has the place of the figures in
each source.

## Figures
"""

SECOND = """\

## Sources, choices and departures

Cards are the models that a ladder is shipped for, those of the source first. "Ours" is what the
source does not state.
"""

OF_OURS = """\

## Ladders without a source's figures

`tiny` is for trying Longhaul on a CPU: all values are ours. `nemo` has the lengths of NeMo 2's
long-context recipes, which state no training schedule; its batch and rate are those of the first
stage of ProLong.

## Published ladders that are not shipped

- Nemotron Nano 2 ([arXiv 2508.14444](https://arxiv.org/abs/2508.14444)) and Nemotron 3: the
  models have no position encoding, so there is no rotation to extend. Most of their layers are
  Mamba-2, which recipes here do not train.
- GLM-4.5 ([arXiv 2508.06471](https://arxiv.org/abs/2508.06471)) and GLM-5 ([arXiv
  2602.15763](https://arxiv.org/abs/2602.15763)): the reports state lengths and tokens of the
  stages, but not the learning rate of each.
- Instella-MoE: the table of its stages was not found in a public source that could be read. Its
  stage of short text that follows the extension is what `recovers` of a stage is for
  ([data](data.md)); the last stage of `megabeam` has it.

To train such a schedule with one of the cards, write it as a ladder of your own
([guide](guide.md)).
"""


def page() -> str:
    """Return the whole page."""
    stated = {name: (lengths, place) for name, lengths, place in STATED}
    rows = [row for name, (lengths, _) in stated.items() for row in _rows(LADDERS[name], lengths)]
    lines = [HEAD, [":--" if at in (0, 2) else "--:" for at in range(len(HEAD))], *rows]
    figures = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    sections = [_section(LADDERS[name], place) for name, (_, place) in stated.items()]
    return "\n".join([INTRODUCTION, figures, SECOND, *sections]) + OF_OURS


def _rows(ladder: Ladder, lengths: dict[int, dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a row for each stage, and one for the total."""
    for at, stage in enumerate(ladder.stages):
        otherwise = OTHERWISE.get(ladder.name, {}).get(stage.seq_length, {})
        row = _Row(stage, lengths[stage.seq_length], otherwise)
        length_is_ours = stage.seq_length in OUR_LENGTHS.get(ladder.name, ())
        yield [f"`{ladder.name}`" if not at else "", *row.cells(length_is_ours=length_is_ours)]
    published = {name: tokens for name, tokens, _ in TOTALS}.get(ladder.name)
    if published is not None and len(ladder.stages) > 1:
        ours = sum(stage.steps * stage.tokens_per_batch for stage in ladder.stages)
        cell = _beside(decimal(published), decimal(ours))
        yield ["", "all", "", "", "", cell, *[""] * 5]


class _Row:
    """Cells of one stage: of each figure the source's, ours, or both."""

    def __init__(self, stage: Stage, stated: dict[str, Any], otherwise: dict[str, Any]) -> None:
        self.stage, self.stated, self.otherwise = stage, stated, otherwise

    def cells(self, *, length_is_ours: bool) -> list[str]:
        """Return the cells after the ladder's name."""
        stage = self.stage
        peak, end = stage.lr.peak, stage.lr.peak * stage.lr.final_ratio
        rates = [self._cell("peak", scientific(peak))]
        if scientific(end) != scientific(peak):
            rates.append(self._cell("end", scientific(end)))
        elif "end" in self.stated or "peak" not in self.stated:
            rates = [self._cell("peak", f"{scientific(peak)} constant")]
        else:
            rates.append("*constant*")
        return [
            self._length(ours=length_is_ours),
            self._rotation(),
            self._of("batch", "sequences", text=decimal(stage.tokens_per_batch)),
            self._steps(),
            self._tokens(),
            _join(rates, " to "),
            self._cell("warmup", f"{stage.lr.warmup_steps(stage.steps):,}"),
            self._cell("decay", f"{stage.weight_decay:g}"),
            self._cell("documents", stage.documents),
            self._cell("optimizer", stage.optimizer),
        ]

    def _cell(self, figure: str, text: str, show: Callable[[Any], str] = str) -> str:
        """Return ours as the source's if it is stated, in italics if not, or both."""
        if figure in self.otherwise:
            return _beside(show(self.otherwise[figure]), text)
        return text if figure in self.stated else f"*{text}*"

    def _of(self, *figures: str, text: str) -> str:
        return text if any(one in self.stated for one in figures) else f"*{text}*"

    def _length(self, *, ours: bool) -> str:
        stage = self.stage
        text = length(stage.seq_length)
        if "length" in self.otherwise:
            text = _beside(length(self.otherwise["length"]), text)
        elif ours:
            text = f"*{text}*"
        if stage.target_length == stage.seq_length:
            return text
        return f"{text} for {length(stage.target_length)}"

    def _rotation(self) -> str:
        """Return base alone, or method, factor, original length and base."""
        rope = self.stage.rope
        assert rope != "native"
        base = self._cell("base", decimal(rope.base, 4))
        if rope.method == "default":
            return f"base {base}"
        gene = self.stage.positions.kind == "gene"
        pieces = [
            "GeNE" if gene else self._cell("method", METHODS[rope.method]),
            self._cell("factor", f"by {rope.factor:g}"),
            self._cell("original", f"from {length(rope.original_length or 0)}"),
        ]
        return f"{_join(pieces, ' ')}, base {base}"

    def _steps(self) -> str:
        implied = "tokens" in self.stated and self._of("batch", "sequences", text="x") == "x"
        text = f"{self.stage.steps:,}"
        return text if implied else self._cell("steps", text)

    def _tokens(self) -> str:
        text = decimal(self.stage.tokens)
        per_step = "batch" in self.stated or "sequences" in self.stated
        if "tokens" in self.otherwise or not ("steps" in self.stated and per_step):
            return self._cell("tokens", text, decimal)
        return text


def length(tokens: int) -> str:
    """Return a length in binary units where it is a whole number of them."""
    if tokens % (K * K) == 0:
        return f"{tokens // K // K}M"
    return f"{tokens // K}K" if tokens % K == 0 else f"{tokens:,}"


def decimal(value: float, digits: int = 3) -> str:
    """Return a number in decimal units."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.{digits}g}{unit}"
    return f"{value:g}"


def scientific(rate: float) -> str:
    """Return a learning rate as a mantissa and an exponent."""
    mantissa, _, exponent = f"{rate:.4e}".partition("e")
    return f"{float(mantissa):g}e{exponent}" if rate else "0"


def _beside(theirs: str, ours: str) -> str:
    """Return the source's figure, and ours in italics if it reads differently."""
    return theirs if theirs == ours else f"{theirs}; *{ours}*"


def _join(pieces: list[str], between: str) -> str:
    """Join pieces, and runs of italics to one."""
    return between.join(pieces).replace(f"*{between}*", between)


def _section(ladder: Ladder, place: str) -> str:
    """Return the list of one ladder: source, place, cards, and what is ours."""
    total = {name: where for name, _, where in TOTALS}.get(ladder.name, "")
    if total and total.partition(",")[0] not in place:
        place += f"; total: {total}"
    lines = [f"- Source: {ladder.source}.", f"- Place of the figures: {place}."]
    if ladder.starts_from:
        lines.append(f"- The source starts from {ladder.starts_from}.")
    lines.append(f"- Cards: {', '.join(ladder.cards)}.")
    for title, sentences in (("Ours", ladder.ours), ("Departures", ladder.departures)):
        if sentences:
            lines += [f"- {title}:", *(f"    - {sentence}" for sentence in sentences)]
    return "\n".join([f"### {ladder.name}", "", *map(_item, lines), ""])


def _item(line: str) -> str:
    """Return an item of a list, wrapped, with links to papers."""
    paper = r"(?:arXiv )?(?<![\d/.])(\d{4}\.\d{5})(?!\d)"
    linked = re.sub(paper, r"[arXiv\0\1](https://arxiv.org/abs/\1)".replace("\\0", BLANK), line)
    indent = " " * (line.index("-") + 2)
    wrapped = textwrap.fill(
        linked, 98, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapped.replace(BLANK, " ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
