# SPDX-License-Identifier: Apache-2.0
"""Build one page of several runs side by side; its rows and curves are named `RUN: stage`.

The last stages of two runs are compared document by document only if both were measured on the
same documents with the same settings; otherwise a sentence says what differs.
"""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from eval.provenance import Provenance
from eval.report import plots
from eval.report.base_plot import against_base
from eval.report.context_tables import context_figure
from eval.report.evaluations import Settings, in_words, range_bounds
from eval.report.gains import (
    DifferenceRow,
    difference_row,
    difference_rows,
    gain_sentence,
    gain_sentences,
    gains,
)
from eval.report.page import (
    base_figure,
    difference_table,
    page_parts,
    render,
)
from eval.report.page_files import require_own, target_of, write_page
from eval.report.page_json import page_json
from eval.report.ruler_tables import ruler_figures, ruler_part
from eval.report.run_labels import LabelledRun, common_folder, labelled, labels
from eval.report.short_tables import short_sentence, short_sentences
from eval.report.stage_tables import facts
from eval.report.suite_scores import suite_table
from eval.run_folder import Evaluation, RunRecord, StageResults


class SideBySide(NamedTuple):
    """Differences on the same documents, and a sentence for each two runs."""

    rows: list[DifferenceRow]
    """Between the last stages of each two runs, then those within each run."""
    sentences: list[str]


def read_runs(runs: Sequence[Path]) -> list[LabelledRun]:
    """Read several run folders under short, distinct labels."""
    return [labelled(run, label) for run, label in zip(runs, labels(runs), strict=True)]


def target_of_several(runs: Sequence[Path], out: Path | None) -> Path:
    """Return the file that `build_several` writes, by default in the folder of the runs."""
    return target_of(common_folder(runs) if out is None else out, out)


def build_several(runs: Sequence[LabelledRun], comparison: SideBySide, target: Path) -> Path:
    """Write the page of several runs and its figures next to it, and return the page's path."""
    require_own(target)
    compared = [stage for run in runs for stage in run.compared]
    trained = [stage for run in runs for stage in run.trained]
    others = [each for run in runs for each in run.others]
    names = [each.name for each in compared]
    scored = [each for run in runs for each in run.ruler]
    ruler, suites = ruler_part(scored, names), [each for run in runs for each in run.suites]
    parts = page_parts(compared, trained, others, [words for run in runs for words in run.outdated])
    parts |= {
        "record": RunRecord(ladder="", card="", stages=()),
        "runs": [(run.label, str(run.path), run.record) for run in runs],
        "verdict": " ".join(comparison.sentences),
        "differences": difference_table(comparison.rows),
        "base_figures": [
            (run.label, drawn)
            for run in runs
            if (drawn := base_figure(run.compared, _first(run, compared), run.label))
        ],
        "gains": [said for run in runs for said in gain_sentences(run.evaluations)],
        "trainings": [(run.label, drawn) for run in runs if (drawn := _training(run, compared))],
        "facts_of_stages": [row for run in runs for row in facts(run.trained)],
        "short_sentences": short_of_runs(runs),
        "suites": suite_table(suites, names),
        "ruler": ruler,
    }
    figures = {
        "by_position": plots.by_position(compared),
        "context_gain": context_figure(compared),
        **ruler_figures(ruler, names),
    }
    for number, run in enumerate(runs, 1):
        first = _first(run, compared)
        figures[f"against_base_{number}"] = against_base(run.compared, first)
        figures[f"training_{number}"] = plots.training(run.trained, _trained_first(run, compared))
    numbers = page_json(
        parts,
        compared=compared,
        stages=trained,
        others=others,
        differences=comparison.rows,
        suites=suites,
        ruler=scored,
        mix=None,
    )
    write_page(target, render(parts), numbers, figures)
    return target


def _first(run: LabelledRun, compared: Sequence[StageResults]) -> int:
    """Return the index of a run's first base model or stage on the page."""
    return [stage.name for stage in compared].index(run.compared[0].name) if run.compared else 0


def _training(run: LabelledRun, compared: Sequence[StageResults]) -> str | None:
    """Draw the training of a run in the colours that its stages have on the page."""
    first = _trained_first(run, compared)
    return plots.inline_pair(
        lambda narrow: plots.training(run.trained, first, narrow=narrow),
        f"Training of {run.label}: loss in nats per token, and learning rate, by tokens seen",
    )


def _trained_first(run: LabelledRun, compared: Sequence[StageResults]) -> int:
    """Return the index of a run's first trained stage on the page."""
    names = [stage.name for stage in compared]
    return names.index(run.trained[0].name) if run.trained else 0


def short_of_runs(runs: Sequence[LabelledRun]) -> list[str]:
    """Return the changes of short documents between last stages of runs, then within each run."""
    lasts = [run.last for run in runs if run.last is not None]
    found = [
        sentence
        for before, after in combinations(lasts, 2)
        if not why_not(before, after)
        for sentence in short_sentence(before, after)
    ]
    return [*found, *(said for run in runs for said in short_sentences(run.evaluations))]


def side_by_side(runs: Sequence[LabelledRun]) -> SideBySide:
    """Compare the last stages of each two runs, then the stages of each run."""
    bounds = range_bounds([each for run in runs for each in run.evaluations])
    rows, sentences = [], []
    for before, after in combinations(runs, 2):
        if before.last is None or after.last is None:
            none = before.label if before.last is None else after.label
            other = after.label if none == before.label else before.label
            sentences.append(f"{none} is not compared with {other}: no stage has been evaluated.")
            continue
        why = why_not(before.last, after.last)
        found = [] if why else gains(before.last, after.last)
        if found:
            name = f"{after.last.stage} minus {before.last.stage}"
            rows.append(difference_row(name, found, bounds))
            sentences.append(gain_sentence(before.last, after.last, found[-1]))
        else:
            why = why or "the files have no losses of single documents in a common range"
            sentences.append(f"{after.last.stage} is not compared with {before.last.stage}: {why}.")
    for run in runs:
        for row in difference_rows(run.evaluations):
            measured = [gain for gain in row.gains if gain is not None]
            rows.append(difference_row(row.name, measured, bounds))
    return SideBySide(rows, sentences)


def why_not(before: Evaluation, after: Evaluation) -> str:
    """Return why two evaluations are not of the same documents; empty if they are."""
    pair = (before, after)
    if not Settings.of(before).same_as(Settings.of(after)):
        ways = "; ".join(in_words(each, among=pair) for each in pair)
        return f"they were measured with different settings ({ways})"
    if not before.store or not after.store:
        silent = before if not before.store else after
        return f"the file of {silent.stage} does not state the store of its documents"
    about = [each.provenance or Provenance() for each in pair]
    tokenizers = [each.tokenizer for each in about]
    if all(tokenizers) and len(set(tokenizers)) > 1:
        return f"their tokenizers differ ({'; '.join(tokenizers)}), and losses are per token"
    drawn = [each.seeds.get("windows") for each in about]
    if None not in drawn and len(set(drawn)) > 1:
        return f"their windows were drawn with different seeds ({drawn[0]} and {drawn[1]})"
    return ""
