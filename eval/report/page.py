# SPDX-License-Identifier: Apache-2.0
"""Build `report.html` from the result files of a run folder: one page, no network, no script.

All sentences of the page are computed here from the figures it shows, in both directions: a longer
context that does not help is reported as such. A missing part is replaced by a sentence.
"""

import importlib.resources
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from data.files.whole import write_bytes
from eval.report import plots
from eval.report.base_plot import against_base
from eval.report.evaluations import (
    RangeRow,
    comparable,
    in_words,
    range_bounds,
    range_rows,
    same_settings,
)
from eval.report.gains import base_sentence, gain_sentences
from eval.run_folder import (
    Evaluation,
    Passkey,
    StageRecord,
    StageResults,
    base_results,
    load,
)

SAME_NATS = 0.005  # losses are shown with two decimals; closer ones read the same
MISSING = "-"
MFU = "causal MFU"


@dataclass(frozen=True)
class Cell:
    """A table cell: its text, whether to mark it, and its shade (0 to 1)."""

    text: str
    marked: bool = False
    shade: float = 0.0


@dataclass(frozen=True)
class Row:
    """A table row, named by a stage or a prompt length."""

    name: str
    cells: list[Cell]
    note: str = ""


@dataclass(frozen=True)
class Grid:
    """The passkey grid of one stage as two tables of the same shape."""

    stage: str
    sentence: str
    depths: list[str]
    hits: list[Row]
    nats: list[Row]


def build(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run and its picture next to it, and return the path of the report.

    Args:
        out: The file to write, or a folder for it; `report.html` in the run folder if not given.
    """
    record, stages = load(run)
    target = target_of(run, out)
    compared, others, outdated = comparable(run, [*base_results(run), *stages])
    evaluations = [each.evaluation for each in compared if each.evaluation is not None]
    position = plots.by_position(compared)
    base = against_base(compared)
    training = plots.training(stages)
    cost_heads, costs = _costs(stages)
    page = _template().render(
        record=record,
        stages=stages,
        verdict=verdict(evaluations),
        outdated=outdated,
        names=[each.name for each in compared],
        bases=[base_sentence(each, each.base) for each in evaluations if each.base is not None],
        base_svg=base and plots.inline_svg(base, "Stages next to the base model"),
        gains=list(gain_sentences(evaluations)),
        trends=trends(evaluations),
        position_svg=position and plots.inline_svg(position, "Loss by position"),
        training_svg=training and plots.inline_svg(training, "Loss by tokens seen"),
        held_out=_held_out(evaluations, others),
        bounds=[span(*bound) for bound in range_bounds(evaluations)],
        means=_means(evaluations, compared),
        others=[other_settings(each, among=(*evaluations, *others)) for each in others],
        unevaluated=[stage.name for stage in stages if stage.evaluation is None],
        grids=[_grid(each, each.passkey) for each in evaluations if each.passkey is not None],
        without_grid=[each.stage for each in evaluations if each.passkey is None],
        facts_of_stages=_facts(stages),
        cost_heads=cost_heads,
        costs=costs,
        untrained=[stage.name for stage in stages if not stage.steps],
        colors=plots.SERIES,
    )
    write_bytes(target, page.encode())
    if position is not None:
        write_bytes(target.parent / "by_position.svg", plots.standalone(position, "svg"))
        write_bytes(target.parent / "by_position.png", plots.standalone(position, "png"))
    if base is not None:
        write_bytes(target.parent / "against_base.svg", plots.standalone(base, "svg"))
        write_bytes(target.parent / "against_base.png", plots.standalone(base, "png"))
    return target


def target_of(run: Path, out: Path | None) -> Path:
    """Return the file that `build` writes for these arguments."""
    target = run / "report.html" if out is None else out
    return target / "report.html" if target.is_dir() else target


def span(start: int, stop: int) -> str:
    """Return a range of positions as text."""
    return f"{start:,}-{stop:,}"


def verdict(evaluations: Sequence[Evaluation]) -> str:
    """Return a sentence on whether the last stage beats the first at the longest positions."""
    bases = [each for each in evaluations if each.base is not None]
    evaluations = [each for each in evaluations if each.base is None]
    if not evaluations:
        return "No stage has been evaluated yet, so nothing can be said about the longer context."
    if len(evaluations) == 1 and bases:
        gained = list(gain_sentences([*bases, *evaluations]))
        return " ".join(gained) or (
            f"{evaluations[0].stage} and the base model were measured with different settings, so "
            "they are not compared."
        )
    bounds, rows = range_bounds(evaluations), range_rows(evaluations)
    if len(evaluations) == 1:
        return (
            f"Only {evaluations[0].stage} has been evaluated so far: "
            "there is nothing to compare it with."
        )
    ends = (evaluations[0], evaluations[-1])
    if not same_settings(ends):
        ways = "; ".join(in_words(each, among=ends) for each in ends)
        return (
            f"{rows[0].stage} and {rows[-1].stage} were measured with different settings ({ways}), "
            "so they are not compared."
        )
    first, last = rows[0], rows[-1]
    for bound, before, after in reversed(list(zip(bounds, first.means, last.means, strict=True))):
        if math.isfinite(before) and math.isfinite(after):
            return _compared(span(*bound), first.stage, before, last.stage, after)
    return (
        f"{first.stage} and {last.stage} have no range of positions in common to compare them at."
    )


def _compared(where: str, first: str, before: float, last: str, after: float) -> str:
    has = f"At positions {where} the loss of the last stage, {last}, is {after:.2f} nats per token"
    if abs(before - after) < SAME_NATS:
        return f"{has}, the same as that of the first, {first}: the longer context brought nothing."
    if after < before:
        return f"{has}, {before - after:.2f} below the {before:.2f} of the first, {first}."
    return (
        f"{has}, {after - before:.2f} above the {before:.2f} of the first, {first}: "
        "it is not better there."
    )


def other_settings(evaluation: Evaluation, among: Iterable[Evaluation] = ()) -> str:
    """Return one line with the results of an evaluation with other settings or another step."""
    where = "" if evaluation.step is None else f" at step {evaluation.step:,}"
    means = ", ".join(
        f"{_number(mean.loss, '{:.2f}')} at {span(mean.start, mean.stop)}"
        for mean in evaluation.ranges
    )
    settings = in_words(evaluation, among)
    return f"{evaluation.stage}{where}, {settings}: {means or 'no ranges'}"


def trends(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return a sentence per evaluation on its loss from the first to the last range."""
    sentences = []
    for each in evaluations:
        ranges = [mean for mean in each.ranges if math.isfinite(mean.loss)]
        if len(ranges) < 2:
            continue
        near, far = ranges[0], ranges[-1]
        change = far.loss - near.loss
        how = f"rises by {change:.2f}" if change > 0 else f"falls by {-change:.2f}"
        if abs(change) < SAME_NATS:
            how = "stays the same"
        sentences.append(
            f"{each.stage}: {how} from positions {span(near.start, near.stop)} "
            f"to {span(far.start, far.stop)}."
        )
    return sentences


def passkey_sentence(passkey: Passkey) -> str:
    """Return a sentence with the result of a passkey grid."""
    prompts = passkey.trials * len(passkey.lengths) * len(passkey.depths)
    hits = sum(round(share * passkey.trials) for row in passkey.hits for share in row)
    nats = [value for row in passkey.nats for value in row if math.isfinite(value)]
    if not prompts:
        return "No prompt was tried."
    if hits:
        said = f"{hits} of {prompts:,} prompts are answered exactly"
    else:
        said = f"Nothing is retrieved: none of {prompts:,} prompts is answered exactly"
    if not nats:
        return f"{said}."
    mean = sum(nats) / len(nats)
    return (
        f"{said}; an answer token costs {mean:.2f} nats, a guess of its digits "
        f"{passkey.chance_nats:.2f}."
    )


def _template() -> jinja2.Template:
    text = importlib.resources.files("eval.report").joinpath("report.html.jinja").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["dash"] = lambda text: text.replace("-", "\N{EN DASH}")
    return environment.from_string(text)


def _held_out(evaluations: Sequence[Evaluation], others: Sequence[Evaluation]) -> list[str]:
    """Return the measured documents as text, with the stores if there are several."""
    several = len({each.store for each in (*evaluations, *others)} - {""}) > 1
    measured = {
        (each.documents, each.tokens, each.eval_length, each.store if several else "")
        for each in evaluations
    }
    return [
        f"{documents:,} held-out documents{f' of {store}' if store else ''}, {tokens:,} tokens, "
        f"read to position {length:,}"
        for documents, tokens, length, store in sorted(measured)
    ]


def _means(evaluations: Sequence[Evaluation], stages: Sequence[StageResults]) -> list[Row]:
    """Return rows of mean losses; if settings differ, rows state theirs and no lowest is marked."""
    rows: list[RangeRow] = range_rows(evaluations)
    same = same_settings(evaluations)
    notes = {
        each.stage: "" if same else f" ({in_words(each, among=evaluations)})"
        for each in evaluations
    }
    columns = list(zip(*(row.means for row in rows), strict=True))
    best = [
        min((mean for mean in column if math.isfinite(mean)), default=0.0) for column in columns
    ]
    table = {
        row.stage: [
            Cell(
                _number(mean, "{:.2f}") + _number(error, " \N{PLUS-MINUS SIGN} {:.2f}", ""),
                marked=same and round(mean, 2) == round(least, 2),
            )
            if math.isfinite(mean)
            else Cell(MISSING)
            for mean, error, least in zip(row.means, row.errors, best, strict=True)
        ]
        for row in rows
    }
    return [
        Row(stage.name, table[stage.name], note=notes[stage.name])
        for stage in stages
        if stage.name in table
    ]


def _grid(evaluation: Evaluation, passkey: Passkey) -> Grid:
    def rows(values: Sequence[Sequence[float]], cell: Callable[[float], Cell]) -> list[Row]:
        return [
            Row(
                f"{length:,}",
                [cell(value) if math.isfinite(value) else Cell(MISSING) for value in row],
                note="beyond its length" if length > evaluation.seq_length else "",
            )
            for length, row in zip(passkey.lengths, values, strict=True)
        ]

    def hit(share: float) -> Cell:
        return Cell(f"{round(share * passkey.trials)}/{passkey.trials}", shade=_share(share))

    def nat(value: float) -> Cell:
        chance = passkey.chance_nats
        return Cell(f"{value:.2f}", shade=_share(1 - value / chance) if chance > 0 else 0.0)

    return Grid(
        stage=evaluation.stage,
        sentence=passkey_sentence(passkey),
        depths=[f"{depth:.0%}" for depth in passkey.depths],
        hits=rows(passkey.hits, hit),
        nats=rows(passkey.nats, nat),
    )


def _facts(stages: Sequence[StageResults]) -> list[Row]:
    """Return rows of facts of the stages; cells that differ from the stage before are marked."""
    rows: list[Row] = []
    before: list[str] | None = None
    for stage in stages:
        if stage.record is None:
            rows.append(Row(stage.name, [], note="has not been started"))
            continue
        texts = _fact_texts(stage.record)
        cells = [
            Cell(text, marked=before is not None and text != before[i])
            for i, text in enumerate(texts)
        ]
        rows.append(Row(stage.name, cells))
        before = texts
    return rows


def _fact_texts(record: StageRecord) -> list[str]:
    rope = dict(record.rope)
    method = str(rope.pop("method", MISSING))
    base, factor = rope.pop("base", math.nan), rope.pop("factor", math.nan)
    more = ", ".join(f"{key} {_value(value)}" for key, value in rope.items() if value is not None)
    layout = " ".join(f"{key.upper()} {_value(value)}" for key, value in record.layout.items())
    return [
        f"{record.seq_length:,}",
        method,
        _value(base),
        _value(factor),
        more or MISSING,
        layout or MISSING,
        _number(record.tokens, "{:,.0f}"),
        _number(record.tokens_per_batch, "{:,.0f}"),
        record.start or MISSING,
    ]


def _costs(stages: Sequence[StageResults]) -> tuple[list[str], list[Row]]:
    """Return the column heads and the rows of the cost of each stage."""
    heads = ["steps", "tokens", "time", "tokens/s per rank", MFU, "peak memory", "last loss"]
    rows = [Row(stage.name, _cost_cells(stage)) for stage in stages if stage.steps]
    mfu = heads.index(MFU)
    if all(row.cells[mfu].text == MISSING for row in rows):
        del heads[mfu]
        for row in rows:
            del row.cells[mfu]
    return heads, rows


def _cost_cells(stage: StageResults) -> list[Cell]:
    steps = stage.steps
    settled = steps[1:] or steps  # the first step of a stage includes start-up costs
    seconds = [step.seconds for step in steps if math.isfinite(step.seconds)]
    peaks = [step.peak_memory_bytes for step in steps if math.isfinite(step.peak_memory_bytes)]
    return [
        Cell(f"{len(steps):,}"),
        Cell(_number(sum(stage.step_tokens()), "{:,.0f}")),
        Cell(_duration(sum(seconds)) if seconds else MISSING),
        Cell(_number(_median([step.tokens_per_second_per_rank for step in settled]), "{:,.0f}")),
        Cell(_number(_median([step.mfu for step in settled]), "{:.1%}")),
        Cell(f"{max(peaks) / 2**30:.2f} GiB" if peaks else MISSING),
        Cell(_number(steps[-1].loss, "{:.2f}")),
    ]


def _median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes = f"{rest // 60} min {rest % 60:02} s"
    return f"{hours} h {minutes}" if hours else minutes


def _number(value: float, form: str, otherwise: str = MISSING) -> str:
    return form.format(value) if math.isfinite(value) else otherwise


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.10g}" if math.isfinite(value) else MISSING
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _share(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 3)
