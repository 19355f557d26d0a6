# SPDX-License-Identifier: Apache-2.0
"""`longhaul report`: build the page of the results of one run, or of several side by side."""

from pathlib import Path
from typing import Annotated

import typer

from longhaul.options import Json, print_json, run_of


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN...", help="Run folders, as written by `longhaul run`."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder, in place of RUN...")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File or folder to write to.",
            show_default="report.html in the run folder, or in the folder that holds all the runs",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Build the page of one run, or of several side by side, and print their mean losses.

    Several runs are put side by side: rows and curves are named RUN: STAGE.
    """
    given = runs or []
    if run is not None or not given:
        given = [run_of(next(iter(given), None), run)]
    from eval.run_folder import require_run

    for each in given:
        require_run(each)
    if len(given) == 1:
        _one(given[0], out, as_json=as_json)
    else:
        _several(given, out, as_json=as_json)


def _one(run: Path, out: Path | None, *, as_json: bool) -> None:
    from data.files.writable import require_file
    from eval.report.data_mix import mix_as_read
    from eval.report.evaluations import comparable
    from eval.report.page import build
    from eval.report.page_files import json_of, target_of
    from eval.report.ruler_tables import read_ruler
    from eval.report.suite_scores import read_suites
    from eval.run_folder import base_results, load
    from longhaul.pages.evaluation_tables import next_after, show_evaluations
    from longhaul.pages.ruler_page import show_ruler
    from longhaul.pages.suite_tables import show_suites
    from longhaul.terminal.messages import next_command

    require_file(target_of(run, out), "--out", (".html",))
    path = build(run, out)
    trained = load(run)[1]
    stages, others, outdated = comparable(run, [*base_results(run), *trained])
    evaluations = [stage.evaluation for stage in stages if stage.evaluation is not None]
    suites, ruler = read_suites(run), read_ruler(run)
    if as_json:
        print_json(
            {
                "report": path,
                "numbers": json_of(path),
                "evaluations": evaluations,
                "other_settings": others,
                "outdated": outdated,
                "suites": suites,
                "ruler": ruler,
                "data_mix": mix_as_read(run, trained).json,
            }
        )
        return
    show_evaluations(evaluations, others, outdated)
    if suites:
        show_suites(suites, [])
    show_ruler(ruler)
    typer.echo(path)
    words = next_after(run)
    if words and not evaluations:
        next_command(["longhaul", "evaluate", "--run", run], "evaluate its stages")
    elif words:
        next_command(words, "export its last stage as a Hugging Face folder")


def _several(given: list[Path], out: Path | None, *, as_json: bool) -> None:
    from data.files.writable import require_file
    from eval.report.page_files import json_of
    from eval.report.several_runs import (
        build_several,
        read_runs,
        short_of_runs,
        side_by_side,
        target_of_several,
    )
    from longhaul.pages.evaluation_tables import show_evaluations
    from longhaul.pages.ruler_page import show_ruler
    from longhaul.pages.suite_tables import show_suites

    runs = read_runs(given)
    target = target_of_several(given, out)
    require_file(target, "--out", (".html",))
    comparison = side_by_side(runs)
    path = build_several(runs, comparison, target)
    if as_json:
        print_json(
            {
                "report": path,
                "numbers": json_of(path),
                "runs": [
                    {
                        "run": run.label,
                        "path": run.path,
                        "evaluations": run.evaluations,
                        "other_settings": run.others,
                        "outdated": run.outdated,
                        "suites": run.suites,
                        "ruler": run.ruler,
                    }
                    for run in runs
                ],
                "differences": [
                    {"name": row.name, "ranges": [gain._asdict() for gain in row.gains if gain]}
                    for row in comparison.rows
                ],
                "last_stages": comparison.sentences,
            }
        )
        return
    show_evaluations(
        [each for run in runs for each in run.evaluations],
        [each for run in runs for each in run.others],
        [sentence for run in runs for sentence in run.outdated],
        comparison.rows,
        short_of_runs(runs),
    )
    if suites := [each for run in runs for each in run.suites]:
        show_suites(suites, [])
    show_ruler([each for run in runs for each in run.ruler])
    for sentence in comparison.sentences:
        typer.echo(sentence)
    typer.echo(path)
