# SPDX-License-Identifier: Apache-2.0
"""One line a step: loss, rate, tokens, time and memory, with the step's token count asserted.

The line goes to `metrics.jsonl` (rank 0) and, in words, to the log. Each step all ranks gather
their counts, and the run stops where they disagree with the plan:

* the tokens of the step over all data and context ranks must be `tokens_per_batch` (a sequence
  split twice, or a pack made for another context parallel size, would change the sum);
* the samples of the step must be the consecutive ones from `step * sequences per batch` (a loader
  that starts over after a resume would repeat them).

A line also has the memory of the fullest rank: `peak_memory_bytes` that the allocator gave to
tensors at the peak, and `device_memory_bytes` that the process then took on its GPU, with what the
allocator could not hand out, CUDA's context and NCCL's buffers. On CPU both are the resident set.

Cost: one all-gather a step, of 1 + (sequences on the rank) int64 per rank, and one all-reduce of
two int64.
"""

import fcntl
import json
import os
import resource
import socket
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from megatron.core import parallel_state
from torch import Tensor

TRIES, PAUSE = 5, 0.1
"""Attempts to lock the folder and seconds between: a status command holds the lock briefly."""


class Tally:
    """Tokens and samples that this rank has received in one optimizer step."""

    def __init__(self) -> None:
        """Start empty."""
        self.clear()

    def clear(self) -> None:
        """Forget the step that has ended."""
        self.tokens = 0
        self.samples: list[int] = []
        self.waited = 0.0
        """Seconds that the step waited for its data."""

    def add(self, tokens: Tensor, sample_ids: Tensor) -> None:
        """Count one micro-batch: tokens [b, s] on this rank, sample ids [b]."""
        self.tokens += tokens.numel()
        self.samples += sample_ids.tolist()


class StepLog(Callback):
    """Write `metrics.jsonl` and assert what each step consumed."""

    def __init__(
        self, path: str, tokens_per_batch: int, seq_length: int, flops_per_token: float
    ) -> None:
        """Take the path of the log, the plan of a step, and the model's causal FLOPs per token."""
        self.path = Path(path)
        self.tokens_per_batch = tokens_per_batch
        self.seq_length = seq_length
        self.flops_per_token = flops_per_token

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lock the folder, before any other callback touches its content.

        Raises RuntimeError if another process, perhaps of a run thought dead, trains into it.
        """
        if not trainer.is_global_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = self.path.with_suffix(".lock").open("a+")  # held until this process ends
        left = TRIES
        while not _is_free(self.lock):
            left -= 1
            if not left:
                self.lock.seek(0)
                raise RuntimeError(
                    f"another process is training into {self.path.parent}; wait for it or end it: "
                    f"{' '.join(self.lock.read().split())}"
                )
            time.sleep(PAUSE)
        self.lock.truncate(0)
        self.lock.write(json.dumps(_this_rank()))
        self.lock.flush()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the lines of steps that were lost by a kill."""
        if not trainer.is_global_zero:
            return
        kept = []
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    step = json.loads(line)["step"]
                except ValueError:
                    break  # a line cut short by a kill is the last one
                if step <= trainer.global_step:
                    kept.append(line + "\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        os.replace(temporary, self.path)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the rate this step runs at; the scheduler moves it before the step ends."""
        self.started = time.perf_counter()
        self.rate = trainer.optimizers[0].param_groups[0]["lr"]
        pl_module.tally.clear()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Assert the step's tokens and samples, then write its line."""
        step = trainer.global_step
        first, last = self._assert_consumed(step, pl_module.tally)
        loss = trainer.callback_metrics["reduced_train_loss"].item()  # waits for the device
        seconds = time.perf_counter() - self.started
        tensors, device = _fullest(trainer.strategy.root_device)
        measured = _of_callbacks(trainer, pl_module, step, seconds)
        if not trainer.is_global_zero:
            return
        norm = trainer.callback_metrics.get("grad_norm")
        rate = self.tokens_per_batch / seconds / trainer.world_size
        line = {
            "step": step,
            "loss": loss,
            "lr": self.rate,
            "grad_norm": None if norm is None else norm.item(),
            "tokens": self.tokens_per_batch,
            "samples": [first, last],
            "seconds": seconds,
            "tokens_per_second_per_rank": rate,
            "model_flops_per_second_per_rank": rate * self.flops_per_token,
            "data_wait_seconds": pl_module.tally.waited,
            **_of_data(trainer, step - 1),
            "peak_memory_bytes": tensors,
            "device_memory_bytes": device,
            **measured,
        }
        spread = getattr(pl_module.training_loss_reduction, "spread", None)
        if spread is not None:
            line["micro_batch_loss_std"] = spread.item()
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        rank_zero_info(
            f"step {step}/{trainer.max_steps}  loss {loss:.4f}  lr {self.rate:.2e}  "
            f"{rate:,.0f} tokens/s/rank  {seconds:.2f} s"
        )

    def _assert_consumed(self, step: int, tally: Tally) -> tuple[int, int]:
        """Return the step's first and last sample; raise RuntimeError unless as planned."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        copies = parallel_state.get_context_parallel_world_size()
        sequences = self.tokens_per_batch // self.seq_length
        planned = sequences * copies // group.size()
        # One length on every rank, whatever it received: a short list is padded, a long one cut.
        samples = (tally.samples + [-1] * planned)[:planned]
        mine = torch.tensor([tally.tokens, *samples], device=torch.cuda.current_device())
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        table = torch.stack(everyone).cpu()
        tokens = table[:, 0]
        if tokens.sum() != self.tokens_per_batch:
            raise RuntimeError(
                f"step {step} trained on {int(tokens.sum()):,} tokens over all ranks, not on the "
                f"{self.tokens_per_batch:,} of the stage: {tokens.tolist()} by rank"
            )
        consumed = sorted(table[:, 1:].flatten().tolist())
        first, last = (step - 1) * sequences, step * sequences - 1
        if consumed != [sample for sample in range(first, last + 1) for _ in range(copies)]:
            raise RuntimeError(f"step {step} consumed samples {consumed}, not {first} to {last}")
        return first, last


def _of_data(trainer: Trainer, step: int) -> dict[str, Any]:
    """Return what the data module says of a step, counted from 0."""
    facts = getattr(trainer.datamodule, "step_facts", None)
    return {} if facts is None else dict(facts(step))


def _of_callbacks(
    trainer: Trainer, pl_module: LightningModule, step: int, seconds: float
) -> dict[str, Any]:
    """Return what other callbacks measure at a step, on every rank; it is not in its seconds."""
    measured: dict[str, Any] = {}
    for callback in getattr(trainer, "callbacks", ()):
        measure = getattr(callback, "measured_at_step", None)
        if measure is not None:
            measured |= measure(trainer, pl_module, step, seconds)
    return measured


def _is_free(file: IO[str]) -> bool:
    """Lock a file; return False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _this_rank() -> dict[str, Any]:
    """Return the holder of the lock, for people and for `longhaul.run_folder.lock`."""
    job = os.environ.get("SLURM_JOB_ID")
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "command": f"rank 0 of Slurm job {job}" if job else "rank 0 of a training",
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _fullest(device: torch.device) -> tuple[int, int]:
    """Return the largest peaks of any rank: bytes of tensors, and bytes of the process."""
    found = torch.tensor(_peak_memory_bytes(device), device=torch.cuda.current_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    tensors, process = found.tolist()
    return tensors, process


def _peak_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return this rank's peaks; on CPU the peak resident set of the process for both."""
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return resident, resident
    free, total = torch.cuda.mem_get_info(device)
    beyond_the_allocator = max(0, total - free - torch.cuda.memory_reserved(device))
    reserved = torch.cuda.max_memory_reserved(device) + beyond_the_allocator
    return torch.cuda.max_memory_allocated(device), reserved
