# SPDX-License-Identifier: Apache-2.0
"""The measures of a step: seconds by part, MFU, memory by rank, sensors, documents, loss by bin.

`begin` before a step, `end` when the device has finished it, then `facts` and `sums` go into the
all-gather of the step log, and `line` makes the numbers of the line from what all ranks gathered.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from megatron.core import parallel_state
from torch import Tensor

from custom_modules.metrics.event_timers import EventTimers
from custom_modules.metrics.gpu_sensors import GpuSensors
from custom_modules.metrics.loss_bins import LossBins
from custom_modules.metrics.model_flops import ModelFlops
from custom_modules.metrics.rank_facts import MEMORY, Gathered, by_rank, memory
from custom_modules.metrics.tally import IN_WINDOW, ROW_FACTS, Tally

SMALLER = {"pcie", "nvl", "mig"}
"""Words of a GPU's name: of forms and slices whose peak is below that of the model's SXM module."""
MAKERS = {"nvidia", "geforce", "rtx", "tesla", "quadro"}
"""Words before the model in a GPU's name."""
SENSORS = ("gpu_utilization", "gpu_power_watts", "gpu_clock_mhz")


class StepMeasures:
    """The measures of a training on one rank."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        flops_per_token: float,
        seq_length: int,
        gpu: str,
        peak_flops: float | None,
    ) -> None:
        """Time the model and its optimizer from now on; loss is counted by position and source."""
        self.flops_per_token, self.seq_length = flops_per_token, seq_length
        self.device = trainer.strategy.root_device
        self.peak_flops = _of_device(self.device, gpu, peak_flops)
        self.flops = ModelFlops.of(
            pl_module.config,
            flops_per_token=flops_per_token,
            seq_length=seq_length,
            pattern=getattr(pl_module.config, "pattern", None),
        )
        self.timers = EventTimers()
        pl_module.config.timers = self.timers
        if pl_module.optim is not None:
            pl_module.optim.config.timers = self.timers
        self.bins = LossBins(seq_length, _sources(trainer), torch.cuda.current_device())
        pl_module.training_loss_reduction.bins = self.bins
        self.sensors = GpuSensors(self.device)
        self.sensors.start()
        self.parts: dict[str, float] = {}
        self.waited = 0.0
        """Seconds of the step in which this rank had nothing to do but wait for data.

        On CUDA the device still computes while the host waits for the next micro-batch: only what
        is left of the wait after that counts.
        """

    def begin(self) -> None:
        """Begin a step."""
        self.bins.clear()
        self.timers.open()

    def end(self) -> None:
        """End a step that the device has finished."""
        seconds = self.timers.seconds()
        self.waited = seconds["data"]
        self.parts = {
            "forward_seconds": seconds["forward"],
            "backward_seconds": seconds["backward"],
            "communication_seconds": seconds["communication"],
            "optimizer_seconds": seconds["optimizer"],
            "copy_seconds": seconds["copies"],
        }

    def stop(self) -> None:
        """End the thread of the sensors."""
        self.sensors.stop()

    def facts(self, tally: Tally) -> dict[str, float]:
        """Return this rank's numbers of a step; NaN of what it does not know."""
        stated = map(float, tally.row_facts or ())
        return {
            **memory(self.device),
            **{name: next(stated, math.nan) for name in ROW_FACTS},
            **dict(zip(SENSORS, self.sensors.means(), strict=True)),
        }

    def sums(self) -> Tensor:
        """Return this rank's sums of losses by position and source."""
        return self.bins.sums()

    def line(self, gathered: Gathered, *, seconds: float, tokens: int) -> dict[str, Any]:
        """Return the keys of the step's line; None of what is not known."""
        positions, sources = self.bins.means(gathered.sums)
        data, busy = self._of_data(gathered), gathered.of("gpu_utilization")
        return {
            **self._mfu(data, seconds=seconds, tokens=tokens, ranks=len(gathered.table)),
            **self.parts,
            **{name: max(map(int, gathered.of(name))) for name in MEMORY},
            **{f"{name}_by_rank": by_rank(gathered.of(name)) for name in MEMORY},
            "gpu_utilization": _mean(gathered.known("gpu_utilization")),
            "gpu_utilization_by_rank": None if any(map(math.isnan, busy)) else by_rank(busy),
            "gpu_power_watts": _mean(gathered.known("gpu_power_watts")),
            "gpu_clock_mhz": min(gathered.known("gpu_clock_mhz"), default=None),
            **data,
            "loss_by_position": positions,
            "loss_by_source": sources,
        }

    def _of_data(self, gathered: Gathered) -> dict[str, Any]:
        """Return the facts of the step's rows; every context rank has those of whole rows."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        ranks = dist.get_process_group_ranks(group)
        copies = parallel_state.get_context_parallel_world_size()
        columns = {name: [gathered.of(name)[rank] for rank in ranks] for name in ROW_FACTS}
        squares = columns["sum_squared_lengths"]
        if any(math.isnan(value) for value in squares):
            return {}
        known = {name: column for name, column in columns.items() if not math.isnan(column[0])}
        return {
            **{name: round(sum(column) / copies) for name, column in known.items()},
            "sum_squared_lengths_max_over_mean": max(squares) * len(squares) / sum(squares),
        }

    def _mfu(
        self, data: dict[str, Any], *, seconds: float, tokens: int, ranks: int
    ) -> dict[str, float | None]:
        """Return the shares of the peak; None without a known peak, or without facts of rows."""
        flops: dict[str, float | None] = {
            "mfu": self.flops_per_token * tokens,
            "mfu_documents": None,
            "mfu_6n": self.flops.six_n(tokens),
        }
        if data:
            flops["mfu_documents"] = self.flops.documents(
                tokens=tokens - data["padding_tokens"],
                sum_squared_lengths=data["sum_squared_lengths"],
                in_window=data.get(IN_WINDOW),
            )
        if self.peak_flops is None:
            return dict.fromkeys(flops)
        peak = self.peak_flops * ranks * seconds
        return {name: None if each is None else each / peak for name, each in flops.items()}


def _of_device(device: torch.device, gpu: str, peak_flops: float | None) -> float | None:
    """Return the peak if it is that of this device; say so if the recipe is for another GPU."""
    if peak_flops is None or not gpu:
        return peak_flops
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    model, stated = _words(gpu)
    _, there = _words(name)
    if model in there and there & SMALLER == stated & SMALLER:
        return peak_flops
    rank_zero_info(
        f"MFU is not computed: the recipe states the peak of {gpu}, and this is {name}; set "
        "trainer.callbacks[0].gpu and trainer.callbacks[0].peak_flops"
    )
    return None


def _words(name: str) -> tuple[str, set[str]]:
    """Return the word of a GPU's name that is its model, and all of its words."""
    words = re.findall(r"\w+", name.lower())
    return next((word for word in words if word not in MAKERS), ""), set(words)


def _sources(trainer: Trainer) -> Sequence[str]:
    """Return the names of the sources of the training split, by their numbers."""
    manifest = getattr(trainer.datamodule, "manifest", None)
    return () if manifest is None else [part.source for part in manifest.train.parts]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
