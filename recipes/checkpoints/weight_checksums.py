# SPDX-License-Identifier: Apache-2.0
"""Two sums of each weight of the whole model, to verify that a hand-over preserves weights.

    sum(w), sum(w * w)        in double precision, over all ranks, each shard once

A stage that starts from the checkpoint of another has before its first step the sums that the other
had after its last. Shards are those of Megatron's distributed checkpoint, gathered by name and
layer, so the sums do not depend on the layout.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from data.files.whole import write_text

Sums = dict[str, list[float]]


class WeightChecksums(Callback):
    """Write the sums before the first step and after the last to a file, as `start` and `end`."""

    def __init__(self, path: str) -> None:
        """Take the path of the file to write."""
        self.path = Path(path)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the sums at the start of training."""
        self._write("start", trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the sums at the end of training."""
        self._write("end", trainer)

    def _write(self, when: str, trainer: Trainer) -> None:
        sums = weight_checksums(trainer.strategy.megatron_parallel.sharded_state_dict())
        if not trainer.is_global_zero:
            return
        before = json.loads(self.path.read_text()) if self.path.exists() else {}
        write_text(self.path, json.dumps({**before, when: sums}, indent=1))


@torch.no_grad()
def weight_checksums(state: dict[str, Any]) -> Sums:
    """Return sum and sum of squares of each weight over all ranks, by name and layer."""
    apply_factories(state)
    mine: Sums = {}
    for shard in _shards(state):
        if shard.data is None or not is_main_replica(shard.replica_id):
            continue
        layer = shard.global_offset[: shard.prepend_axis_num]
        sums = mine.setdefault(".".join((shard.key, *map(str, layer))), [0.0, 0.0])
        data = shard.data.double()
        sums[0] += float(data.sum())
        sums[1] += float((data * data).sum())
    everyone: list[Sums] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    total: Sums = {}
    for part in everyone:
        for name, sums in part.items():
            before = total.setdefault(name, [0.0, 0.0])
            before[0] += sums[0]
            before[1] += sums[1]
    return dict(sorted(total.items()))


def _shards(node: Any) -> Iterator[ShardedTensor]:
    if isinstance(node, ShardedTensor):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _shards(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _shards(value)
