# SPDX-License-Identifier: Apache-2.0
"""What the doctor looks at: a shipped recipe, on a cluster, under its layout or another."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from longhaul.nearest import named
from recipes import cluster as clusters
from recipes.cluster import Cluster
from recipes.collection import ROWS, Row
from recipes.layout import Layout
from recipes.layout_words import layout_from, words_of
from recipes.naming import length_shown
from recipes.planner.job import Job
from recipes.planner.override_words import override_words
from recipes.planner.plan import Plan, plan
from recipes.planner.refusals import refusals
from recipes.planner.search import Question
from recipes.units import GiB

LINE = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A recipe with the plan that it is judged by."""

    row: Row
    plan: Plan

    @property
    def question(self) -> Question:
        """What the planner would be asked for the same GPUs."""
        job = self.plan.job
        return Question(
            card=job.card,
            seq_length=job.seq_length,
            tokens_per_batch=job.tokens_per_batch,
            cluster=self.plan.cluster,
            gpus=self.plan.gpus,
            fp8=job.layout.fp8,
        )

    def head(self) -> Iterator[str]:
        """Yield what is looked at, in two lines."""
        job, machine = self.plan.job, self.plan.cluster
        yield (
            f"{self.row.name}: {job.card.name} at {length_shown(job.seq_length)} tokens on "
            f"{self.plan.gpus} GPUs of {machine.name} ({machine.gpu.name})"
        )
        yield (
            f"layout: {words_of(job.layout)}; {job.micro_batches:,} micro-batches of "
            f"{job.layout.micro_batch} on each data rank"
        )

    def command(self, job: Job) -> str:
        """Return the command that trains the recipe as this job."""
        shipped = _job(self.row, self.row.layout, self.plan.cluster)
        words = [f"longhaul pretrain --factory {self.row.name}", *override_words(shipped, job)]
        return folded(words)


def folded(words: list[str]) -> str:
    """Return a command over lines that a shell joins."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) > LINE - 3:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def case(factory: str, cluster: str, nodes: int | None, layout: str) -> Case:
    """Return the case that the words of a command name.

    Raises ValueError for names there are not, for CPU ranks, and for what the recipe check would
    refuse.
    """
    row = named("recipe", factory, ROWS)
    if row.layout.device == "cpu":
        raise ValueError(
            f"{row.name} is laid out for CPU ranks, which the planner does not plan; `longhaul "
            f"probe memory --factory {row.name}` measures a step of it"
        )
    machine = clusters.load(cluster or row.cluster)
    job = _job(row, _layout(row, machine, nodes, layout), machine)
    broken = next(refusals(job, machine), None)
    if broken is not None:
        raise ValueError(f"{row.name} under {words_of(job.layout)}: {broken}")
    return Case(row=row, plan=plan(job, machine))


def _job(row: Row, layout: Layout, machine: Cluster) -> Job:
    return Job(
        card=row.card,
        seq_length=row.seq_length,
        tokens_per_batch=row.stage.tokens_per_batch,
        layout=layout,
        gpus_per_node=machine.gpus_per_node,
    )


def _layout(row: Row, machine: Cluster, nodes: int | None, words: str) -> Layout:
    chosen = layout_from(words) if words else row.layout
    if nodes is None:
        return chosen
    model_ranks = chosen.world_size // chosen.dp
    gpus = nodes * machine.gpus_per_node
    if gpus % model_ranks or gpus < model_ranks:
        raise ValueError(
            f"{words_of(chosen)} takes {model_ranks} GPUs a replica; {nodes} nodes of "
            f"{machine.gpus_per_node} do not hold a whole number of them"
        )
    return replace(chosen, dp=gpus // model_ranks)


def gib(size: float) -> str:
    """Return bytes in GiB."""
    return f"{size / GiB:,.1f} GiB"
