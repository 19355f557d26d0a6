# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor oom`: why memory ran out, and what to change, cheapest first."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from longhaul.doctor.case import (
    CardName,
    Case,
    ClusterName,
    Factory,
    LadderName,
    LayoutWords,
    Nodes,
    StageName,
    case,
    gib,
    on_one_line,
)
from longhaul.doctor.log import content as log_content
from longhaul.doctor.log import describe, memory_ran_out
from longhaul.doctor.logs.kinds import ON_THE_HOST, SET_ALLOCATOR
from longhaul.doctor.logs.reader import Fault, Log, read
from longhaul.doctor.oom_causes import forms_logits, meanings, unexplained
from longhaul.options import Gpus, Json, print_json
from longhaul.terminal.console import show
from recipes.notation.layout import words_of
from recipes.planner.plan import HEADROOM, Plan
from recipes.planner.remedies import ORDER, UNTRIED, Remedy, choice, remedy
from recipes.shipped.machines import Machines
from recipes.spec.units import GiB

OVERRIDES = "overrides"
NOT_TRIED = "not tried in whole runs on GPUs here"


def oom(
    factory: Factory = "",
    card: CardName = "",
    ladder: LadderName = "",
    stage: StageName = "",
    cluster: ClusterName = "",
    nodes: Nodes = None,
    gpus: Gpus = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Output of a rank: a Slurm log, or stderr.log in launch/."),
    ] = None,
    layout: LayoutWords = "",
    as_json: Json = False,
) -> None:
    """Show what takes the memory of a recipe, and what would make it fit, cheapest first."""
    asked = Machines(nodes=nodes, gpus=gpus, layout=layout, cluster=cluster)
    found = case(factory, asked, card=card, ladder=ladder, stage=stage)
    logged = read([log]) if log is not None else None
    seen = () if logged is None else memory_ran_out(logged)
    if as_json:
        print_json(content(found, logged))
        return
    for line in (*found.head(), *predicted(found.plan)):
        typer.echo(line)
    if logged is not None:
        typer.echo(f"\nlog: {log}")
        for line in describe(logged, meaning=partial(meanings, found)):
            typer.echo(f"  {line}")
        if not seen:
            typer.echo("it does not say that memory ran out, so there is no list of remedies")
            return
    if seen and {one.kind for one in seen} <= set(ON_THE_HOST) and found.plan.fits:
        return
    beyond = unexplained(found.plan, seen)
    there = _remedy(found.plan, seen, beyond)
    if there is not None and there.changes:
        typer.echo(f"\nremedies, the cheapest first: {ORDER}")
        _print(there)
    for line in what_to_do(found, there, seen, beyond):
        typer.echo(line)


def content(found: Case, log: Log | None) -> dict[str, Any]:
    """Return the answer in numbers: bytes, shares of a step."""
    plan, seen = found.plan, () if log is None else memory_ran_out(log)
    beyond = unexplained(plan, seen)
    of_memory = log is None or bool(seen)
    there = _remedy(plan, seen, beyond) if of_memory else None
    other = planners_choice(found, beyond) if of_memory else None
    return {
        **found.content(),
        "fits": plan.fits,
        "memory_bytes": plan.memory.categories,
        "memory_total_bytes": plan.memory.total,
        "short_bytes": plan.short,
        "host_bytes_per_rank": plan.memory.host,
        "unexplained_bytes": beyond,
        "log": None if log is None else log_content(log),
        "remedies": [
            {
                "name": one.name,
                "memory_total_bytes": one.together.memory.total,
                "overrides": one.words,
            }
            for one in (there.changes if there else ())
        ],
        "cure": None
        if there is None
        else {
            "names": there.names,
            "command": on_one_line(found.command(there.plan.workload)),
        },
        "planners_choice": None
        if other is None
        else {
            "layout": words_of(other.workload.layout),
            "command": on_one_line(found.command(other.workload)),
        },
    }


def _remedy(plan: Plan, seen: Sequence[Fault], beyond: float) -> Remedy | None:
    """Return what fits; without more groups of ranks if NCCL found no memory."""
    return remedy(
        plan, unexplained=beyond, more_groups=not any(one.kind == "nccl_memory" for one in seen)
    )


def predicted(plan: Plan) -> Iterator[str]:
    """Yield the memory that a plan predicts."""
    parts = sorted(plan.memory.categories.items(), key=lambda one: -one[1])
    shown = ", ".join(f"{name} {size / GiB:.1f}" for name, size in parts if size >= GiB / 20)
    counted = (1 - HEADROOM) * plan.cluster.gpu_bytes
    fits = f"{gib(plan.short)} too much" if plan.short > 0 else f"fits, {gib(-plan.short)} to spare"
    yield (
        f"predicted: {gib(plan.memory.total)} a GPU at the peak, in {plan.memory.peak_in}, of the "
        f"{gib(counted)} counted on: {fits}"
    )
    yield f"  by category, GiB: {shown}"
    if plan.memory.host:
        share = plan.host_bytes
        lacks = f", {gib(plan.host_short)} too much" if plan.host_short > 0 else ""
        yield f"  on the host: {gib(plan.memory.host)} a rank, of {gib(share)}{lacks}"


def first_of_all(plan: Plan, seen: Sequence[Fault], beyond: float) -> Iterator[str]:
    """Yield what to do before any remedy, and the bytes that remedies add to the prediction."""
    if any(one.sizes.fragmented for one in seen):
        yield f"set the allocator first ({SET_ALLOCATOR}); if it still fails:"
    if beyond > 0:
        yield (
            f"{gib(beyond)} more than predicted are treated as permanently allocated"
            + (
                f": memory ran out, so the spare {gib(-plan.short)} were in use"
                if plan.fits
                else ""
            )
        )


def _print(there: Remedy) -> None:
    lines = [
        (
            one.name + " *" * (one.name in UNTRIED),
            f"{one.together.memory.total / GiB:,.1f}",
            " ".join(one.words),
        )
        for one in there.changes
    ]

    def table(without: Sequence[str]) -> Table:
        made = Table(
            title="what to change, each with those above it", box=None, title_style="",
            header_style="bold", pad_edge=False,
        )  # fmt: skip
        made.add_column("remedy", no_wrap=True)
        made.add_column("GiB", justify="right", no_wrap=True)
        if OVERRIDES not in without:
            made.add_column(OVERRIDES, no_wrap=True)
        for line in lines:
            made.add_row(*line[: len(made.columns)])
        return made

    left_out = show(table, (OVERRIDES,))
    if UNTRIED & {*there.names}:
        typer.echo(f"* {NOT_TRIED}")
    if left_out:
        typer.echo(f"\n{OVERRIDES}")
        for name, _, words in lines:
            typer.echo(f"{name}:")
            typer.echo(wrapped(words, shutil.get_terminal_size().columns))


def wrapped(words: str, columns: int) -> str:
    """Return text over indented lines that are broken only between words."""
    return textwrap.fill(
        words, columns, initial_indent="  ", subsequent_indent="  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def what_to_do(
    found: Case, there: Remedy | None, seen: Sequence[Fault], beyond: float
) -> Iterator[str]:
    """Yield the first set that fits, and the planner's own choice, as commands."""
    plan, cure = found.plan, there
    yield ""
    yield from first_of_all(plan, seen, beyond)
    if cure is None:
        yield (
            "no layout fits, nor does one on more GPUs or of a shorter stage; `longhaul plan "
            f"{plan.workload.card.word} --max-seq` finds the longest context of these GPUs"
        )
    elif not cure.names:
        if any(forms_logits(plan, one.sizes) for one in seen):
            yield "with the tiled loss of this layout, nothing has to change by this prediction"
            return
        yield "nothing has to change by this prediction; --log compares it with a log"
        return
    else:
        untried = [name for name in cure.names if name in UNTRIED]
        yield f"what fits: {' + '.join(cure.names)}; {_beside(plan, cure.plan, untried)}"
        yield f"  {found.command(cure.plan.workload)}"
    other = planners_choice(found, beyond)
    if other is not None and (cure is None or other.workload.layout != cure.plan.workload.layout):
        yield (
            f"the planner's choice on these GPUs: {words_of(other.workload.layout)}; "
            f"{_beside(plan, other, other.untried)}"
        )
        yield f"  {found.command(other.workload)}"


def planners_choice(found: Case, beyond: float) -> Plan | None:
    """Return the fastest plan of the same GPUs that has room for what the log shows.

    Never the layout of the case, and untried parts only if nothing else fits; or None.
    """
    plans = sorted(choice(found.question, beyond), key=lambda one: one.untried)
    return next((one for one in plans if not found.same_layout(one.workload.layout)), None)


def _beside(plan: Plan, other: Plan, untried: Sequence[str]) -> str:
    note = f"; {' and '.join(untried)}: {NOT_TRIED}" if untried else ""
    gpus = "" if other.gpus == plan.gpus else f" on {other.gpus} GPUs"
    slower = other.time.step / plan.time.step - 1
    return f"{gib(other.memory.total)} a GPU, a step {slower:+.1%}{gpus}{note}"
