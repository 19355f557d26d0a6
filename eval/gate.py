# SPDX-License-Identifier: Apache-2.0
"""Judge an evaluated stage by its gate, and store the judgement next to the evaluation.

RUN/eval/<stage>.gate.json        open or not, and a sentence for each judgement
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.evaluate import evaluate
from eval.run_folder import Evaluation, evaluation_path, read_evaluation, write_json
from recipes.spec.gate import Gate, GateShutError


@dataclass(frozen=True)
class Judgement:
    """One threshold, and the measured value."""

    name: str
    measured: float
    allowed: float
    passed: bool
    said: str


def judge(gate: Gate, stage: Evaluation, before: Evaluation | None) -> Iterator[Judgement]:
    """Yield the judgements of a gate on a stage, compared with the stage before if needed."""
    length = stage.seq_length
    if gate.rise is not None:
        late, early = _mean(stage, 3 * length // 4, length), _mean(stage, length // 4, length // 2)
        yield _at_most(
            "rise", late - early, gate.rise,
            f"loss {late:.3f} over the last quarter of {length:,} tokens, {early:.3f} over the "
            "second",
        )  # fmt: skip
    if gate.forgotten is not None and before is not None:
        reach = min(before.seq_length, length)
        now, then = _mean(stage, 0, reach), _mean(before, 0, reach)
        yield _at_most(
            "forgotten", now - then, gate.forgotten,
            f"loss {now:.3f} over the first {reach:,} tokens, {then:.3f} after {before.stage}",
        )  # fmt: skip
    if gate.passkey is not None:
        yield _passkeys(gate.passkey, stage)


def _passkeys(least: float, stage: Evaluation) -> Judgement:
    if stage.passkey is None:
        said = "the evaluation has no passkey prompts; raise its trials"
        return Judgement("passkey", math.nan, least, False, said)
    rows = stage.passkey.hits
    found = sum(map(sum, rows)) / sum(map(len, rows))
    return Judgement(
        "passkey", found, least, found >= least,
        f"{found:.0%} of the passkeys found, at least {least:.0%} required",
    )  # fmt: skip


def _at_most(name: str, measured: float, allowed: float, said: str) -> Judgement:
    sentence = f"{said}: {measured:+.3f} nats, {allowed:g} allowed"
    return Judgement(name, measured, allowed, measured <= allowed, sentence)


def _mean(stage: Evaluation, start: int, stop: int) -> float:
    """Return the mean loss of the bins that begin in a range of positions; NaN if none does."""
    bins = stage.by_position
    if bins is None:
        return math.nan
    inside = [
        (loss, tokens)
        for edge, loss, tokens in zip(bins.edges, bins.loss, bins.tokens, strict=False)
        if start <= edge < stop
    ]
    counted = sum(tokens for _, tokens in inside)
    return sum(loss * tokens for loss, tokens in inside) / counted if counted else math.nan


def gate_path(run: Path, stage: str) -> Path:
    """Return the path of the judgement of a stage."""
    return evaluation_path(run, stage).with_suffix(".gate.json")


def has_passed(run: Path, stage: str) -> bool:
    """Return whether a stage was judged and its gate is open."""
    path = gate_path(run, stage)
    return path.is_file() and bool(json.loads(path.read_text())["open"])


def pass_gate(run: Path, stage: str, before: str | None, gate: Gate) -> None:
    """Judge an evaluated stage; raise GateShutError if the next stage must not start."""
    found = read_evaluation(run, stage)
    if found is None:
        raise ValueError(f"{stage} of {run} has not been evaluated; there is nothing to judge")
    earlier = None if before is None else read_evaluation(run, before)
    judgements = list(judge(gate, found, earlier))
    failed = [one for one in judgements if not one.passed]
    write_json(
        gate_path(run, stage), {"stage": stage, "open": not failed, "judgements": judgements}
    )
    if failed:
        said = "; ".join(f"{one.name}: {one.said}" for one in failed)
        raise GateShutError(f"the gate after {stage} is shut: {said}")


def evaluate_and_judge(
    run: str, stage: str, before: str | None, gate: Gate, **evaluation: Any
) -> None:
    """Evaluate a stage on all ranks of this job and judge it on the first."""
    evaluate(run=run, stages=[stage] if before is None else [before, stage], **evaluation)
    if os.environ.get("RANK", "0") == "0":
        pass_gate(Path(run), stage, before, gate)
