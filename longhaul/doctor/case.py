# SPDX-License-Identifier: Apache-2.0
"""The case that `longhaul doctor` examines: a stage on a cluster, under the layout that ran."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from longhaul.defaults import planned_cluster
from longhaul.terminal.next_commands import OnCluster, of_store, sized
from recipes.notation.layout import layout_from, words_of
from recipes.planner.feasibility import violations
from recipes.planner.overrides import override_words
from recipes.planner.plan import Plan, plan, untried
from recipes.planner.search.request import SearchRequest, of_stage
from recipes.planner.workload import Workload
from recipes.shipped.machines import Machines, gpus_of, in_its_precision
from recipes.shipped.named import combined
from recipes.shipped.row import Row
from recipes.shipped.select import layout_for, stage_of
from recipes.shipped.table import ROWS
from recipes.spec import cluster as clusters
from recipes.spec.cluster import CLUSTER, Cluster
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import counted, length_shown, recipe_name
from recipes.spec.stage import Ladder, Stage
from recipes.spec.suggest import lookup
from recipes.spec.units import GiB

LINE = 78
ONE_RECIPE = "name one recipe: --factory NAME, or --card with --ladder and --stage"

Factory = Annotated[str, typer.Option(help="A shipped recipe, such as llama3_8b_nemo_64k.")]
CardName = Annotated[str, typer.Option(help="A model card, with --ladder and --stage: any recipe.")]
LadderName = Annotated[str, typer.Option(help="The ladder of the stage.")]
StageName = Annotated[str, typer.Option(help="The stage, by its length, such as 64K.")]
ClusterName = Annotated[
    str,
    typer.Option(
        help="Cluster file: a name or a path.",
        show_default=f"the recipe's; for a --card longhaul.toml's, or {CLUSTER}",
    ),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, help="Nodes.", show_default="the recipe's, the layout's, or 1")
]
LayoutWords = Annotated[
    str, typer.Option(help="The layout that ran, in words, such as 'tp2 dp4 tile-loss'.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A stage of a ladder on a card, and the options of `longhaul pretrain` that select it."""

    card: ModelCard
    ladder: Ladder
    stage: Stage
    cluster: str
    """The name or the path of its cluster file."""
    shipped: Row | None = None
    """The shipped recipe; of others the planner chooses the layout when it is needed."""
    store: Path | None = None
    """The token store to train on; None for that of the card."""

    @property
    def name(self) -> str:
        """Name of the recipe."""
        if self.shipped is not None:
            return self.shipped.name
        return recipe_name(self.card, self.ladder, self.stage)

    def workload(self, layout: Layout, machine: Cluster) -> Workload:
        """Return its workload under a layout."""
        gpus, fp8 = layout.world_size, layout.fp8
        return of_stage(self.card, self.stage, machine, gpus=gpus, fp8=fp8).workload(layout)

    def asked(self, gpus: int) -> str:
        """Return the options that name the recipe; a shipped one has its own GPUs."""
        if self.shipped is not None:
            return f"--factory {self.shipped.name}"
        return (
            f"--card {self.card.word} --ladder {self.ladder.word} "
            f"--stage {length_shown(self.stage.seq_length)} "
            f"--cluster {shlex.quote(self.cluster)} {sized(gpus, self.cluster)}"
        )

    def looked_at(self, gpus: int) -> str:
        """Return the options that name the recipe to the doctor, with another cluster if any."""
        asked = self.asked(gpus)
        other = self.shipped is not None and self.cluster != self.shipped.cluster
        return f"{asked} --cluster {shlex.quote(self.cluster)}" if other else asked

    def trained_by(self, gpus: int, words: Sequence[str], layout: str = "") -> str:
        """Return the command that trains it on a number of GPUs with some overrides, or a layout.

        An explanation precedes it, as a comment on a line of its own.
        """
        stated = [*([f"--layout '{layout}'"] if layout else []), *of_store(self.store)]
        if gpus <= clusters.load(self.cluster).gpus_per_node:
            shipped = self.shipped is not None and not words
            command = folded([f"longhaul pretrain {self.asked(gpus)}", *stated, *words])
            return after_comments(command, "the recipe as shipped" if shipped else "")
        if self.shipped is not None and self.shipped.variant:  # ladders have first rows
            layout = words_of(self.shipped.layout)
        submitted = OnCluster(
            card=self.card, ladder=self.ladder, stage=self.stage, cluster=self.cluster,
            gpus=gpus if self.shipped is None else None, layout=layout, store=self.store,
        )  # fmt: skip
        return after_comments(folded([*submitted.words, *words]), submitted.explained)

    def laid_out(self, gpus: int) -> Layout:
        """Return the layout that `longhaul pretrain` starts from; raise ValueError if none."""
        if self.shipped is not None:
            return self.shipped.layout
        return layout_for(self.card, self.ladder, self.stage, self.cluster, gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A recipe and the plan of the layout that ran."""

    recipe: Recipe
    plan: Plan

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return self.recipe.name

    @property
    def asked(self) -> str:
        """The options that name the recipe."""
        return self.recipe.asked(self.plan.gpus)

    @property
    def looked_at(self) -> str:
        """The options with which the doctor examines the recipe on the same cluster."""
        return self.recipe.looked_at(self.plan.gpus)

    @property
    def question(self) -> SearchRequest:
        """The planner's question for the same GPUs."""
        workload = self.plan.workload
        return SearchRequest(
            card=workload.card,
            seq_length=workload.seq_length,
            tokens_per_batch=workload.tokens_per_batch,
            cluster=self.plan.cluster,
            gpus=self.plan.gpus,
            fp8=workload.layout.fp8,
        )

    def head(self) -> Iterator[str]:
        """Yield the two lines that describe the case."""
        workload, machine = self.plan.workload, self.plan.cluster
        yield (
            f"{self.name}: {workload.card.name} at {length_shown(workload.seq_length)} tokens on "
            f"{counted(self.plan.gpus, 'GPU')} of {machine.name} ({machine.gpu.name})"
        )
        yield (
            f"layout: {words_of(workload.layout)}; "
            f"{counted(workload.micro_batches, 'micro-batch')} of "
            f"{_sequences(workload.layout.micro_batch)} on each data rank"
        )

    def content(self) -> dict[str, Any]:
        """Return the description of the case for JSON."""
        workload = self.plan.workload
        return {
            "recipe": self.name,
            "card": workload.card.name,
            "seq_length_tokens": workload.seq_length,
            "gpus": self.plan.gpus,
            "cluster": self.plan.cluster.name,
            "layout": words_of(workload.layout),
        }

    def command(self, workload: Workload) -> str:
        """Return the command that trains the recipe as this workload.

        A shipped recipe gets overrides; any other the words of a layout that is not the planner's.
        """
        recipe, gpus = self.recipe, workload.layout.world_size
        if recipe.shipped is not None:
            begun = recipe.workload(recipe.shipped.layout, self.plan.cluster)
            return recipe.trained_by(gpus, override_words(begun, workload))
        try:
            planned = not untried(workload.layout) and recipe.laid_out(gpus) == workload.layout
        except ValueError:
            planned = False
        begun = recipe.workload(workload.layout, self.plan.cluster)
        stated = "" if planned else words_of(workload.layout)
        return recipe.trained_by(gpus, override_words(begun, workload), stated)

    def same_layout(self, other: Layout) -> bool:
        """Return whether a layout equals the case's, but for the memory limit of its offload."""
        mine = self.plan.workload.layout
        if "none" in (mine.offload.tensors, other.offload.tensors):
            return mine == other
        offload = replace(mine.offload, cap_gib=other.offload.cap_gib)
        return replace(mine, offload=offload) == other


def folded(words: list[str]) -> str:
    """Return a command folded over lines that a shell joins."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) > LINE - 3:
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def after_comments(command: str, *comments: str) -> str:
    """Return a command below its comments, to be printed with an indent of two columns.

    A shell without interactive comments, such as zsh, passes a comment after a command to it.
    """
    return "\n  ".join([*(f"# {comment}" for comment in comments if comment), command])


def on_one_line(command: str) -> str:
    """Return a folded command without its folds and comments, for programs."""
    lines = (line.strip() for line in command.replace(" \\\n    ", " ").splitlines())
    return " ".join(line for line in lines if not line.startswith("# "))


def case(
    factory: str, asked: Machines, *, card: str = "", ladder: str = "", stage: str = ""
) -> Case:
    """Return the case that the options of a command name.

    Raises ValueError for an unknown name, for two recipes or none, for CPU ranks, and for what the
    recipe check would refuse.
    """
    is_combined = bool(card or ladder or stage)
    if bool(factory) == is_combined:
        raise ValueError(ONE_RECIPE)
    recipe = (
        _shipped(factory, asked.cluster)
        if factory
        else _combined(card, ladder, stage, asked.cluster)
    )
    machine = clusters.load(recipe.cluster)
    workload = recipe.workload(_layout(recipe, machine, asked), machine)
    broken = next(violations(workload, machine), None)
    if broken is not None:
        raise ValueError(f"{recipe.name} under {words_of(workload.layout)}: {broken}")
    return Case(recipe=recipe, plan=plan(workload, machine))


def _shipped(factory: str, cluster: str) -> Recipe:
    row = lookup("recipe", factory, ROWS)
    if row.layout.device == "cpu":
        raise ValueError(
            f"{row.name} is laid out for CPU ranks, which the planner does not plan; `longhaul "
            f"probe memory --factory {row.name}` measures a step of it"
        )
    return Recipe(
        card=row.card,
        ladder=row.ladder,
        stage=row.stage,
        cluster=cluster or row.cluster,
        shipped=row,
    )


def _combined(card: str, ladder: str, stage: str, cluster: str) -> Recipe:
    model, climbed, _ = combined(card, ladder, stage)
    return Recipe(
        card=model,
        ladder=climbed,
        stage=stage_of(climbed, stage),
        cluster=planned_cluster(cluster) or CLUSTER,
    )


def _layout(recipe: Recipe, machine: Cluster, asked: Machines) -> Layout:
    gpus = None
    if (asked.nodes, asked.gpus) != (None, None):
        gpus = gpus_of(machine, asked.nodes, asked.gpus)
    if asked.layout:
        words = asked.layout
        if recipe.shipped is not None:
            words = in_its_precision(recipe.shipped, words)
        chosen = layout_from(words)
    elif recipe.shipped is not None:
        chosen = recipe.shipped.layout
    else:
        try:
            return recipe.laid_out(gpus or machine.gpus_per_node)
        except ValueError as error:
            raise ValueError(f"{error}. Name the layout that ran by --layout") from error
    if gpus is None:
        return chosen
    model_ranks = chosen.world_size // chosen.dp
    if gpus % model_ranks or gpus < model_ranks:
        raise ValueError(
            f"{words_of(chosen)} takes {model_ranks} GPUs a replica; {gpus} GPUs do not hold a "
            "whole number of replicas"
        )
    return replace(chosen, dp=gpus // model_ranks)


def _sequences(micro_batch: int) -> str:
    return counted(micro_batch, "sequence")


def gib(size: float) -> str:
    """Return bytes in GiB."""
    return f"{size / GiB:,.1f} GiB"
