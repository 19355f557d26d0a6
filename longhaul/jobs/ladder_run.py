# SPDX-License-Identifier: Apache-2.0
"""Choices of `longhaul run` before anything large is loaded: ladder, card, folders, store."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.files.nearest import near_path
from data.hub import OF_THE_HUB
from data.store import Manifest
from longhaul.defaults import run_of, store_of
from longhaul.terminal.console import loading
from longhaul.terminal.messages import note
from longhaul.terminal.next_commands import tokenizer_of
from recipes.checkpoints.marker import require_origin
from recipes.shipped.machines import Machines, on_machines
from recipes.shipped.named import cards_of, combined
from recipes.shipped.rotation import of_other_cards
from recipes.shipped.row import Row
from recipes.shipped.table import ROWS
from recipes.spec.cluster import CLUSTER
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import MODELS, family_name, recipe_name
from recipes.spec.stage import Ladder, Stage


@dataclass(frozen=True)
class EvaluationParallel:
    """Tensor, context and pipeline ranks of a ladder's evaluations; None: the training's."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None

    @property
    def asked(self) -> bool:
        """Whether one of them is asked for."""
        return (self.tp, self.cp, self.pp) != (None, None, None)


@dataclass(frozen=True)
class LadderRun:
    """The stages to run, and the folders that they write to and read from."""

    ladder: Ladder
    card: ModelCard
    run: Path
    store: Path
    only: Stage | None = None
    """The only stage to run; None for all of them."""
    verify: bool | None = None
    """True: the whole store; False: neither store nor checkpoints; None: a sample of the store."""
    evaluation: EvaluationParallel = EvaluationParallel()

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return family_name(self.card, self.ladder)

    @property
    def stage_names(self) -> list[str]:
        """Recipe names of all stages in order."""
        return [recipe_name(self.card, self.ladder, stage) for stage in self.ladder.stages]

    @property
    def chosen(self) -> list[tuple[str, Stage]]:
        """Names and stages that are run, in order."""
        stages = zip(self.stage_names, self.ladder.stages, strict=True)
        return [(name, stage) for name, stage in stages if self.only in (None, stage)]

    def before(self, name: str) -> str | None:
        """Return the name of the stage before one of the ladder's, None for the first."""
        place = self.stage_names.index(name)
        return self.stage_names[place - 1] if place else None


def choose(ladder: str, card: str | None, stage: str = "") -> tuple[Ladder, ModelCard]:
    """Return ladder and card; raise ValueError for unknown ones and for a card that is ambiguous.

    Rotations that do not suit the card are noted; of a stage, only its own.
    """
    if card is None:
        cards = cards_of(ladder)
        rows = [row.card.name for row in ROWS.values() if row.ladder.name == ladder]
        fitting = list(dict.fromkeys(rows)) or list(cards)
        if len(fitting) != 1:
            which = "several cards" if fitting else "no card of its own"
            raise ValueError(
                f"ladder {ladder} has {which}; name one: --card {fitting[0] if fitting else 'CARD'}"
            )
        card = fitting[0]
    model, chosen, unsuited = combined(card, ladder, stage)
    require_own_import(model)
    for said in filter(None, (of_other_cards(chosen, model), *unsuited)):
        note(f"note: {said}")
    return chosen, model


def require_own_import(card: ModelCard) -> None:
    """Raise ValueError if `models/NAME` has the weights of another model of the card's name."""
    if card.path and not card.start:
        require_origin(MODELS / card.name, card.path.removeprefix(OF_THE_HUB))


def plan(
    ladder: Ladder,
    card: ModelCard,
    run: Path | None,
    store: Path | None,
    *,
    only: Stage | None = None,
    verify: bool | None = None,
) -> LadderRun:
    """Return the plan, with the conventional folders where none are named."""
    return LadderRun(
        ladder=ladder,
        card=card,
        run=run_of(card, ladder, run),
        store=store_of(card, store),
        only=only,
        verify=verify,
    )


def rows(
    plan: LadderRun, asked: Machines, *, submitted: bool = False, moved: bool = False
) -> list[Row]:
    """Return the stages that are run, on the machines asked for or as their recipes have them.

    A stage without a recipe is laid out on one node, or where it is `submitted` on the fewest that
    hold it. Shipped recipes are `moved` to the cluster asked for, as those that are submitted are.
    Raises ValueError where no layout fits.
    """
    return [
        _row(plan, stage, asked, submitted=submitted, moved=moved or submitted)
        for _, stage in plan.chosen
    ]


def require_own_folder(plan: LadderRun) -> None:
    """Raise ValueError if the run folder is of another card."""
    from eval.run_folder import read_run, run_path

    if not run_path(plan.run).is_file():
        return
    card = read_run(plan.run).card
    if card and card != plan.card.name:
        raise ValueError(
            f"--out {plan.run} is a run of the card {card}, not of {plan.card.name}; name another "
            "folder"
        )


def require_no_pipeline(plan: LadderRun) -> None:
    """Raise ValueError for pipeline stages where suites or RULER have to be run without them."""
    if (pp := plan.evaluation.pp or 1) == 1:
        return
    what = ""
    if plan.ladder.suites:
        what = "runs suites, which are evaluated"
    elif any(stage.gate.ruler is not None for _, stage in plan.chosen):
        what = "has gates on RULER's samples, which are answered"
    if what:
        raise ValueError(
            f"--eval-pp is {pp}, and ladder {plan.ladder.name} {what} without pipeline stages; "
            "expected --eval-pp 1, with --eval-tp or --eval-cp for more ranks"
        )


def require_here(row: Row, nodes: int | None, cluster: str) -> None:
    """Raise ValueError for nodes or a cluster that CPU ranks of this machine have nothing of."""
    given = {"--nodes": nodes, "--cluster": cluster}
    said = [f"{name} is {value}" for name, value in given.items() if value not in (None, "")]
    if row.layout.device == "cpu" and said:
        raise ValueError(
            f"{' and '.join(said)}, and {row.name} is laid out for CPU ranks of this machine; "
            "leave that out, or add --executor slurm"
        )


def require_gpus(name: str, needed: int, *, engine: bool) -> None:
    """Raise ValueError if this machine cannot train a recipe that has `needed` ranks on a node.

    It has too few GPUs, or torch cannot use them; or, with `engine`, Transformer Engine cannot be
    loaded.
    """
    import torch

    from slurm.preflight.node.gpu_software import driver_fault, engine_fault

    count = torch.cuda.device_count()
    if count < needed:
        without = "" if torch.version.cuda else f" (torch {torch.__version__} has no CUDA)"
        raise ValueError(
            f"{name} needs {needed} CUDA GPUs on each node and this machine has {count}{without}; "
            "run it on a machine that has them, or on CPU ranks with --device cpu"
        )
    with loading("Transformer Engine"):
        fault = driver_fault(needed) or (engine_fault() if engine else "")
    if fault:
        raise ValueError(f"{name} cannot train here: {fault}")


def require_gpus_of(rows: Sequence[Row], device: str | None, overrides: Sequence[str]) -> None:
    """Raise ValueError if this machine cannot train the rows on its GPUs.

    Rows of several nodes are refused elsewhere. Where an override states devices or modules, the
    resolved recipe is checked instead.
    """
    stated = any(word.startswith(("trainer.", "model.config.transformer")) for word in overrides)
    if stated or device == "cpu" or any(row.nodes > 1 for row in rows):
        return
    for row in rows:
        if row.layout.device == "cuda":
            require_gpus(row.name, row.layout.world_size, engine=True)


def _row(plan: LadderRun, stage: Stage, asked: Machines, *, submitted: bool, moved: bool) -> Row:
    from recipes.shipped import select

    shipped = select.shipped_row(plan.card, plan.ladder, stage)
    if shipped is not None:
        shipped = replace(shipped, card=plan.card, ladder=plan.ladder)
        if not asked.sized:
            return on_machines(shipped, asked) if asked.cluster and moved else shipped
        if shipped.layout.device == "cpu":
            return on_machines(shipped, asked)
    if submitted and not asked.sized and not asked.on_cpu:
        nodes = select.fewest_nodes(plan.card, stage, asked.cluster or CLUSTER)
        asked = replace(asked, nodes=nodes)
    return select.placed_row(plan.card, plan.ladder, stage, asked)


def require_store_of_published(plan: LadderRun) -> None:
    """Raise ValueError for a card whose weights are published and that has no store.

    Its store needs documents; that of a card that is trained from scratch can be made.
    """
    if not plan.store.exists() and plan.card.hf_id is not None:
        raise ValueError(without_store(plan))


def missing_store(plan: LadderRun) -> Iterator[str]:
    """Yield a sentence on the store that the run will read, if there is none yet."""
    if plan.store.exists():
        return
    if plan.card.hf_id is not None:
        yield without_store(plan)
    else:
        yield f"there is no token store at {plan.store}; the run makes one first"


def make_missing_store(plan: LadderRun) -> Manifest | None:
    """Make the store of a card that is trained from scratch and return its manifest.

    Returns None if there is a store; one that cannot be used is refused at once. Raises ValueError
    for a card whose weights are published, since its store needs documents.
    """
    if plan.store.exists():
        Manifest.load(plan.store)
        return None
    require_store_of_published(plan)
    require_store_of_run(plan)
    from data.prepare import prepare

    return prepare(None, plan.store, vocab_size=plan.card.vocab)


def require_store_of_run(plan: LadderRun) -> None:
    """Raise ValueError where the store that is made without documents would be another one.

    A run that has begun was reading its store, and a mix takes sources by name.
    """
    begun = plan.run / "run.json"
    shares = [stage.mix for _, stage in plan.chosen if stage.mix is not None and stage.mix.shares]
    if begun.is_file() or shares:
        why = f"{plan.run} was begun with it" if begun.is_file() else "the mix takes its sources"
        raise ValueError(
            f"there is no token store at {plan.store}{near_path(plan.store)}, and {why}; name it "
            "with --store, or make it: longhaul prepare --source NAME=PATH "
            f"{shlex.join(['--out', str(plan.store)])}"
        )


def without_store(plan: LadderRun) -> str:
    """Return a sentence: a published card has no store, and the command that makes one."""
    assert plan.card.hf_id is not None
    return (
        f"there is no token store at {plan.store}; make one: longhaul prepare --source DOCUMENTS "
        f"{shlex.join(['--tokenizer', tokenizer_of(plan.card), '--out', str(plan.store)])}"
    )
