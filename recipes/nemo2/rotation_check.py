# SPDX-License-Identifier: Apache-2.0
"""Refuse to train a model that does not rotate as its recipe states.

Two comparisons with the recipe's `RopeScaling`, both before anything is saved:

1. when the model is built: the frequencies, the temperature and the pairing that its forward uses,
   and at a resume those that the checkpoint records;
2. in the first step: the cos and sin that attention gets for a few positions, in float64.

All ranks exchange what they found, so all of them end with the same error. The first rank logs the
rotation in effect, how it differs from that of the checkpoint that the stage starts from, and
writes both into the stage's folder:

    rotation.json     {"in_effect": {...}, "start": {...} or null, "start_recorded": true}
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from custom_modules.gpt.rotation import TableProbe, rotation_of
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.in_effect import RotationInEffect
from custom_modules.rope.rotary import stated_rotation
from data.files.json_object import json_object
from data.files.whole import write_text
from recipes.checkpoints.marker import checkpoint_facts
from recipes.checkpoints.rotation import (
    RotationError,
    pattern_in,
    recorded_rotation,
    require_recorded,
    rotation_before,
)

LOG = logging.getLogger("custom_modules.rotation")
"""Child of the logger whose messages the first rank of a training shows."""
RECORD = "rotation.json"


class RotationCheck(Callback):
    """Compare the built model's rotation with the recipe's, and record it."""

    def __init__(self) -> None:
        """Attach to no model yet."""
        self.probe: TableProbe | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the built model; raise RotationError on all ranks if one differs."""
        config: Any = pl_module.config
        model = trainer.strategy.megatron_parallel
        found: RotationInEffect | None = None
        try:
            found = rotation_of(model, config.seq_length)
            stated = stated_rotation(
                config.rope, config.kv_channels, config.seq_length, config.pattern
            )
            why = found.difference(stated)
            said = f"{_refused(config.rope)}: {why}" if why else ""
            if (resumed := _folder(trainer.ckpt_path)) is not None and not said:
                require_recorded(resumed, found, "the model of this stage")
        except ValueError as error:
            said = str(error)
        _require_of_all(said, None if found is None else found.sha256)
        assert found is not None
        start = _folder(getattr(trainer.strategy.restore_config, "path", None))
        if trainer.is_global_zero:
            _record(trainer, config, found, start)
        self.probe = TableProbe(model, config.rope, config.pattern)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Raise RotationError on all ranks if the first step's tables differ on one."""
        if self.probe is None:
            return
        self.probe.remove()
        config: Any = pl_module.config
        wrong = self.probe.wrong
        if self.probe.attached and not self.probe.compared:
            LOG.warning("the rotary tables of the first step could not be compared")
        self.probe = None
        _require_of_all(f"{_refused(config.rope)}: {wrong}" if wrong else "")


def _refused(rope: RopeScaling) -> str:
    factor = "" if rope.method == "default" else f" and factor {rope.factor:g}"
    return (
        f"the built model does not rotate by {rope.method} with base {rope.base:g}{factor}, as its "
        "recipe states"
    )


def _folder(path: Any) -> Path | None:
    """Return the checkpoint that NeMo names by its folder or by its weights."""
    if path is None:
        return None
    folder = Path(str(path))
    return folder.parent if folder.name == "weights" else folder


def _require_of_all(said: str, sha256: str | None = None) -> None:
    """Raise RotationError on every rank if one of them has found a difference, or has another."""
    ranks = torch.distributed.get_world_size()
    of_all: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(of_all, (said, sha256))
    for rank, (message, _) in enumerate(of_all):
        if message:
            where = f" (rank {rank} of {ranks})" if ranks > 1 else ""
            raise RotationError(f"{message}{where}; nothing was saved")
    hashes = [each for _, each in of_all]
    if len(set(hashes)) > 1:
        other = next(rank for rank, each in enumerate(hashes) if each != hashes[0])
        LOG.warning(
            "rank 0 and rank %d round frequencies apart (SHA-256 %s and %s); each is that of the "
            "recipe", other, hashes[0], hashes[other],
        )  # fmt: skip


def _record(trainer: Trainer, config: Any, found: RotationInEffect, start: Path | None) -> None:
    """Log the rotation and its change from the start, and write both into the stage's folder."""
    LOG.info("rotation in effect: %s", found.describe())
    before, recorded = None, False
    if start is not None:
        before, recorded = _before(start, config), recorded_rotation(start) is not None
    if before is not None:
        change = found.difference(before, but_length=True)
        if change:
            LOG.info("rotation changed from: %s", before.describe())
            LOG.info("rotation changed to: %s", found.describe())
        else:
            LOG.info("rotation of %s kept", start)
    content = {
        "in_effect": found.to_dict(),
        "start": None if before is None else before.summary(),
        "start_recorded": recorded,
    }
    if trainer.checkpoint_callback is None:
        return
    path = Path(trainer.checkpoint_callback.dirpath).parent / RECORD
    if start is None:  # a resume keeps what the first start wrote
        content |= {name: value for name, value in json_object(path).items() if name != "in_effect"}
    write_text(path, json.dumps(content, indent=1) + "\n")


def _before(start: Path, config: Any) -> RotationInEffect | None:
    """Return what the weights of the start were trained with; None if they do not state it."""
    facts = checkpoint_facts(start) or {}
    before = rotation_before(start)
    if before is None and "rope" in facts:
        rope = RopeScaling.from_dict(facts["rope"])
        before = stated_rotation(
            rope, config.kv_channels, int(facts["seq_length"]), pattern_in(facts)
        )
    return before
