# SPDX-License-Identifier: Apache-2.0
"""Build `report.html` from the result files of a run folder: one page, no network, no script.

All sentences of the page are computed here from the figures it shows, in both directions: a longer
context that does not help is reported as such. A missing part is replaced by a sentence.
"""

import importlib.resources
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from eval.report import plots
from eval.report.base_plot import against_base
from eval.report.cells import MISSING, PLUS_MINUS, Cell, Row, number
from eval.report.context_tables import (
    context_figure,
    context_heads,
    context_rows,
    context_sentences,
    measured,
    scored_tokens,
    shaded,
)
from eval.report.data_mix import mix_as_read
from eval.report.evaluations import (
    RangeRow,
    comparable,
    in_words,
    range_bounds,
    range_rows,
    same_settings,
)
from eval.report.gain_part_tables import PART_HEADS, part_rows
from eval.report.gains import (
    DifferenceRow,
    base_sentence,
    difference_rows,
    difference_text,
    gain_sentences,
    last_sentence,
)
from eval.report.how_measured import HEADS, provenance_rows
from eval.report.page_files import require_own, target_of, write_page
from eval.report.page_json import page_json
from eval.report.palette import DARK, LINES, PALETTE, SERIES
from eval.report.passkey_tables import grid_tables
from eval.report.ruler_tables import outdated_scores, read_ruler, ruler_figures, ruler_part
from eval.report.short_tables import SHORT_HEADS, short_rows, short_sentences
from eval.report.stage_tables import costs, facts
from eval.report.suite_scores import read_suites, suite_table
from eval.report.while_training import while_training
from eval.run_folder import (
    Evaluation,
    StageResults,
    base_results,
    load,
)

SAME_NATS = 0.005  # losses are shown with two decimals; closer ones read the same


def build(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run, its numbers and its figures; return the path of the report.

    Args:
        out: The file to write, or a folder for it; `report.html` in the run folder if not given.
    """
    record, stages = load(run)
    target = target_of(run, out)
    require_own(target)
    compared, others, outdated = comparable(run, [*base_results(run), *stages])
    scored = read_ruler(run)
    outdated = [*outdated, *outdated_scores(run, scored)]
    evaluations = [each.evaluation for each in compared if each.evaluation is not None]
    names = [each.name for each in compared]
    ruler = ruler_part(scored, names)
    training = plots.inline_pair(
        lambda narrow: plots.training(stages, len(compared) - len(stages), narrow=narrow),
        "Training: loss in nats per token, and learning rate, by tokens seen",
    )
    differences, suites, mix = (
        difference_rows(evaluations),
        read_suites(run),
        mix_as_read(run, stages),
    )
    parts = page_parts(compared, stages, others, outdated) | {
        "record": record,
        "runs": [("", str(run), record)],
        "verdict": verdict(evaluations),
        "base_figures": [("", figure)] if (figure := base_figure(compared)) else [],
        "gains": list(gain_sentences(evaluations)),
        "trainings": [("", training)] if training else [],
        "differences": difference_table(differences),
        "suites": suite_table(suites, names),
        "ruler": ruler,
        "mix": mix,
    }
    figures = {
        "against_base": against_base(compared),
        "by_position": plots.by_position(compared),
        "context_gain": context_figure(compared),
        "training": plots.training(stages, len(compared) - len(stages)),
        **ruler_figures(ruler, names),
    }
    numbers = page_json(
        parts,
        compared=compared,
        stages=stages,
        others=others,
        differences=differences,
        suites=suites,
        ruler=scored,
        mix=mix,
    )
    write_page(target, render(parts), numbers, figures)
    return target


def base_figure(compared: Sequence[StageResults], first: int = 0, label: str = "") -> str | None:
    """Return the stages of a run next to its base model, for a page, in colours from `first` on."""
    return plots.inline_pair(
        lambda narrow: against_base(compared, first, narrow=narrow),
        f"Stages{f' of {label}' if label else ''} next to the base model: "
        "loss in nats per token by range of positions in the window",
    )


def page_parts(
    compared: Sequence[StageResults],
    stages: Sequence[StageResults],
    others: Sequence[Evaluation],
    outdated: Sequence[str],
) -> dict[str, Any]:
    """Return the parts of a page that are the same for one run and for several."""
    evaluations = [each.evaluation for each in compared if each.evaluation is not None]
    cost_heads, cost_rows = costs(stages)
    return {
        "stages": stages,
        "outdated": outdated,
        "names": [each.name for each in compared],
        "bases": [base_sentence(each, each.base) for each in evaluations if each.base is not None],
        "base_figures": [],
        "gains": [],
        "trends": trends(evaluations),
        "position_svg": plots.inline_pair(
            lambda narrow: plots.by_position(compared, narrow=narrow),
            "Loss in nats per token by position in the window, a curve for each stage",
        ),
        "held_out": _held_out(evaluations, others),
        "bounds": [span(*bound) for bound in range_bounds(evaluations)],
        "means": _means(evaluations, compared),
        "context_svg": plots.inline_pair(
            lambda narrow: context_figure(compared, narrow=narrow),
            "Gain from context: loss of the last tokens in nats per token, by tokens read",
        ),
        "contexts": [f"{context:,}" for context in context_heads(evaluations)],
        "context_shaded": shaded(measured(evaluations)),
        "context_rows": context_rows(evaluations),
        "context_sentences": context_sentences(evaluations),
        "part_heads": PART_HEADS,
        "part_rows": part_rows(evaluations),
        "scored": scored_tokens(evaluations),
        "short_heads": SHORT_HEADS,
        "short_rows": short_rows(evaluations),
        "short_sentences": short_sentences(evaluations),
        "measured_heads": HEADS,
        "measured": provenance_rows(evaluations),
        "position_bands": any(
            each.by_position is not None and each.by_position.bands is not None
            for each in evaluations
        ),
        "others": [other_settings(each, among=(*evaluations, *others)) for each in others],
        "unevaluated": [stage.name for stage in stages if stage.evaluation is None],
        "grids": [
            grid_tables(each, each.passkey) for each in evaluations if each.passkey is not None
        ],
        "without_grid": [each.stage for each in evaluations if each.passkey is None],
        "facts_of_stages": facts(stages),
        "cost_heads": cost_heads,
        "costs": cost_rows,
        "untrained": [stage.name for stage in stages if not stage.steps],
        "while_training": while_training(stages),
        "light": PALETTE,
        "dark": DARK,
        "colors": SERIES,
        "rounds": len(LINES),
        "mix": None,
    }


def difference_table(differences: Sequence[DifferenceRow]) -> list[Row]:
    """Return differences between evaluations as rows of the page."""
    return [
        Row(row.name, [Cell(difference_text(gain, PLUS_MINUS)) for gain in row.gains])
        for row in differences
    ]


def render(parts: dict[str, Any]) -> bytes:
    """Return the page with these parts."""
    return _template().render(**parts).encode()


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
    if (paired := last_sentence(evaluations)) is not None:
        return paired
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
        f"{number(mean.loss, '{:.2f}')} at {span(mean.start, mean.stop)}"
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


def _template() -> jinja2.Template:
    folder = importlib.resources.files("eval.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["dash"] = lambda text: _signs(text).replace("-", "\N{EN DASH}")
    environment.filters["signs"] = _signs
    return environment.get_template("report.html.jinja")


def _signs(text: str) -> str:
    return text.replace("+-", PLUS_MINUS)


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
                number(mean, "{:.2f}") + number(error, f" {PLUS_MINUS} {{:.2f}}", ""),
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
