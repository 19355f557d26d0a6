# SPDX-License-Identifier: Apache-2.0
"""Stages of continued pretraining, and ladders: ordered lists of stages."""

import shlex
from dataclasses import dataclass
from typing import Literal, get_args

from custom_modules.rope.config import RopeScaling
from data.mixture.config import Mix
from recipes.spec.gate import Gate
from recipes.spec.suites import SuiteRun
from recipes.spec.train_short import Positions

DocumentPolicy = Literal["across", "within"]
OptimizerState = Literal["new", "carried"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Warmed:
    """Fields of every schedule: the peak, its warm-up from zero, and the final rate."""

    peak: float
    final_ratio: float = 0.1
    """Rate at the last step as a share of the peak; 1 for a constant rate."""
    warmup_ratio: float = 0.1
    """Share of the stage's steps used for warm-up; `20 / 400` for 20 steps of 400, 0 for none."""

    def __post_init__(self) -> None:
        """Raise ValueError for rates outside 0 to 1."""
        if not 0 < self.peak < 1:
            raise ValueError(f"peak learning rate is {self.peak}; it must lie between 0 and 1")
        for name in ("final_ratio", "warmup_ratio"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must lie between 0 and 1")

    def warmup_steps(self, steps: int) -> int:
        """Return the warm-up steps of a stage of `steps`."""
        return warmup_steps(self.warmup_ratio, steps)


def warmup_steps(ratio: float, steps: int) -> int:
    """Return the warm-up steps of a stage of `steps`: none for 0, and otherwise at least one.

    The first step of a warm-up has a share of the peak above 0.
    """
    return max(1, round(ratio * steps)) if ratio else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine(_Warmed):
    """Learning rate: linear from zero to `peak` over the warm-up, then a cosine to the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(_Warmed):
    """Learning rate: linear from zero to `peak` over the warm-up, then a line to the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One length, one rotation, one token budget, one schedule."""

    seq_length: int
    rope: RopeScaling | Literal["native"]
    """How positions are rotated; `native` keeps the rotation of the card."""
    tokens: int
    """Token budget of the whole stage."""
    tokens_per_batch: int
    """Tokens of one optimizer step over all ranks."""
    lr: Cosine | Linear
    documents: DocumentPolicy = "across"
    """Whether tokens attend across the documents of a sequence, with continuous positions
    (Nemotron-UltraLong, arXiv 2504.06214), or only within their document, with positions that
    restart (Llama-3.1, arXiv 2407.21783)."""
    positions: Positions = Positions()
    """Positions of training samples: consecutive, or drawn so that a stage of this length trains
    for a longer context, its target length."""
    mix: Mix | None = None
    """Shares of sources and document lengths, and packing; None for the documents of the store in
    random order, cut at the sequence's end."""
    recovers: int | None = None
    """Context length, in tokens, that a recovery stage keeps while it trains shorter sequences to
    regain the quality on short text that an extension cost (Instella-MoE)."""
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    start: Literal["scratch", "card", "previous"] = "previous"
    """Initial weights: random, the card's published ones, or those of the previous stage."""
    optimizer: OptimizerState = "new"
    """Whether Adam's moments and step count start at zero, or are those of the previous stage. The
    schedule of the rate is the stage's own either way."""
    gate: Gate = Gate()
    """Thresholds that its evaluation must meet before the next stage may start."""

    def __post_init__(self) -> None:
        """Raise ValueError for a budget or batch that does not fit the sequence length."""
        if self.documents not in get_args(DocumentPolicy):
            raise ValueError(f"documents is {self.documents!r}; it must be 'across' or 'within'")
        if self.optimizer not in get_args(OptimizerState):
            raise ValueError(f"optimizer is {self.optimizer!r}; it must be 'new' or 'carried'")
        if self.optimizer == "carried" and self.start != "previous":
            raise ValueError(
                f"optimizer is 'carried' and start {self.start!r}; only the previous stage has a "
                "state to carry over"
            )
        for name in ("seq_length", "tokens", "tokens_per_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        whole, rest = divmod(self.tokens_per_batch, self.seq_length)
        if rest:
            raise ValueError(
                f"tokens_per_batch {self.tokens_per_batch:,} is not a multiple of "
                f"seq_length {self.seq_length:,}; write {max(whole, 1) * self.seq_length:,}"
            )
        if self.tokens < self.tokens_per_batch:
            raise ValueError(
                f"tokens {self.tokens:,} is less than one batch of {self.tokens_per_batch:,}"
            )
        if self.mix is not None:
            self._require_mix(self.mix)
        if self.recovers is not None and self.recovers <= self.seq_length:
            raise ValueError(
                f"recovers is {self.recovers:,}, the context that the stage keeps; it must be "
                f"above seq_length {self.seq_length:,}"
            )
        if self.recovers is not None and self.positions.target_length is not None:
            raise ValueError(
                f"recovers is {self.recovers:,} and positions train for "
                f"{self.positions.target_length:,}; a recovery stage has consecutive positions"
            )
        if self.rope != "native" and (self.rope.original_length or 0) > self.target_length:
            raise ValueError(
                f"the rotation's original_length is {self.rope.original_length:,}, above the "
                f"{self.target_length:,} tokens that the stage is for; it is the context before "
                "extension"
            )

    def _require_mix(self, mix: Mix) -> None:
        mix.lengths(self.seq_length)
        if self.positions != Positions():
            raise ValueError(
                "the stage has a mix and draws positions, which take whole sequences of the store; "
                "leave one of the two out"
            )
        if mix.other_lengths and self.documents != "within":
            raise ValueError(
                "the mix has steps of other lengths, whose sequences share a row; they need "
                "documents: within"
            )

    @property
    def target_length(self) -> int:
        """Context length that the stage trains for, in tokens."""
        return self.recovers or self.positions.target_length or self.seq_length

    @property
    def steps(self) -> int:
        """Optimizer steps; the budget is rounded to the nearest whole number of batches."""
        return max(1, round(self.tokens / self.tokens_per_batch))

    @property
    def sequences_per_batch(self) -> int:
        """Global batch size in sequences, as Megatron counts it."""
        return self.tokens_per_batch // self.seq_length


OWN_SOURCE = "own"
"""Source of a ladder of the user's that states none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """An ordered list of stages with its source, models and data."""

    name: str
    source: str
    stages: tuple[Stage, ...]
    cards: tuple[str, ...] = ()
    """Names of the model cards that the rotations are valid for: those that the source trained,
    then those with the same rotation. Empty if the ladder is for no card in particular."""
    data: str = ""
    """Training data of the source, to which the user's store should be similar."""
    starts_from: str = ""
    """Hugging Face repository of the source's initial weights, if not the published ones of its
    first card."""
    ours: tuple[str, ...] = ()
    """Choices made here that the source does not state, one sentence each."""
    departures: tuple[str, ...] = ()
    """Differences between the source and this ladder, and omissions, one sentence each."""
    suites: tuple[SuiteRun, ...] = ()
    """Public suites that are run for the base model before the first stage, and after each."""
    native_context: int | None = None
    """Tokens that its card was trained at, where config.json does not tell; None: as it tells."""
    path: str = ""
    """File that it was read from, as a command named it; empty for a shipped ladder."""

    def __post_init__(self) -> None:
        """Raise ValueError for an empty or shrinking ladder and for an impossible start.

        The context that stages train for must grow. Sequence lengths must differ, since stages and
        their folders are named by them.
        """
        if not self.stages:
            raise ValueError(f"ladder {self.name} has no stage")
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if after.target_length < before.target_length:
                raise ValueError(
                    f"ladder {self.name} shrinks: a stage for {after.target_length:,} tokens "
                    f"follows one for {before.target_length:,}; order the stages by the context "
                    "that they train for"
                )
            if after.start != "previous":
                raise ValueError(
                    f"ladder {self.name}: the stage of {after.seq_length:,} tokens starts from "
                    f"{after.start!r}, which discards the stage before it"
                )
        lengths = [stage.seq_length for stage in self.stages]
        for length in lengths:
            if lengths.count(length) > 1:
                raise ValueError(
                    f"ladder {self.name} has {lengths.count(length)} stages of {length:,} tokens, "
                    "which would share a name and a folder; give each a seq_length of its own, or "
                    "make two ladders"
                )
        for card in self.cards:
            if self.cards.count(card) > 1:
                raise ValueError(f"ladder {self.name} names card {card} twice; once is enough")
        if self.stages[0].start == "previous":
            raise ValueError(
                f"ladder {self.name}: the first stage has no previous one; "
                "start it from 'scratch' or 'card'"
            )
        tasks = [task for suite in self.suites for task in suite.tasks]
        for task in tasks:
            if tasks.count(task) > 1:
                raise ValueError(f"ladder {self.name} has {task} twice in suites; name it once")
        previous: Stage | None = None
        for stage in self.stages:
            self._require_scores(stage, previous)
            previous = stage

    def _require_scores(self, stage: Stage, before: Stage | None) -> None:
        """Raise ValueError for a gate over scores that the ladder does not measure."""
        gate = f"ladder {self.name}: the gate of the stage of {stage.seq_length:,} tokens"
        if stage.gate.suites and not self.suites:
            raise ValueError(
                f"{gate} has thresholds of suites, and the ladder runs none; add suites: to the "
                "ladder, or remove them"
            )
        ruler = stage.gate.ruler
        if ruler is not None and (ruler.length or 0) > stage.target_length:
            raise ValueError(
                f"{gate} has ruler at {ruler.length:,} tokens, and the stage trains for "
                f"{stage.target_length:,}; a model is scored within its own context"
            )
        for threshold in stage.gate.suites:
            if threshold.drop is not None and before is None and stage.start == "scratch":
                raise ValueError(
                    f"{gate} has a drop of {threshold.named}, and the stage starts from random "
                    "weights; state least instead"
                )
            reached = stage
            if threshold.drop is not None and before is not None:
                reached = before
            if (threshold.length or 0) > reached.target_length:
                raise ValueError(
                    f"{gate} has a threshold of {threshold.named} tokens, and the model "
                    f"{'before' if reached is before else 'after'} it is for "
                    f"{reached.target_length:,}; a model is scored within its own context"
                )

    @property
    def word(self) -> str:
        """Value of `--ladder` that names it, quoted for a shell."""
        return shlex.quote(self.path) if self.path else self.name

    def __getitem__(self, seq_length: int) -> Stage:
        """Return the stage of that length, as in `PROLONG[64 * K]`."""
        for stage in self.stages:
            if stage.seq_length == seq_length:
                return stage
        lengths = ", ".join(f"{stage.seq_length:,}" for stage in self.stages)
        raise KeyError(f"ladder {self.name} has no stage of {seq_length:,} tokens, only {lengths}")
