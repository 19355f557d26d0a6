# SPDX-License-Identifier: Apache-2.0
"""Commands that train a stage or a ladder, ready to be typed; light.

`longhaul pretrain` trains only on this machine; several nodes take a job on a cluster.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.hub import OF_THE_HUB
from longhaul.defaults import planned_cluster, store_of
from recipes.notation.layout import words_of
from recipes.shipped.machines import SCALED, STATED
from recipes.shipped.row import Row
from recipes.spec import cluster
from recipes.spec.cluster import CLUSTER
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import MODELS, length_shown, length_word
from recipes.spec.stage import Ladder, Stage

YOUR_CLUSTER = "YOUR_CLUSTER.yaml"
"""Placeholder for a copy of a shipped cluster file, which has neither account nor image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnCluster:
    """A ladder, or a stage of it, as jobs on the nodes of a cluster."""

    card: ModelCard
    ladder: Ladder
    cluster: str
    """The name or the path of its cluster file."""
    stage: Stage | None = None
    """The only stage; None for all."""
    gpus: int | None = None
    """GPUs for the planner to lay it out on; None for the shipped layouts."""
    layout: str = ""
    """The layout in words, instead of the planner's."""
    store: Path | None = None
    """The token store; None for that of the card."""

    @property
    def words(self) -> list[str]:
        """The parts of the command, with the user's file in place of a shipped one."""
        words = ["longhaul run", f"--ladder {self.ladder.word}", f"--card {self.card.word}"]
        if self.stage is not None and len(self.ladder.stages) > 1:
            words.append(f"--stage {_length(self.stage)}")
        words += ["--executor slurm", f"--cluster {shlex.quote(self._file)}"]
        if self.gpus is not None:
            words.append(sized(self.gpus, self.cluster))
        if self.layout:
            words.append(f"--layout {shlex.quote(self.layout)}")
        return words + of_store(self.store)

    @property
    def command(self) -> str:
        """The command on one line."""
        return " ".join(self.words)

    @property
    def explained(self) -> str:
        """Explanation of the cluster file in the command; empty for a user's own file."""
        if self._file != YOUR_CLUSTER:
            return ""
        return (
            f"{YOUR_CLUSTER} is a copy of slurm/clusters/{self.cluster}.yaml with your account and "
            "image"
        )

    @property
    def _file(self) -> str:
        return YOUR_CLUSTER if self.cluster in cluster.names() else self.cluster


def of_store(store: Path | None) -> list[str]:
    """Return the option that names a token store; none for that of the card."""
    return [] if store is None else [f"--store {shlex.quote(str(store))}"]


def submitted(row: Row, gpus: int, only: Stage | None) -> OnCluster:
    """Return the job of a row, or of all stages of its ladder on the same machines."""
    from recipes.shipped.select import shipped_row

    shipped = shipped_row(row.card, row.ladder, row.stage)
    as_shipped = (
        shipped is not None
        and (shipped.layout, shipped.pinned) == (row.layout, row.pinned)
        and gpus == row.layout.world_size
    )
    moved = row.pinned == SCALED and only is None  # each stage has its own layout and size
    stated = (row.pinned in STATED and not moved) or bool(row.variant)
    return OnCluster(
        card=row.card,
        ladder=row.ladder,
        cluster=row.cluster,
        stage=only,
        gpus=None if as_shipped or moved else gpus,
        layout=words_of(row.layout) if stated else "",
    )


def sized(gpus: int, name: str) -> str:
    """Return the option for a number of GPUs of a cluster: `--nodes`, or `--gpus` for less."""
    nodes, rest = divmod(gpus, cluster.load(name).gpus_per_node)
    return f"--gpus {gpus}" if rest else f"--nodes {nodes}"


def importing(card: ModelCard) -> str:
    """Return the command that imports the weights that a ladder starts from, to `models/CARD`."""
    if card.path and card.hf_id is not None:
        to = MODELS / card.name
        source = shlex.quote(card.path.removeprefix(OF_THE_HUB))
        return f"longhaul import --from {source} --to {to}{_stated_context(card)}"
    revision = f" --revision {card.hf_revision}" if card.hf_revision else ""
    return f"longhaul import --from {card.hf_id or 'YOUR_WEIGHTS'}{revision} --card {card.name}"


def preparing(card: ModelCard, ladder: Ladder) -> str:
    """Return the command that prepares a store with the tokenizer of a ladder's weights."""
    out = f"--out {shlex.quote(str(store_of(card)))}"
    if ladder.stages[0].start == "scratch":
        return f"longhaul prepare --vocab-size {card.vocab} {out}"
    tokenizer = shlex.quote(tokenizer_of(card))
    return f"longhaul prepare --source DOCUMENTS --tokenizer {tokenizer} {out}"


def tokenizer_of(card: ModelCard) -> str:
    """Return the tokenizer of a card's weights as `--tokenizer` takes it.

    It is that of the import or folder that names the card, which may differ from its model on the
    hub. Weights of a revision have theirs there too, so it is taken from their import.
    """
    if card.start or card.hf_revision:
        return str(Path(card.start or MODELS / card.name) / "hugging_face")
    if card.path and not card.path.startswith(OF_THE_HUB):
        return card.path
    return card.hf_id or "YOUR_TOKENIZER"


def new_ladder(card: ModelCard, seq_length: int) -> tuple[str, str]:
    """Return the file of a new ladder of one stage for a card, and the command that writes it."""
    length = length_word(seq_length).upper()
    file = f"{card.name}_{length.lower()}.yaml"
    new = f"longhaul ladders new {shlex.quote(file)} --card {card.word} --seq {length}"
    return file, new + _stated_context(card)


def _stated_context(card: ModelCard) -> str:
    return "" if card.stated_context is None else f" --native-context {card.stated_context}"


def lacks_weights(card: ModelCard, ladder: Ladder) -> bool:
    """Return whether a ladder starts from the weights of a card that are not imported here."""
    of_card = ladder.stages[0].start == "card"
    return of_card and not (card.start or Path(MODELS, card.name).exists())


def not_here_yet(card: ModelCard, ladder: Ladder, *, store: Path | None = None) -> Iterator[str]:
    """Yield the commands that make the weights and the store that a ladder reads, if missing.

    A `store` that is named is there already.
    """
    if lacks_weights(card, ladder):
        yield importing(card)
    if store is None and ladder.stages[0].start != "scratch" and not store_of(card).exists():
        yield preparing(card, ladder)


def training(card: ModelCard, ladder: Ladder, stage: Stage) -> str | None:
    """Return the command that trains a stage on the fewest nodes that hold it; None if none do.

    For the model that is trained on CPU ranks, the command uses those.
    """
    from recipes.models import TINY
    from recipes.shipped.select import fewest_nodes

    alone = f"longhaul pretrain --card {card.word} --ladder {ladder.word} --stage {_length(stage)}"
    if card is TINY:
        return f"{alone} --device cpu"
    name = planned_cluster() or CLUSTER
    nodes = fewest_nodes(card, stage, name)
    if nodes is None:
        return None
    if nodes == 1:
        return alone
    gpus = nodes * cluster.load(name).gpus_per_node
    return OnCluster(card=card, ladder=ladder, stage=stage, cluster=name, gpus=gpus).command


def _length(stage: Stage) -> str:
    return length_shown(stage.seq_length).replace(",", "")
