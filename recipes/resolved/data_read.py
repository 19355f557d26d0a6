# SPDX-License-Identifier: Apache-2.0
"""The data of a stage as it ran, read back from its folder: the mix, and what was read of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files.user_file import read_yaml
from data.mixture.as_read import SourceRead, read_by_source
from data.mixture.config import Mix
from data.mixture.stage_rows import SEED, StageRows, for_store, mix_of
from data.packing.rows import NotPackedError
from data.store import Manifest, require_tokenizer
from recipes.checkpoints.marker import RECIPE, TRAINED_ON, checkpoint_facts, newest_checkpoint
from recipes.spec.schema import decode


@dataclass(frozen=True)
class StageData:
    """The numbers of a stage that its rows follow from."""

    mix: Mix | None
    seq_length: int
    steps: int
    sequences: int
    """Of a step."""
    within: bool
    seed: int
    skipped: tuple[tuple[int, int], ...] = ()
    """Windows of samples that the run has skipped: the first and the count of each."""

    def rows(
        self, manifest: Manifest, mix: Mix, document_lengths: Sequence[Any] | None = None
    ) -> StageRows:
        """Return the rows that the stage takes of a store by a mix (`StageRows.of`)."""
        return StageRows.of(
            manifest,
            mix,
            seq_length=self.seq_length,
            steps=self.steps,
            rows=self.sequences,
            seed=self.seed,
            document_lengths=document_lengths,
        )


@dataclass(frozen=True)
class DataRead:
    """What a stage has read of each source of its store."""

    stage: str
    step: int
    """The newest completed one."""
    store: Path
    sources: tuple[SourceRead, ...]


def data_of(folder: Path) -> tuple[StageData, Path]:
    """Return the data of a stage as it ran, with overrides and what it skipped, and its store.

    Raises ValueError for a recipe that does not train on a store.
    """
    recipe = read_yaml(folder / RECIPE)
    rewinds = folder / "rewinds.jsonl"
    lines = rewinds.read_text().splitlines() if rewinds.is_file() else []
    try:
        data = recipe["data"]
        of = StageData(
            mix=decode(Mix, _plain(data["mix"]), "data.mix") if data.get("mix") else None,
            seq_length=data["seq_length"],
            steps=recipe["trainer"]["max_steps"],
            sequences=data["global_batch_size"],
            within=data.get("documents") == "within",
            seed=data.get("seed", SEED),
            skipped=tuple(tuple(json.loads(line)["samples"]) for line in lines if line.strip()),
        )
        return of, Path(data["store"])
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{folder / RECIPE} does not name the store that it trains on") from None


def data_read(folder: Path) -> DataRead | None:
    """Return what a stage has read up to its newest checkpoint, or None if it has none yet.

    A stage without a mix reads the one source of its store in whole sequences. Raises ValueError if
    the store is gone, or is another one than the stage was trained on.
    """
    newest = newest_checkpoint(folder / "checkpoints")
    facts = None if newest is None else checkpoint_facts(newest)
    if facts is None or not facts["step"]:
        return None
    of, store = data_of(folder)
    manifest, step = Manifest.load(store), int(facts["step"])
    require_tokenizer(manifest, facts, of=f"{folder.name} was trained with")
    if facts.get(TRAINED_ON, manifest.train_sha256) != manifest.train_sha256:
        raise ValueError(
            f"the store {store} has other documents than {folder.name} was trained on: the SHA-256 "
            f"of its files is {manifest.train_sha256}, not {facts[TRAINED_ON]}"
        )
    stated = mix_of(of.mix, manifest)
    if stated is None:
        tokens = step * of.sequences * of.seq_length
        only = SourceRead(manifest.train.parts[0].source, 1.0, 1.0, tokens)
        return DataRead(folder.name, step, store, (only,))
    mix = for_store(stated, manifest)
    try:
        rows = of.rows(manifest, mix)
    except NotPackedError as error:
        raise ValueError(
            f"{error}, so that the store {store} is not as it was when {folder.name} was trained on"
            f" it; if its documents are the same, `longhaul data inspect --run {folder.parents[1]} "
            f"--stage {folder.name}` packs them again"
        ) from None
    read = read_by_source(rows, mix, step, of.skipped)
    return DataRead(folder.name, step, store, tuple(read))


def _plain(node: Any) -> Any:
    """Return a node of a resolved recipe without the names of its classes."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {name: _plain(value) for name, value in node.items() if name != "_target_"}
