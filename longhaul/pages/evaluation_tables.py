# SPDX-License-Identifier: Apache-2.0
"""Evaluations as tables of the terminal: mean loss by range of positions, passkeys by depth."""

import math
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.table import Table

from eval.report.context_tables import context_sentences
from eval.report.evaluations import in_words, range_bounds, range_rows, same_settings
from eval.report.gains import (
    DifferenceRow,
    difference_rows,
    difference_text,
    error_sentence,
    gain_sentences,
)
from eval.report.page import other_settings
from eval.report.passkey_tables import of_length, passkey_sentence
from eval.report.short_tables import short_sentences
from eval.run_folder import Evaluation
from longhaul.terminal.console import show
from longhaul.terminal.messages import note
from recipes.spec.naming import length_shown

SETTINGS = "settings"


def show_evaluations(
    evaluations: Sequence[Evaluation],
    others: Sequence[Evaluation] = (),
    outdated: Sequence[str] = (),
    differences: Sequence[DifferenceRow] | None = None,
    short: Sequence[str] | None = None,
) -> None:
    """Print the tables of some stages, and a line for each evaluation with other settings.

    The `outdated` sentences go to stderr. Without `differences` and `short`, the stages are of one
    run and are compared in their order.
    """
    if not evaluations:
        typer.echo("No stage of this run has been evaluated yet.")
        return
    same = same_settings(evaluations)
    every = (*evaluations, *others)
    words = [in_words(each, among=every) for each in evaluations]

    def table(without: Sequence[str]) -> Table:
        return _means(evaluations, [] if same or SETTINGS in without else words)

    left_out = show(table, [SETTINGS])
    if same:
        typer.echo(words[0])
    elif left_out:
        for each, settings in zip(evaluations, words, strict=True):
            typer.echo(f"{each.stage}: {settings}")
    for sentence in (*error_sentence(evaluations), *gain_sentences(evaluations)):
        typer.echo(sentence)
    rows = difference_rows(evaluations) if differences is None else differences
    if rows:
        show(lambda _: _differences(evaluations, rows))
    of_short = short_sentences(evaluations) if short is None else short
    for sentence in (*context_sentences(evaluations), *of_short):
        typer.echo(sentence)
    show_passkeys(evaluations)
    for other in others:
        said = other_settings(other, among=every)
        typer.echo(f"with other settings or of an earlier checkpoint: {said}")
    for sentence in outdated:
        note(f"note: {sentence}")


def show_passkeys(evaluations: Sequence[Evaluation]) -> None:
    """Print the exact answers to passkey prompts by length and depth, for stages that have any."""
    asked = [each for each in evaluations if each.passkey is not None]
    if not asked:
        return
    depths = sorted({depth for each in asked if each.passkey for depth in each.passkey.depths})
    table = Table(title="Passkeys found, by depth")
    table.add_column("stage", no_wrap=True)
    table.add_column("length", justify="right", no_wrap=True)
    for depth in depths:
        table.add_column(f"{depth:.0%}", justify="right", no_wrap=True)
    table.add_column("all, 95% interval", justify="right", no_wrap=True)
    for each in asked:
        grid = each.passkey
        assert grid is not None
        for length, row in zip(grid.lengths, grid.hits, strict=True):
            found = dict(zip(grid.depths, row, strict=True))
            table.add_row(
                each.stage,
                length_shown(length),
                *(
                    f"{round(found[depth] * grid.trials)}/{grid.trials}"
                    if math.isfinite(found.get(depth, math.nan))
                    else "-"
                    for depth in depths
                ),
                of_length(grid, length),
            )
    show(lambda _: table)
    for each in asked:
        assert each.passkey is not None
        typer.echo(f"{each.stage}: {passkey_sentence(each.passkey)}")


def _means(evaluations: Sequence[Evaluation], settings: Sequence[str]) -> Table:
    table = Table(title="Mean loss by position in the window, nats per token")
    table.add_column("stage", no_wrap=True)
    if settings:
        table.add_column(SETTINGS, no_wrap=True)
    for start, stop in range_bounds(evaluations):
        table.add_column(_range_shown(start, stop), justify="right", no_wrap=True)
    for at, row in enumerate(range_rows(evaluations)):
        means = (f"{mean:.2f}" if math.isfinite(mean) else "-" for mean in row.means)
        table.add_row(row.stage, *settings[at : at + 1], *means)
    return table


def _differences(evaluations: Sequence[Evaluation], rows: Sequence[DifferenceRow]) -> Table:
    """Return the differences between stages, with standard errors over the same documents."""
    table = Table(title="Differences of the same documents, nats per token")
    table.add_column("stages", no_wrap=True)
    for start, stop in range_bounds(evaluations):
        table.add_column(_range_shown(start, stop), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, *(difference_text(gain) for gain in row.gains))
    return table


def _range_shown(start: int, stop: int) -> str:
    return f"{length_shown(start) if start else 0}-{length_shown(stop)}"


def next_after(run: Path) -> list[object]:
    """Return the words of the command that exports the last stage of a run that has a checkpoint.

    Empty if none has, or if a damaged one comes first, which is reported.
    """
    from custom_modules.checkpoints.index import CheckpointError
    from eval.run_folder import stage_names
    from recipes.checkpoints.marker import newest_checkpoint
    from recipes.spec.naming import stage_folder

    for name in reversed(stage_names(run)):
        folder = stage_folder(run, name)
        try:
            newest = newest_checkpoint(folder / "checkpoints")
        except CheckpointError as error:
            note(error)
            return []
        if newest is not None:
            return ["longhaul", "export", "--from", folder, "--to", Path("models") / f"{name}_hf"]
    return []
