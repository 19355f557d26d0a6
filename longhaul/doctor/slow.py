# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor slow`: where the time of a step goes, and which layout would be faster."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from eval.run_folder import MissingResultError, Step, read_steps
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
    on_one_line,
)
from longhaul.options import Gpus, Json, print_json
from recipes.notation.layout import words_of
from recipes.planner.batch_size import MOST_ACCUMULATION
from recipes.planner.plan import Plan
from recipes.planner.search.ranking import search
from recipes.shipped.machines import Machines
from recipes.spec.naming import stage_folder

SHARE = 0.05
"""Share of a step from which a cause is named."""
SMALL = 1024
"""Columns of a matrix product below which a GPU is not busy."""
FASTER, SLOWER, JITTER = 0.02, 1.3, 1.5
"""Relative to a step: a gain worth naming, a time the plan does not explain, the slowest steps."""
WARM_UP = 2
"""First steps, in which kernels compile and the data is opened."""


def slow(
    factory: Factory = "",
    card: CardName = "",
    ladder: LadderName = "",
    stage: StageName = "",
    cluster: ClusterName = "",
    nodes: Nodes = None,
    gpus: Gpus = None,
    run: Annotated[Path | None, typer.Option(help="Run folder with the stage's metrics.")] = None,
    layout: LayoutWords = "",
    as_json: Json = False,
) -> None:
    """Show where the time of a step goes, predicted and measured, and what would be faster."""
    asked = Machines(nodes=nodes, gpus=gpus, layout=layout, cluster=cluster)
    found = case(factory, asked, card=card, ladder=ladder, stage=stage)
    steps = _steps(run, found) if run is not None else ()
    if as_json:
        print_json(_content(found, steps))
        return
    for line in (*found.head(), *_predicted(found.plan)):
        typer.echo(line)
    if run is not None:
        typer.echo(f"\nmeasured: {run}")
        for line in measured(found, steps):
            typer.echo(f"  {line}")
    typer.echo("\nways to lower it")
    for line in [*causes(found.plan)] or ["nothing but products and attention takes 5% of it"]:
        typer.echo(f"  {line}")
    typer.echo()
    for line in faster(found):
        typer.echo(line)


def _content(found: Case, steps: Sequence[Step]) -> dict[str, Any]:
    """Return the answer in numbers: seconds, tokens per second; null if nothing is measured."""
    best = _faster(found)
    pace = Pace.of(steps) if steps else None
    return {
        **found.content(),
        "predicted": _figures(found.plan),
        "measured": None
        if pace is None
        else {
            "steps": len(steps),
            "step_seconds": pace.seconds,
            "first_step_seconds": pace.first,
            "slowest_steps_seconds": pace.slowest,
            "tokens_per_second_per_gpu": pace.rate,
        },
        "causes": list(causes(found.plan)),
        "faster": None
        if best is None
        else {
            "layout": words_of(best.workload.layout),
            **_figures(best),
            "command": on_one_line(found.command(best.workload)),
        },
    }


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "step_seconds": plan.time.step,
        "time_seconds": plan.time.categories,
        "tokens_per_second_per_gpu": plan.time.tokens_per_gpu_second,
        "mfu": plan.time.mfu,
    }


def _steps(run: Path, found: Case) -> tuple[Step, ...]:
    steps = read_steps(stage_folder(run, found.name) / "metrics.jsonl")
    if not steps:
        raise MissingResultError(
            f"{run} has no step of {found.name}: no stages/{found.name}/metrics.jsonl; name the "
            "run folder that the stage was trained in"
        )
    return steps


def _predicted(plan: Plan) -> Iterator[str]:
    time = plan.time
    yield (
        f"predicted: {time.step:,.2f} s a step, {time.tokens_per_gpu_second:,.0f} tokens/s/GPU, "
        f"causal MFU {time.mfu:.1%}"
    )
    parts = sorted(time.categories.items(), key=lambda one: -one[1])
    shown = ", ".join(f"{name} {x / time.step:.0%}" for name, x in parts if x >= time.step / 200)
    yield f"  by category: {shown}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Pace of the steps after the first `WARM_UP`; NaN where they do not record it."""

    rate: float
    """Median of the tokens per second and rank."""
    seconds: float
    first: float
    """Seconds of the first step."""
    slowest: float
    """The 95th percentile of the seconds of a step."""

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "Pace":
        """Return the pace of some steps."""
        steady = steps[WARM_UP:] if len(steps) > WARM_UP else steps
        seconds = sorted(step.seconds for step in steady if math.isfinite(step.seconds))
        rates = [
            step.tokens_per_second_per_rank
            for step in steady
            if math.isfinite(step.tokens_per_second_per_rank)
        ]
        return cls(
            rate=median(rates) if rates else math.nan,
            seconds=median(seconds) if seconds else math.nan,
            first=steps[0].seconds,
            slowest=seconds[math.ceil(0.95 * len(seconds)) - 1] if seconds else math.nan,
        )


def measured(found: Case, steps: Sequence[Step]) -> Iterator[str]:
    """Yield what the steps of a run show compared with the plan."""
    plan, pace = found.plan, Pace.of(steps)
    if not math.isfinite(pace.rate):
        yield "its steps record no tokens per second"
        return
    flops = plan.workload.card.flops_per_token(plan.workload.seq_length)
    mfu = pace.rate * flops / (plan.cluster.gpu.bf16_tflops * 1e12)
    of_plan = pace.rate / plan.time.tokens_per_gpu_second
    yield (
        f"{pace.rate:,.0f} tokens/s/GPU, causal MFU {mfu:.1%}, {pace.seconds:,.2f} s a step "
        f"(median of {max(1, len(steps) - WARM_UP)}): {of_plan:.0%} of the prediction"
    )
    if mfu > 1:
        yield (
            "no GPU is that fast: the run has another model, length or number of GPUs, or its "
            "steps count other tokens; name the stage, --nodes and --layout that ran"
        )
        return
    if len(steps) <= WARM_UP:
        yield f"only {len(steps)} steps, the first of which compile kernels; look again later"
        return
    if of_plan < 1 / SLOWER:
        yield (
            "the layout does not explain this: look at clocks and power (nvidia-smi -q -d "
            "PERFORMANCE), at the network (`longhaul probe cp`), at a rank that is slower"
        )
    if pace.first > SLOWER * pace.seconds:
        yield (
            f"step 1 took {pace.first:,.1f} s, {pace.first / pace.seconds:.1f} times a step: "
            "kernels compile and the data is opened; it happens once"
        )
    if pace.slowest > JITTER * pace.seconds:
        yield (
            f"one step in twenty takes {pace.slowest:,.1f} s or more: checkpoints (see the steps "
            "they are at), data that comes late (data.num_workers=4), or a slow rank"
        )
    ranks = median(
        step.tokens / (step.seconds * step.tokens_per_second_per_rank)
        for step in steps
        if math.isfinite(step.tokens * step.seconds * step.tokens_per_second_per_rank)
    )
    if round(ranks) != plan.gpus:
        yield (
            f"the run has {ranks:,.0f} ranks and this layout {plan.gpus}; name the one that ran "
            "with --nodes or --layout"
        )


def causes(plan: Plan) -> Iterator[str]:
    """Yield what takes time besides matrix products and attention, the largest first."""
    time, layout = plan.time, plan.workload.layout
    parts = sorted(time.categories.items(), key=lambda one: -one[1])
    for name, seconds in parts:
        share = seconds / time.step
        if share >= SHARE and name not in ("matmul", "attention"):
            yield f"{name} {share:.0%}: {_why(plan, name)}"
    card = plan.workload.card
    narrow = min(card.ffn_hidden, card.hidden, card.heads * card.head_dim) // layout.tp
    if layout.tp > 1 and narrow < SMALL:
        yield (
            f"TP {layout.tp} leaves matrices of {narrow:,} columns, which do not fill a GPU; less "
            "TP, more CP"
        )
    if plan.workload.degrees.ring > 1:
        chunk = plan.workload.seq_length // plan.workload.degrees.ring // 2
        if chunk < 4 * SMALL:
            yield f"the ring attends to {chunk:,} tokens at a time, too few for a fast kernel"
    if plan.workload.micro_batches > MOST_ACCUMULATION:
        yield (
            f"{plan.workload.micro_batches} micro-batches one after the other; more data ranks, or "
            "a larger micro-batch where memory allows"
        )


def _why(plan: Plan, name: str) -> str:
    """Return the origin of a cause and what would lower it."""
    layout, degrees = plan.workload.layout, plan.workload.degrees

    def link(ranks: int) -> str:
        joined = plan.cluster.joins(ranks, layout.world_size)
        return "the fast link" if joined else "the network"

    around = layout.tp * degrees.ulysses
    experts = plan.workload.card.experts
    said = {
        "recompute": f"{layout.recompute.kind} runs parts of the forward again; keep more where "
        "memory allows",
        "memory": "norms, rotation, activations and logits through device memory; tiled loss "
        "forms no logits",
        "TP": f"exposed over {link(layout.tp)}; CP in its place sends less"
        + ("; so does a smaller ETP" if experts and layout.expert_tp > 1 else ""),
        "EP": f"all-to-alls of {layout.ep} ranks take tokens to their experts over "
        f"{link(layout.expert_tp * layout.ep)}; a smaller EP sends less",
        "waiting": "for ranks with longer documents; fewer data ranks with more micro-batches "
        "wait less, and an all-to-all instead of a ring",
        "host": "a layer's time that does not depend on its length; longer or fewer micro-batches",
        "CP": f"exposed: all-to-all of {degrees.ulysses} over {link(around)}, ring of "
        f"{degrees.ring} over {link(around * degrees.ring)}; keep the all-to-all inside the node",
        "PP": f"the bubble of {layout.pp} stages with {plan.workload.micro_batches} micro-batches; "
        "fewer stages, or more micro-batches",
        "copies": f"offload {layout.offload.tensors} beyond what compute hides; offload less "
        "(model.config.offload.every=2)",
        "DP": f"gradients and parameters of {plan.workload.replicas} ranks"
        + (f" (of experts: {plan.workload.expert_replicas})" if experts else "")
        + f" over {link(layout.tp * plan.workload.replicas)} beyond what compute hides; more "
        "micro-batches, or a larger batch" + ("; a larger EP" if experts else ""),
        "optimizer": "Adam's own traffic"
        + ("; part of it is on the host" if layout.optimizer_offload else ""),
    }
    return said.get(name, "")


def _faster(found: Case) -> Plan | None:
    """Return the fastest plan of the same GPUs; None if the gain is not worth naming."""
    best = search(found.question).automatic
    if best is None or best.time.step > (1 - FASTER) * found.plan.time.step:
        return None
    return best


def faster(found: Case) -> Iterator[str]:
    """Yield the fastest layout of the same GPUs, and by how much."""
    plan, best = found.plan, _faster(found)
    if best is None:
        yield "the planner finds no layout of these GPUs that is 2% faster"
        if not plan.fits:
            yield (
                f"this one does not fit: `longhaul doctor oom {found.looked_at} --layout "
                f"'{words_of(plan.workload.layout)}'`"
            )
        return
    yield (
        f"faster on these GPUs: {words_of(best.workload.layout)}; {best.time.step:,.2f} s a step, "
        f"{1 - best.time.step / plan.time.step:.0%} less, causal MFU {best.time.mfu:.1%}"
    )
    yield f"  {found.command(best.workload)}"
