# SPDX-License-Identifier: Apache-2.0
"""`longhaul rehearse`: run a recipe's structure on a few CPU ranks, in about a minute."""

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.files.writable import require_folder
from longhaul.defaults import planned_cluster
from longhaul.options import (
    Cluster,
    Gpus,
    MachineLayout,
    StageCard,
    StageLadder,
    StageLength,
)
from longhaul.run_folder import lock
from longhaul.run_folder.lock import in_use, require_unused
from longhaul.terminal.console import loading, plain_console, show
from longhaul.terminal.messages import ENCODING_ERRORS, note
from longhaul.terminal.progress import Watched, progress
from recipes.spec.cluster import CLUSTER
from recipes.spec.naming import RUNS, STORES
from recipes.spec.suggest import lookup

if TYPE_CHECKING:
    from longhaul.rehearsal.checks import RehearsalCheck
    from recipes.rehearsal.plan import Rehearsal

RANKS = 4
MOST_RANKS = 64
"""Processes of one machine; all kinds of parallelism together need 32."""
RECORD = "rehearsal.json"
"""File that marks the folder of a rehearsal, which the next one of that name may replace."""
PRELOADING = "preloading.log"
"""Output of the ranks' imports, before the rehearsal is accepted."""
STORE = STORES / "rehearsal"


def rehearse(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="A shipped recipe; any other by --card, --ladder and --stage.")
    ] = "",
    card: StageCard = "",
    ladder: StageLadder = "",
    stage: StageLength = "",
    nodes: Annotated[
        int | None,
        typer.Option(help="Nodes to lay --card out on.", show_default="the fewest that fit"),
    ] = None,
    gpus: Gpus = None,
    layout: MachineLayout = "",
    cluster: Cluster = "",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes.", show_default=str(RANKS))
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder.", show_default="runs/rehearsals/NAME"),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Token store. Without it synthetic text.", show_default=str(STORE)),
    ] = None,
) -> None:
    """Run a recipe's stage and the one before it, small, on CPU ranks, and check both.

    KEY=VALUE overrides follow, such as trainer.max_steps=4; they apply to both small stages.
    """
    started = time.monotonic()
    from recipes.rehearsal.plan import rehearsal
    from recipes.shipped.machines import Machines
    from recipes.shipped.table import ROWS

    asked = Machines(nodes=nodes, gpus=gpus, layout=layout, cluster=cluster)
    if (ranks or 1) > MOST_RANKS:
        raise ValueError(f"--ranks is {ranks}; one machine rehearses on at most {MOST_RANKS}")
    overrides = list(context.args)
    combined = bool(card or ladder or stage)
    if combined and "=" in name:  # an override, not a name
        overrides.insert(0, name)
        name = ""
    if bool(name) == combined:
        raise ValueError(
            "name one recipe: a shipped one by its NAME, any other by --card, --ladder and --stage"
        )
    ranks = ranks or RANKS
    if combined:
        from recipes.shipped.select import row_of

        row = row_of(card, ladder, stage, asked, planned_cluster() or CLUSTER)
    elif asked != Machines():
        raise ValueError(
            "--nodes, --gpus, --layout and --cluster apply only to --card; "
            f"{name} has its layout, so leave them out"
        )
    else:
        row = lookup("recipe", name, ROWS)
    name = row.name
    run = out or RUNS / "rehearsals" / name
    made = rehearsal(row, ranks=ranks, rows=ROWS, vocab=_vocabulary(store))
    require_free(run)
    describe(made)
    with in_use(run):
        checks = _run(made, overrides, run=run, store=store)
    for check in checks:
        typer.echo(f"{'ok  ' if check.holds else 'FAIL'}  {check.words}")
    seconds = time.monotonic() - started
    _record(run, made, checks, seconds)
    failed = [check for check in checks if not check.holds]
    if failed:
        typer.echo(f"{name}: {len(failed)} of {len(checks)} checks failed; see {run}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{name} rehearsed in {seconds:.0f} s: {run}")


def require_free(run: Path) -> None:
    """Raise ValueError unless a folder is writable, and empty or a rehearsal's."""
    require_folder(run, "--out")
    require_unused(run)
    require_unused(run / "eval")
    if run.exists() and not (run / RECORD).is_file() and any(run.iterdir()):
        raise ValueError(f"{run} exists and is not a rehearsal; name another folder with --out")


def _emptied(run: Path) -> None:
    """Remove the files of an earlier rehearsal, except for the lock that this one holds."""
    for path in run.iterdir():
        if path.name in (lock.FILE, PRELOADING):
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextmanager
def _undone_if_refused(run: Path) -> Iterator[None]:
    """Remove the files of a rehearsal's preparation if it is refused or interrupted."""
    record = run / RECORD
    earlier = record.stat().st_mtime_ns if record.is_file() else None
    try:
        yield
    except BaseException:
        (run / PRELOADING).unlink(missing_ok=True)
        if not record.is_file() or record.stat().st_mtime_ns != earlier:
            _emptied(run)
        raise


def describe(made: "Rehearsal") -> None:
    """Print the parts of the recipe that are kept and reduced, and the notes."""
    from rich.table import Table

    table = Table(title=f"{made.name} on {made.ranks} CPU ranks")
    for column in ("", "recipe", "rehearsed", ""):
        table.add_column(column, overflow="fold")
    for what, whole, small in made.compared():
        table.add_row(what, whole, small, "kept" if whole == small else "reduced")
    show(lambda _: table)
    for words in made.notes():
        note(f"note: {words}")


def _vocabulary(store: Path | None) -> int:
    """Return the vocabulary rows that the model needs; 0 for the rehearsal's own text."""
    if store is None:
        return 0
    from data.store import Manifest

    rows = 128  # divisible by any tensor-parallel size
    return -(-Manifest.load(store).tokenizer.vocab_size // rows) * rows


def _run(
    made: "Rehearsal", words: Sequence[str], *, run: Path, store: Path | None
) -> "list[RehearsalCheck]":
    """Train both stages and evaluate them; return the checks."""
    from longhaul.local_ranks import preload, run_forked
    from longhaul.rehearsal.checks import verdict
    from recipes.rehearsal.shrink import VOCAB

    log = run / "output.log"
    cores = os.cpu_count() or 1
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // made.ranks))  # of the ranks
    with _undone_if_refused(run), loading("NeMo and Megatron-Core"):
        # The server that ranks are forked from imports meanwhile; a refusal removes its log.
        preload(run / PRELOADING)
        place = store or STORE
        from longhaul.rehearsal import build

        stages = build.stages(made, words, run=run, store=place)
        if store is None and not place.exists():
            from data.synthetic import prepare_made_up

            prepare_made_up(place, vocab_size=VOCAB)
        _emptied(run)
        (run / PRELOADING).replace(log)
        _record(run, made, [], 0.0)
        made_up = build.require_impactful(stages, stand_in=store is None)
        jobs = build.jobs(made, stages, run=run, store=place)
        planned = [build.planned(stage) for stage in stages]
    if made_up:
        note("note: the analysis of impactful tokens is made up")
    watched = [
        Watched(stage.name, stage.steps, stage.metrics, stage.tokens_per_batch) for stage in stages
    ]
    note(f"the ranks write to {log}")
    with (  # while the ranks run, descriptors 1 and 2 are the log
        os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors=ENCODING_ERRORS) as shown,
        in_use(run / "eval"),
        progress(plain_console(shown), watched, after="evaluating"),
    ):
        run_forked(jobs, log)
    return verdict(run, planned)


def _record(
    run: Path, made: "Rehearsal", checks: "Sequence[RehearsalCheck]", seconds: float
) -> None:
    from eval.run_folder import write_json

    write_json(
        run / RECORD,
        {
            "recipe": made.name,
            "compared": made.compared(),
            "notes": made.notes(),
            "checks": list(map(asdict, checks)),
            "seconds": seconds,
        },
    )
