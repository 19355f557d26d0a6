# SPDX-License-Identifier: Apache-2.0
"""One line a step: loss, rate, tokens, time and memory, with the step's token count asserted.

The line goes to `metrics.jsonl` (rank 0) and, in words, to the log; docs/metrics.md has its keys.
Each step all ranks gather their counts, and the run stops where they disagree with the plan:

* the tokens of the step over all data and context ranks must be `tokens_per_batch` (a sequence
  split twice, or a pack made for another context parallel size, would change the sum);
* the samples of the step must be the consecutive ones from `step * sequences per batch` (a loader
  that starts over after a resume would repeat them).

Durations are of clocks that only go forward. The time of a line is the wall clock's; where that has
jumped since the line before, the line says by how much.

Cost: one all-gather a step, of some 40 + (sequences on the rank) float64 per rank. The device is
waited for once, for the loss; the time of the parts of a step is read after that
(`custom_modules.metrics.event_timers`), and the GPU's sensors by a thread.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from megatron.core import parallel_state

from custom_modules.callbacks.step_measures import StepMeasures
from custom_modules.metrics.rank_facts import Gathered, gather
from custom_modules.metrics.tally import Tally

TRIES, PAUSE = 5, 0.1
"""Attempts to lock the folder and seconds between: a status command holds the lock briefly."""
JUMP_SECONDS = 5.0
"""Difference of wall clock and elapsed time that is a jump; clocks are corrected by less."""


class StepLog(Callback):
    """Write `metrics.jsonl` and assert what each step consumed."""

    def __init__(
        self,
        path: str,
        tokens_per_batch: int,
        seq_length: int,
        flops_per_token: float,
        gpu: str = "",
        peak_flops: float | None = None,
    ) -> None:
        """Take the path of the log, the plan of a step, and the model's causal FLOPs per token.

        `gpu` and `peak_flops` are a rank's GPU by name and its FLOPs per second in BF16; without
        them no MFU is computed.
        """
        self.path = Path(path)
        self.tokens_per_batch = tokens_per_batch
        self.seq_length = seq_length
        self.flops_per_token = flops_per_token
        self.gpu, self.peak_flops = gpu, peak_flops
        self.measures: StepMeasures | None = None
        self.clocks: tuple[float, float] | None = None
        """Wall clock and elapsed seconds at the line before."""

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
        self._require_own()

    def _require_own(self) -> None:
        """Raise RuntimeError if the file has steps of another plan, before any is dropped."""
        sequences = self.tokens_per_batch // self.seq_length
        for step, line in self._lines():
            found = (line.get("tokens"), line.get("samples"))
            planned = (self.tokens_per_batch, [(step - 1) * sequences, step * sequences - 1])
            if None not in found and found != planned:
                raise RuntimeError(
                    f"{self.path} is of another run or recipe: its step {step} has {found[0]:,} "
                    f"tokens and samples {found[1]}, this one's {planned[0]:,} and {planned[1]}; "
                    "train into another run folder by --out, or move the file away"
                )

    def _lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the step and content of each line; one cut short by a kill is the last."""
        if not self.path.exists():
            return
        for text in self.path.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
                yield line["step"], line
            except (ValueError, KeyError, TypeError):
                return

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure from now on what `StepMeasures` does, on every rank."""
        self.measures = StepMeasures(
            trainer,
            pl_module,
            flops_per_token=self.flops_per_token,
            seq_length=self.seq_length,
            gpu=self.gpu,
            peak_flops=self.peak_flops,
        )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End what measures."""
        if self.measures is not None:
            self.measures.stop()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the lines of steps that were lost by a kill."""
        if not trainer.is_global_zero:
            return
        kept = [
            json.dumps(line) + "\n" for step, line in self._lines() if step <= trainer.global_step
        ]
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
        if self.measures is not None:
            self.measures.begin()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Assert the step's tokens and samples, then write its line."""
        step, tally, measures = trainer.global_step, pl_module.tally, self.measures
        loss = trainer.callback_metrics["reduced_train_loss"].item()  # waits for the device
        seconds = time.perf_counter() - self.started
        if measures is not None:
            measures.end()
            tally.waited = measures.waited
        gathered = self._gathered(trainer, pl_module)
        first, last = self._assert_consumed(step, gathered)
        measured = _of_callbacks(trainer, pl_module, step, seconds, gathered)
        if not trainer.is_global_zero:
            return
        norm = trainer.callback_metrics.get("grad_norm")
        rate = self.tokens_per_batch / seconds / trainer.world_size
        line = {
            "step": step,
            "time": time.time(),
            "loss": loss,
            "lr": self.rate,
            "grad_norm": None if norm is None else norm.item(),
            "tokens": self.tokens_per_batch,
            "samples": [first, last],
            "seconds": seconds,
            "tokens_per_second_per_rank": rate,
            "model_flops_per_second_per_rank": rate * self.flops_per_token,
            "data_wait_seconds": tally.waited,
            **_of_data(trainer, step - 1),
        }
        if measures is not None:
            line |= measures.line(gathered, seconds=seconds, tokens=self.tokens_per_batch)
        line |= measured
        spread = getattr(pl_module.training_loss_reduction, "spread", None)
        if spread is not None:
            line["micro_batch_loss_std"] = spread.item()
        jump = self._clock_jump(line["time"])
        if jump:
            line["clock_jump_seconds"] = jump
            rank_zero_info(f"step {step}: the clock of this machine has jumped by {jump:+.0f} s")
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for callback in getattr(trainer, "callbacks", ()):
            if hasattr(callback, "on_step_line"):  # trackers
                callback.on_step_line(trainer, line)
        rank_zero_info(
            f"step {step}/{trainer.max_steps}  loss {loss:.4f}  lr {self.rate:.2e}  "
            f"{rate:,.0f} tokens/s/rank  {seconds:.2f} s"
        )

    def _gathered(self, trainer: Trainer, pl_module: LightningModule) -> Gathered:
        """Return what every rank has received and measured, callbacks with `rank_facts` too."""
        tally: Tally = pl_module.tally
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        copies = parallel_state.get_context_parallel_world_size()
        planned = self.tokens_per_batch // self.seq_length * copies // group.size()
        # One length on every rank, whatever it received: a short list is padded, a long one cut.
        samples = (tally.samples + [-1] * planned)[:planned]
        facts, sums = {"tokens": float(tally.tokens)}, torch.zeros(0)
        if self.measures is not None:
            facts |= self.measures.facts(tally)
            sums = self.measures.sums()
        for callback in getattr(trainer, "callbacks", ()):
            if hasattr(callback, "rank_facts"):
                facts |= callback.rank_facts(pl_module)
        return gather(facts, samples, sums)

    def _assert_consumed(self, step: int, gathered: Gathered) -> tuple[int, int]:
        """Return the step's first and last sample; raise RuntimeError unless as planned."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        ranks = dist.get_process_group_ranks(group)
        copies = parallel_state.get_context_parallel_world_size()
        sequences = self.tokens_per_batch // self.seq_length
        tokens = [int(gathered.of("tokens")[rank]) for rank in ranks]
        if sum(tokens) != self.tokens_per_batch:
            raise RuntimeError(
                f"step {step} trained on {sum(tokens):,} tokens over all ranks, not on the "
                f"{self.tokens_per_batch:,} of the stage: {tokens} by rank"
            )
        consumed = sorted(gathered.samples[ranks].flatten().tolist())
        first, last = (step - 1) * sequences, step * sequences - 1
        if consumed != [sample for sample in range(first, last + 1) for _ in range(copies)]:
            raise RuntimeError(f"step {step} consumed samples {consumed}, not {first} to {last}")
        return first, last

    def _clock_jump(self, wall: float) -> float:
        """Return the seconds that the wall clock is ahead of the elapsed ones; 0 if it is not."""
        elapsed, before = time.perf_counter(), self.clocks
        self.clocks = (wall, elapsed)
        ahead = 0.0 if before is None else (wall - before[0]) - (elapsed - before[1])
        return ahead if abs(ahead) > JUMP_SECONDS else 0.0


def _of_data(trainer: Trainer, step: int) -> dict[str, Any]:
    """Return what the data module says of a step, counted from 0."""
    facts = getattr(trainer.datamodule, "step_facts", None)
    return {} if facts is None else dict(facts(step))


def _of_callbacks(
    trainer: Trainer,
    pl_module: LightningModule,
    step: int,
    seconds: float,
    gathered: Gathered,
) -> dict[str, Any]:
    """Return what other callbacks measure at a step, on every rank; it is not in its seconds."""
    measured: dict[str, Any] = {}
    for callback in getattr(trainer, "callbacks", ()):
        if hasattr(callback, "of_gathered"):
            measured |= callback.of_gathered(gathered)
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
