# SPDX-License-Identifier: Apache-2.0
"""Rewinds a run after a loss spike, and resumes it without the batches that caused the spike.

A NaN or infinite loss or gradient, or a loss far above its recent median, rarely recovers by itself
(PaLM, arXiv 2204.02311, section 5.1: restart from a checkpoint before the spike and skip the
batches around it). The guard ends the run before that step is saved and records the window in
`rewinds.jsonl`. Run again, the stage resumes from its last checkpoint and skips the samples from
there to the spike. If `most` rewinds do not help, the batches are not the cause, and the run fails.
The micro-batches whose loss broke are looked up on every data rank, and the data module says which
documents of the store they were made of.

A stage begins with a jump: the longer context is new to the model (a loss of 5.5 on the first step
is normal for an extension), so spikes in the warm-up are ignored. Sample numbers stay those of the
plan: a window shifts the data that is read, not the numbers of steps.
"""

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

MOST_LATE = 32
"""Steps that the median covers."""
LEAST_LATE = 8
"""Steps needed for a meaningful median."""
MOST_NAMED = 4
"""Documents that a message names; the file of rewinds has all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenPart:
    """A micro-batch whose loss broke: its ranks, its place in the step, and its samples."""

    ranks: tuple[int, ...]
    micro_batch: int
    samples: tuple[int, ...]


class LossBrokeError(RuntimeError):
    """Report the step of a loss spike and what follows; `again` is whether to run again."""

    def __init__(
        self,
        said: str,
        *,
        again: bool,
        finite: bool = False,
        parts: Sequence[BrokenPart] = (),
        documents: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Take the message, whether another attempt may resume, and what broke the loss."""
        super().__init__(said)
        self.again = again
        self.kind = "spike" if finite else "not_finite"
        self.ranks = parts[0].ranks if parts else ()
        self.documents = tuple(documents)

    @property
    def cause(self) -> str:
        """What is likely to have broken the loss."""
        if self.documents:
            return "the documents that are named, or a learning rate that is too high for them"
        return "no single micro-batch: the weights, the rotation or the learning rate"


class LossGuard(Callback):
    """End a run at a loss that is not finite or `rise` nats above its median.

    Megatron's own check of gradients (`check_for_nan_in_grad`) names the rank, but ends the run
    before this guard can record the samples to skip: recipes leave it off.
    """

    def __init__(self, path: str, warmup_steps: int, rise: float = 2.0, most: int = 3) -> None:
        """Take the file of rewinds, the steps to ignore, the nats, and the most rewinds."""
        if rise <= 0:
            raise ValueError(f"rise is {rise:g} nats; expected more than 0")
        if most < 0:
            raise ValueError(f"most is {most}; it must be at least 0")
        self.path, self.warmup_steps, self.rise, self.most = Path(path), warmup_steps, rise, most
        self._late: deque[float] = deque(maxlen=MOST_LATE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass the windows of samples to skip to the training data."""
        windows = tuple((one["samples"][0], one["samples"][1]) for one in read(self.path))
        trainer.datamodule.pass_over(windows)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule | None = None, *_: Any
    ) -> None:
        """Check the loss that the step log has just written; all ranks see the same."""
        loss = trainer.callback_metrics["reduced_train_loss"].item()
        norm = trainer.callback_metrics.get("grad_norm")
        step = trainer.global_step
        why = self._broken(loss, 0.0 if norm is None else float(norm), step)
        if why is None:
            self._late.append(loss)
            return
        again = len(read(self.path)) < self.most  # before rank 0, which gathers first, adds to it
        above = median(self._late) + self.rise if self._late else math.inf
        parts, every = broken_parts(pl_module, above)
        documents = [] if every else documents_of(trainer.datamodule, parts)
        if again and trainer.is_global_zero:
            self._note(trainer, step, loss, why, parts, documents)
        said = f"step {step}: {why}{describe(parts, documents, every=every)}"
        facts: dict[str, Any] = {
            "again": again, "finite": math.isfinite(loss) and "above" in why, "parts": parts,
            "documents": documents,
        }  # fmt: skip
        if not again:
            raise LossBrokeError(
                f"{said}; {self.most} rewinds have not helped: see `longhaul doctor spike --run "
                "RUN`",
                **facts,
            )
        raise LossBrokeError(
            f"{said}; run again, the stage resumes from its last checkpoint without the batches "
            "from there to this step",
            **facts,
        )

    def _broken(self, loss: float, norm: float, step: int) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the norm of the gradient is {norm}"
        if step <= self.warmup_steps or len(self._late) < LEAST_LATE:
            return None
        usual = median(self._late)
        if loss > usual + self.rise:
            return f"the loss is {loss:.3f}, {loss - usual:.2f} nats above its median"
        return None

    def _note(
        self,
        trainer: Trainer,
        step: int,
        loss: float,
        why: str,
        parts: Sequence[BrokenPart],
        documents: Sequence[Mapping[str, Any]],
    ) -> None:
        """Append the window from the checkpoint of the next attempt to this step."""
        saved = trainer.checkpoint_callback.newest_step()
        sequences = trainer.datamodule.global_batch_size
        line = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "why": why,
            "from_step": saved,
            "samples": [saved * sequences, (step - saved) * sequences],
            "micro_batches": [
                {"ranks": part.ranks, "micro_batch": part.micro_batch, "samples": part.samples}
                for part in parts
            ],
            "documents": documents,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rewinds so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def broken_parts(pl_module: LightningModule | None, above: float) -> tuple[list[BrokenPart], bool]:
    """Return the micro-batches whose loss is not finite or above a bound, and whether all are.

    Every rank calls it. The first of a step comes first. Ranks that share a sequence (TP, CP) have
    the same samples; on pipeline stages without the loss there are none.
    """
    mine: list[tuple[int, tuple[int, ...], bool]] = []
    pairs = getattr(getattr(pl_module, "training_loss_reduction", None), "micro_batches", ())
    if pl_module is not None and len(pairs):
        samples, table = pl_module.tally.samples, torch.stack(list(pairs)).double().cpu()
        means = (table[:, 0] / table[:, 1].clamp(min=1)).tolist()
        each = len(samples) // len(means)
        for at, mean in enumerate(means):
            broken = not math.isfinite(mean) or mean > above
            mine.append((at, tuple(samples[at * each : (at + 1) * each]), broken))
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    ranks: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    found = set[tuple[int, tuple[int, ...]]]()
    for rank, of_rank in enumerate(everyone):
        for at, numbers, broken in of_rank:
            ranks.setdefault((at, numbers), []).append(rank)
            found |= {(at, numbers)} if broken else set()
    parts = [
        BrokenPart(ranks=tuple(ranks[at, numbers]), micro_batch=at, samples=numbers)
        for at, numbers in sorted(found)
    ]
    return parts, len(parts) == len(ranks) > 1


def documents_of(datamodule: Any, parts: Sequence[BrokenPart]) -> list[dict[str, Any]]:
    """Return the documents of the store that micro-batches are made of, if the data says so."""
    look_up = getattr(datamodule, "documents_of", None)
    if look_up is None:
        return []
    return [dict(one) for part in parts for sample in part.samples for one in look_up(sample)]


def describe(
    parts: Sequence[BrokenPart], documents: Sequence[Mapping[str, Any]], *, every: bool
) -> str:
    """Return where a loss broke, to follow what broke; empty if no micro-batch is known."""
    if not parts:
        return ""
    if every:
        return f", in all {len(parts)} micro-batches: no document alone is the cause"
    first = parts[0]
    ranks, samples = (", ".join(map(str, each)) for each in (first.ranks, first.samples))
    said = (
        f", first in micro-batch {first.micro_batch + 1} of rank{'s' * (len(first.ranks) > 1)} "
        f"{ranks} (sample{'s' * (len(first.samples) > 1)} {samples})"
    )
    if documents:
        named = [f"{one['source']}:{one['document']}" for one in documents]
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        said += f", documents {', '.join(named[:MOST_NAMED])}{more}"
    return said
