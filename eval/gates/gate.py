# SPDX-License-Identifier: Apache-2.0
"""Judge an evaluated stage by its gate, and store the judgement next to the evaluation.

RUN/eval/<stage>.gate.json        open or not, and a sentence for each judgement

A measured value decides whether the gate opens. Its 95% interval, over documents or prompts, says
how sure that is (`eval.gates.judgement`).
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from eval.evaluate import evaluate
from eval.gates.judgement import (
    FEW_DOCUMENTS,
    FEW_PROMPTS,
    MET,
    NOT_MET,
    Judgement,
    Measure,
    pass_judgements,
    unmeasured,
    verdict,
)
from eval.run_folder import Evaluation, evaluation_path, plain, read_evaluation
from eval.uncertainty import prompts_to_tell, share_interval, standard_error
from recipes.spec.gate import Gate
from recipes.spec.schema import decode


class Loss(NamedTuple):
    """Mean loss over a range of positions, and of each document; none in older evaluations."""

    mean: float
    by_document: list[float]


def judge(gate: Gate, stage: Evaluation, before: Evaluation | None) -> Iterator[Judgement]:
    """Yield the judgements of a gate on a stage, compared with the stage before if needed."""
    length = stage.seq_length
    if gate.rise is not None:
        late, early = _loss(stage, 3 * length // 4, length), _loss(stage, length // 4, length // 2)
        yield _at_most(
            "rise", late, early, gate.rise,
            f"loss {late.mean:.3f} over the last quarter of {length:,} tokens, {early.mean:.3f} "
            "over the second",
        )  # fmt: skip
    if gate.forgotten is not None and before is not None:
        reach = min(before.seq_length, length)
        now, then = _loss(stage, 0, reach), _loss(before, 0, reach)
        if not _same_documents(stage, before):
            now, then = now._replace(by_document=[]), then._replace(by_document=[])
        yield _at_most(
            "forgotten", now, then, gate.forgotten,
            f"loss {now.mean:.3f} over the first {reach:,} tokens, {then.mean:.3f} after "
            f"{before.stage}",
        )  # fmt: skip
    if gate.short is not None and before is not None:
        yield _short(gate.short, stage, before)
    if gate.passkey is not None:
        yield _passkeys(gate.passkey, stage)
    if gate.context_gain is not None:
        yield _gain(gate.context_gain, stage)


def _short(allowed: float, stage: Evaluation, before: Evaluation) -> Judgement:
    now, then = stage.short, before.short
    if now is None or then is None:
        lacking = stage if now is None else before
        said = (
            f"the evaluation of {lacking.stage} has no short documents, or is of an earlier version"
        )
        return unmeasured("short", allowed, said)
    same = _same_documents(stage, before) and now.tokens == then.tokens
    return _at_most(
        "short",
        Loss(now.loss, list(now.by_document) if same else []),
        Loss(then.loss, list(then.by_document) if same else []),
        allowed,
        f"loss {now.loss:.3f} of short documents, {then.loss:.3f} after {before.stage}",
    )


def _passkeys(least: float, stage: Evaluation) -> Judgement:
    grid = stage.passkey
    if grid is None or not grid.tried:
        said = "the evaluation has no passkey prompts; raise its trials"
        return unmeasured("passkey", least, said)
    found, tried = grid.found, grid.tried
    share = found / tried
    low, high = share_interval(found, tried)
    would_do = None
    if low >= least or (least == 1 and found == tried):  # no number of prompts shows more
        state = MET
    elif high < least:
        state = NOT_MET
    else:
        state, would_do = FEW_PROMPTS, prompts_to_tell(share, least)
    said = (
        f"{share:.0%} of the passkeys found, at least {least:.0%} required: "
        f"{verdict(state, tried, would_do)}; {found} of {tried:,} is a share of {low:.0%} to "
        f"{high:.0%}"
    )
    return Judgement(
        "passkey", share, least, share >= least, said, state, counted=tried, would_do=would_do
    )


def _gain(least: float, stage: Evaluation) -> Judgement:
    """Judge how much lower the loss of the same tokens is, given the whole window before them."""
    gain = stage.context_gain
    if gain is None or len(gain.contexts) < 2:
        said = (
            f"the evaluation of {stage.stage} has no gain from context; evaluate with "
            "--context-gain"
            if gain is None
            else f"the evaluation of {stage.stage} has one context only; evaluate at a greater "
            "length"
        )
        return unmeasured("context_gain", least, said)
    few, whole = gain.contexts[0], gain.contexts[-1]
    measure = _difference(
        Loss(gain.loss[0], [row[0] for row in gain.by_document]),
        Loss(gain.loss[-1], [row[-1] for row in gain.by_document]),
    )
    said = (
        f"loss {gain.loss[-1]:.3f} of the last {gain.scored:,} tokens of {whole:,}, "
        f"{gain.loss[0]:.3f} with only the last {few:,} read: a gain of {measure.value:+.3f}"
        f"{measure.spread} nats, at least {least:g} required"
    )
    return measure.judged("context_gain", least, said, least=True)


def _at_most(name: str, first: Loss, second: Loss, allowed: float, said: str) -> Judgement:
    """Judge how much higher the first loss is than the second, document by document."""
    measure = _difference(first, second)
    sentence = f"{said}: {measure.value:+.3f}{measure.spread} nats, {allowed:g} allowed"
    return measure.judged(name, allowed, sentence)


def _difference(first: Loss, second: Loss) -> Measure:
    apart = [a - b for a, b in zip(first.by_document, second.by_document, strict=False)]
    if len(first.by_document) != len(second.by_document):  # one of them is not stated
        apart = []
    return Measure(
        value=first.mean - second.mean,
        error=standard_error(apart),
        counted=len(apart),
        few=FEW_DOCUMENTS,
    )


def _same_documents(stage: Evaluation, other: Evaluation) -> bool:
    def key(each: Evaluation) -> tuple[str, int, int, tuple[str, ...]]:
        return each.store, each.documents, each.eval_length, each.sources

    return key(stage) == key(other)


def _loss(stage: Evaluation, start: int, stop: int) -> Loss:
    """Return the loss of the bins that begin in a range of positions; NaN if none does."""
    bins = stage.by_position
    if bins is None:
        return Loss(math.nan, [])
    inside = [
        (loss, tokens)
        for edge, loss, tokens in zip(bins.edges, bins.loss, bins.tokens, strict=False)
        if start <= edge < stop
    ]
    counted = sum(tokens for _, tokens in inside)
    mean = sum(loss * tokens for loss, tokens in inside) / counted if counted else math.nan
    return Loss(mean, [] if bins.bands is None else bins.bands.of_documents(start, stop))


def gate_path(run: Path, stage: str) -> Path:
    """Return the path of the judgement of a stage."""
    return evaluation_path(run, stage).with_suffix(".gate.json")


def has_passed(run: Path, stage: str, gate: Gate) -> bool:
    """Return whether a stage was judged by this gate and it is open.

    Files of earlier versions state fewer thresholds, or none of their gate; those that state none
    count as judged by it.
    """
    path = gate_path(run, stage)
    if not path.is_file():
        return False
    judged = json.loads(path.read_text())
    if not judged["open"]:
        return False
    try:
        return decode(Gate, judged.get("gate", plain(gate)), str(path), unknown="ignore") == gate
    except ValueError:
        return False


def pass_gate(run: Path, stage: str, before: str | None, gate: Gate) -> None:
    """Judge an evaluated stage; raise GateShutError if the next stage must not start."""
    found = read_evaluation(run, stage)
    if found is None:
        raise ValueError(f"{stage} of {run} has not been evaluated; there is nothing to judge")
    earlier = None if before is None else read_evaluation(run, before)
    if before is not None and earlier is None:
        raise ValueError(f"{before} of {run} has not been evaluated, so {stage} cannot be compared")
    judgements = list(judge(gate, found, earlier))
    pass_judgements(gate_path(run, stage), stage, {"gate": asdict(gate)}, judgements)


def evaluate_and_judge(
    run: str,
    stage: str,
    before: str | None,
    gate: Gate,
    **evaluation: Any,
) -> None:
    """Evaluate a stage on all ranks of this job and judge it on the first."""
    evaluate(
        run=run,
        stages=[stage] if before is None else [before, stage],
        context_gain=gate.context_gain is not None,
        **evaluation,
    )
    if os.environ.get("RANK", "0") == "0":
        pass_gate(Path(run), stage, before, gate)
