# SPDX-License-Identifier: Apache-2.0
"""`longhaul report`: build the page that shows what a run did."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Option(help="Run folder, as `longhaul run` leaves it.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File or folder to write to.", show_default="report.html in the run folder"
        ),
    ] = None,
) -> None:
    """Build report.html from a run folder, and print the mean loss by range of positions."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from data.writable import require_file
    from eval.report import build, span, target_of
    from eval.results import range_bounds, range_rows, read_evaluations

    require_file(target_of(run, out), "--out")
    path = build(run, out)
    evaluations = read_evaluations(run)
    console = Console()
    if evaluations:
        table = Table(title="Mean loss by position, nats per token", title_justify="left")
        table.add_column("stage")
        for bound in range_bounds(evaluations):
            table.add_column(span(*bound), justify="right")
        for row in range_rows(evaluations):
            table.add_row(Text(row.stage), *(f"{mean:.2f}" for mean in row.means))
        console.print(table)
    else:
        console.print("No stage of this run has been evaluated yet.")
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)
