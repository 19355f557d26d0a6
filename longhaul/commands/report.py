# SPDX-License-Identifier: Apache-2.0
"""`longhaul report`: build the page of a run's results."""

from pathlib import Path
from typing import Annotated

import typer

from longhaul.options import Json, print_json


def report(
    run: Annotated[Path, typer.Option(help="Run folder, as written by `longhaul run`.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File or folder to write to.", show_default="report.html in the run folder"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Build report.html from a run folder, and print the mean loss by range of positions."""
    from data.files.writable import require_file
    from eval.report.evaluations import comparable
    from eval.report.page import build, target_of
    from eval.run_folder import base_results, load
    from longhaul.pages.evaluation_tables import next_after, show_evaluations
    from longhaul.terminal.messages import next_command

    require_file(target_of(run, out), "--out")
    path = build(run, out)
    stages, others, outdated = comparable(run, [*base_results(run), *load(run)[1]])
    evaluations = [stage.evaluation for stage in stages if stage.evaluation is not None]
    if as_json:
        print_json(
            {
                "report": path,
                "evaluations": evaluations,
                "other_settings": others,
                "outdated": outdated,
            }
        )
        return
    show_evaluations(evaluations, others, outdated)
    typer.echo(path)
    words = next_after(run)
    if words and not evaluations:
        next_command(["longhaul", "evaluate", "--run", run], "evaluate its stages")
    elif words:
        next_command(words, "export its last stage as a Hugging Face folder")
