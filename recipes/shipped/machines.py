# SPDX-License-Identifier: Apache-2.0
"""The machines and the layout that a user asks for, and a shipped recipe on them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from recipes.notation.layout import layout_from, words_of
from recipes.shipped.row import Row
from recipes.spec import cluster
from recipes.spec.cluster import CLUSTER, Cluster
from recipes.spec.layout import Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Stage

BY_LAYOUT = "stated by --layout"
"""Source of a layout that a user states in words."""
SCALED = "the shipped layout, on other machines"
"""Source of the layout of a shipped recipe on other machines."""
STATED = (BY_LAYOUT, SCALED)
"""Layouts that a command has to state in words, since the planner would choose others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Machines and layout as options of a command state them; what is left out is chosen."""

    nodes: int | None = None
    gpus: int | None = None
    """GPUs in all, for a part of a node."""
    layout: str = ""
    """In the words of `recipes.notation.layout`."""
    cluster: str = ""
    """The name or the path of a cluster file."""
    device: str | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether CPU ranks are asked for."""
        return self.device == "cpu" or "cpu" in self.layout.split()

    @property
    def sized(self) -> bool:
        """Whether a number of machines or a layout is asked for."""
        return bool(self.layout) or self.nodes is not None or self.gpus is not None

    @property
    def hardware(self) -> Cluster:
        """The hardware of the cluster; ValueError for an unknown one."""
        return cluster.load(self.cluster or CLUSTER)

    @property
    def gpus_in_all(self) -> int:
        """GPUs asked for, by default those of one node; ValueError for an uneven number."""
        return gpus_of(self.hardware, self.nodes, self.gpus)


def of_known_hardware(asked: Machines) -> Machines:
    """Return the machines without their cluster if its file states no hardware to plan for."""
    if not asked.cluster or cluster.states_hardware(asked.cluster):
        return asked
    return replace(asked, cluster="")


def gpus_of(machine: Cluster, nodes: int | None, gpus: int | None) -> int:
    """Return the GPUs of so many nodes, or `gpus`; raise ValueError unless these fill nodes."""
    for option, value in (("--nodes", nodes), ("--gpus", gpus)):
        if value is not None and value < 1:
            raise ValueError(f"{option} is {value}; it must be at least 1")
    if gpus is None:
        return (nodes or 1) * machine.gpus_per_node
    if nodes is not None and nodes * machine.gpus_per_node != gpus:
        raise ValueError(
            f"--gpus is {gpus}, and {nodes} {'nodes' if nodes > 1 else 'node'} of {machine.name} "
            f"{'have' if nodes > 1 else 'has'} {nodes * machine.gpus_per_node}; leave one of "
            "--nodes and --gpus out"
        )
    if gpus > machine.gpus_per_node and gpus % machine.gpus_per_node:
        raise ValueError(
            f"--gpus is {gpus}, not a whole number of nodes of {machine.gpus_per_node}; take "
            f"{gpus // machine.gpus_per_node * machine.gpus_per_node}, or fewer than a node has"
        )
    return gpus


def nodes_for(layout: Layout, machine: Cluster) -> int:
    """Return the nodes that a layout's ranks fill."""
    return -(-layout.world_size // machine.gpus_per_node)


def require_no_machines(asked: Machines) -> None:
    """Raise ValueError if GPUs are asked for together with CPU ranks."""
    given = {"--nodes": asked.nodes, "--gpus": asked.gpus, "--cluster": asked.cluster}
    if said := [name for name, value in given.items() if value not in (None, "")]:
        raise ValueError(
            f"{' and '.join(said)} cannot go with CPU ranks; leave "
            f"{'them' if len(said) > 1 else 'it'} out, or --device cpu"
        )


def stated_layout(name: str, card: ModelCard, stage: Stage, asked: Machines) -> Layout:
    """Return the layout that words state for the stage of a recipe, called `name` in errors.

    Raises ValueError for one that cannot train it. Of CPU ranks precision is fp32.
    """
    layout = layout_from(asked.layout)
    if asked.on_cpu:
        if layout.world_size % (asked.nodes or 1):
            raise ValueError(
                f"--layout {asked.layout!r} has {layout.world_size} ranks, and {asked.nodes} nodes "
                "cannot share them evenly"
            )
        layout = replace(layout, device="cpu", precision="fp32")
        _require_suited(name, card, stage, layout, layout.world_size // (asked.nodes or 1))
        return layout
    machine = asked.hardware
    ranks = layout.world_size
    if (asked.nodes, asked.gpus) != (None, None) and ranks != asked.gpus_in_all:
        said = f"--gpus is {asked.gpus}" if asked.nodes is None else f"--nodes is {asked.nodes}"
        dp, rest = divmod(asked.gpus_in_all * layout.dp, ranks)
        raise ValueError(
            f"--layout {asked.layout!r} has {ranks} ranks and {said}, {asked.gpus_in_all} GPUs; "
            f"{f'set dp{dp}, or ' if dp and not rest else ''}leave the number out"
        )
    _require_trainable(name, card, stage, layout, machine)
    return layout


def in_its_precision(row: Row, words: str) -> str:
    """Return the words of a layout for a row; on GPUs without FP8 in them, with the row's."""
    if row.layout.fp8.recipe == "none" or "fp8:" in words or {"cpu", "fp32"} & set(words.split()):
        return words
    return f"{words} {words_of(Layout(fp8=row.layout.fp8))}"


def on_machines(row: Row, asked: Machines) -> Row:
    """Return a shipped recipe on the machines asked for: its layout, or the words', more replicas.

    Raises ValueError where they do not hold a whole number of replicas.
    """
    if row.layout.device == "cpu" and not asked.layout:
        if asked.gpus is not None:
            raise ValueError(
                f"--gpus is {asked.gpus} and {row.name} is laid out for CPU ranks; leave it out, "
                "or name a layout of GPUs by --layout"
            )
        nodes = asked.nodes or row.nodes
        if row.layout.world_size % nodes:
            raise ValueError(
                f"--nodes is {nodes} and {row.name} has {row.layout.world_size} CPU ranks, which "
                "they cannot share evenly"
            )
        return replace(row, nodes=nodes)
    # Other ends of a name state machines or a layout, which are not those of the row any more.
    variant = row.variant if row.variant == "fp8" else ""
    if asked.layout:
        on_gpus = row.layout.device == "cuda" and not asked.on_cpu
        named = asked.cluster or (row.cluster if on_gpus else "")
        asked = replace(asked, cluster=named, layout=in_its_precision(row, asked.layout))
        layout = stated_layout(row.name, row.card, row.stage, asked)
        if layout.device == "cpu":
            nodes = asked.nodes or 1
            row = replace(row, layout=layout, nodes=nodes, cluster="local")
            return replace(row, variant=variant, pinned=BY_LAYOUT)
        named = named or CLUSTER
        nodes = nodes_for(layout, cluster.load(named))
        row = replace(row, layout=layout, nodes=nodes, cluster=named)
        return replace(row, variant=variant, pinned=BY_LAYOUT)
    named = asked.cluster or row.cluster
    machine = cluster.load(named)
    gpus = row.layout.world_size
    if (asked.nodes, asked.gpus) != (None, None):
        gpus = gpus_of(machine, asked.nodes, asked.gpus)
    dp, rest = divmod(row.layout.dp * gpus, row.layout.world_size)
    if rest or not dp:
        raise ValueError(
            f"{row.name} takes {row.layout.world_size // row.layout.dp} GPUs a replica "
            f"({words_of(replace(row.layout, dp=1))}); {gpus} GPUs do not hold a whole number of "
            "them; name another layout by --layout"
        )
    layout = replace(row.layout, dp=dp)
    _require_trainable(row.name, row.card, row.stage, layout, machine)
    nodes = nodes_for(layout, machine)
    scaled = (layout, nodes) != (row.layout, row.nodes)
    row = replace(row, layout=layout, nodes=nodes, cluster=named)
    return replace(row, variant=variant, pinned=SCALED) if scaled else row


def _require_suited(
    name: str, card: ModelCard, stage: Stage, layout: Layout, ranks_per_node: int
) -> None:
    """Raise ValueError for a layout that does not suit the model or the batch, on any machine."""
    from recipes.constraints.violations import violations
    from recipes.planner.feasibility import training_step
    from recipes.planner.workload import Workload

    workload = Workload(
        card=card,
        seq_length=stage.seq_length,
        tokens_per_batch=stage.tokens_per_batch,
        layout=layout,
        gpus_per_node=ranks_per_node,
    )
    _refuse(name, layout, violations(training_step(workload, ranks_per_node)))


def _require_trainable(
    name: str, card: ModelCard, stage: Stage, layout: Layout, machine: Cluster
) -> None:
    """Raise ValueError for a layout that cannot train a stage on a cluster."""
    from recipes.planner.feasibility import violations
    from recipes.planner.search.request import of_stage

    question = of_stage(card, stage, machine, gpus=layout.world_size, fp8=layout.fp8)
    _refuse(name, layout, violations(question.workload(layout), machine))


def _refuse(name: str, layout: Layout, violated: Iterator[str]) -> None:
    """Raise ValueError with the first constraint that a layout violates, if there is one."""
    broken = next(violated, None)
    if broken is not None:
        raise ValueError(f"{name} under the layout {words_of(layout)!r}: {broken}")
