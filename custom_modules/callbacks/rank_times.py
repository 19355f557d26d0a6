# SPDX-License-Identifier: Apache-2.0
"""Measure each rank by itself in a step, to name one that is slow or whose memory grows.

The time of a step is the same on all ranks: the fast ones wait for the slow one in the reduction of
the gradients. So the time that is compared ends before it, when the last backward is done, and does
not contain the wait for data (on a GPU: what is left of it when the kernels have ended). Ranks of a
replica (TP, CP, PP) wait for each other within the forward and the backward too: among them the
slow one is not told apart, and the replica is named, with all of its ranks. Where data ranks wait
for each other inside of layers (experts that are spread over them, parameters that Megatron FSDP
gathers), and with one replica, nothing is compared; on GPUs `Stragglers` still compares the kernels
of single ranks.

    compute_seconds               median over the replicas of forward and backward
    slow_ranks                    those that took `LISTED` times as long as the others
    longest_data_wait_seconds     and longest_data_wait_rank
    host_private_bytes            largest anonymous memory of a rank, and host_private_rank
    device_allocated_bytes        largest allocation of tensors at the end of the step, and
                                  device_allocated_rank; only on GPUs

Anonymous memory does not contain the pages of a store that is mapped into memory, which grow while
it is read and are given back when memory is short.

Cost: four float64 per rank in the all-gather of the step log.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from megatron.core import parallel_state

from custom_modules.metrics.rank_facts import Gathered

FACTS = ("own_seconds", "waited_seconds", "private_bytes", "allocated_bytes")
"""Names of a rank's values in the step log's all-gather."""
LISTED = 1.1
"""Ratio to the others from which a replica is in `slow_ranks`."""
MOST_LISTED = 4
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class RankTimes(Callback):
    """Measure each rank's own time, wait for data and memory; `StepLog` gathers the values."""

    def __init__(self) -> None:
        """Measure nothing before training starts."""
        self.replicas: list[int] | None = None
        self.on_gpu = False
        self._began: Any = None
        self._ended: Any = None
        self._reduce: Callable[..., Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time when the gradients of a step are complete on this rank."""
        self.on_gpu = trainer.strategy.root_device.type == "cuda"
        self.replicas = _replicas(trainer)
        config: Any = pl_module.config
        reduce = self._reduce = config.finalize_model_grads_func

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._ended = self._now()
            return reduce(*args, **kwargs)

        config.finalize_model_grads_func = noted

    def on_train_batch_start(self, *_: Any) -> None:
        """Note the start of a step."""
        self._began, self._ended = self._now(), None

    def rank_facts(self, pl_module: LightningModule) -> dict[str, float]:
        """Return this rank's values of a step, once its device is done."""
        waited = float(pl_module.tally.waited)
        allocated = float(torch.cuda.memory_allocated()) if self.on_gpu else 0.0
        return dict(
            zip(FACTS, (self._seconds() - waited, waited, private_bytes(), allocated), strict=True)
        )

    def of_gathered(self, gathered: Gathered) -> dict[str, Any]:
        """Return what the values of all ranks say, for the step's line."""
        times, waits, private, allocated = map(gathered.of, FACTS)
        found: dict[str, Any] = compared(times, self.replicas) if self.replicas else {}
        found |= _largest(waits, "longest_data_wait_seconds", "longest_data_wait_rank")
        found |= _largest(private, "host_private_bytes", "host_private_rank")
        if self.on_gpu:
            found |= _largest(allocated, "device_allocated_bytes", "device_allocated_rank")
        return found

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the function that reduces gradients."""
        if self._reduce is not None:
            pl_module.config.finalize_model_grads_func = self._reduce
            self._reduce = None

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self) -> float:
        """Return the time from the start of the step to the end of its backward."""
        if self._began is None or self._ended is None:
            return math.nan
        if self.on_gpu:
            return float(self._began.elapsed_time(self._ended)) / 1000
        return float(self._ended - self._began)


def compared(times: Sequence[float], replicas: Sequence[int]) -> dict[str, Any]:
    """Return the median time of the replicas, and the slow ones with their ranks, slowest first.

    `times` and `replicas` are of each rank. A replica takes as long as its slowest rank.
    """
    ranks: dict[int, list[int]] = {}
    for rank, replica in enumerate(replicas):
        ranks.setdefault(replica, []).append(rank)
    of_replica = {replica: max(times[rank] for rank in of) for replica, of in ranks.items()}
    if len(of_replica) < 2 or not all(map(math.isfinite, of_replica.values())):
        return {}
    slow: list[dict[str, Any]] = []
    for replica, seconds in of_replica.items():
        others = median(time for other, time in of_replica.items() if other != replica)
        if others > 0 and seconds >= LISTED * others:
            slow.append(
                {"ranks": ranks[replica], "seconds": seconds, "times_the_others": seconds / others}
            )
    slow.sort(key=lambda one: -one["seconds"])
    return {"compute_seconds": median(of_replica.values()), "slow_ranks": slow[:MOST_LISTED]}


def _replicas(trainer: Trainer) -> list[int] | None:
    """Return the data rank of every rank; None if data ranks wait for each other in layers."""
    gathers = getattr(trainer.strategy.ddp_config, "use_megatron_fsdp", False)
    if gathers or parallel_state.get_expert_model_parallel_world_size() > 1:
        return None
    mine = torch.tensor(parallel_state.get_data_parallel_rank(), device=torch.cuda.current_device())
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    replicas = [int(one) for one in everyone]
    return replicas if len(set(replicas)) > 1 else None


def _largest(values: Sequence[float], value: str, of_rank: str) -> dict[str, Any]:
    rank = max(range(len(values)), key=values.__getitem__)
    figure = values[rank]
    return {value: int(figure) if value.endswith("bytes") else figure, of_rank: rank}


def private_bytes() -> float:
    """Return the anonymous resident memory of this process."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return float((resident - shared) * PAGE_BYTES)
