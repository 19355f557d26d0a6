# SPDX-License-Identifier: Apache-2.0
"""Scores of a model in a run folder, as `longhaul ruler score --run` writes them.

    RUN/eval/ruler/<model>.json

A model is a stage, or a base model (`eval.base_model`). Later scores of the same model replace a
file. Two scores can be compared if they are of the same samples (`samples_of`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.provenance import Provenance
from eval.ruler.scoring import THRESHOLD, Score, Scores
from eval.run_folder import BrokenResultError, write_json
from recipes.spec.schema import decode

FOLDER = "ruler"
DIGEST = 8
"""Digits of a SHA-256 that a sentence names."""

Samples = tuple[tuple[str, ...], int]
"""SHA-256 of the files of a score, and how many of their samples were scored."""


@dataclass(frozen=True, kw_only=True)
class RulerResult:
    """Content of a file: the scores of one model, in percent, and how they came about.

    Args:
        tokenizer_sha256: Of the tokenizer that the samples were made with; empty if not known.
        weights: Checkpoint or export that answered; empty if another engine did.
        step: Of the stage's checkpoint; None if it is not known.
        threshold: What an average must exceed to count for the effective length.
    """

    model: str
    scores: Scores
    provenance: Provenance
    tokenizer_sha256: str = ""
    weights: str = ""
    weights_sha256: str = ""
    step: int | None = None
    precision: str = ""
    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        """Raise ValueError for scores that are not those of a suite."""
        rows = self.scores.scores
        if not rows:
            raise ValueError("scores.scores is empty; expected the score of at least one task")
        places = [(row.task, row.length) for row in rows]
        for row, (task, length) in zip(rows, places, strict=True):
            if places.count((task, length)) > 1:
                raise ValueError(f"scores.scores has {task} at {length:,} tokens twice")
            if not row.files:
                raise ValueError(f"scores.scores has no files of samples of {task} at {length:,}")
        if [each.length for each in self.scores.averages] != sorted({row.length for row in rows}):
            raise ValueError("scores.averages must have each length of scores.scores once, rising")
        percents = [(each.length, each.score) for each in rows]
        percents += [(each.length, each.score) for each in self.scores.averages]
        for length, score in percents:
            if not 0 <= score <= 100:
                raise ValueError(f"a score at {length:,} tokens is {score}, not 0 to 100")


def samples_of(score: Score) -> Samples:
    """Return what two scores of a task and length must share to be compared."""
    return tuple(each.sha256 for each in score.files), score.samples


def result_path(run: Path, model: str) -> Path:
    """Return the path of the scores of a model."""
    return run / "eval" / FOLDER / f"{model}.json"


def write_result(run: Path, result: RulerResult) -> list[str]:
    """Write the scores of a model; return the tasks and lengths of replaced ones that it lacks."""
    path = result_path(run, result.model)
    try:
        before = result_at(path)
    except BrokenResultError:
        before = None
    write_json(path, result)
    own = {(row.task, row.length) for row in result.scores.scores}
    earlier = [] if before is None else before.scores.scores
    return [f"{row.task} at {row.length:,}" for row in earlier if (row.task, row.length) not in own]


def covers(kept: RulerResult | None, scores: Scores, weights_sha256: str, precision: str) -> bool:
    """Return whether a file has these scores of the model, or scores of more samples of a file."""
    if kept is None or kept.scores.suite != scores.suite:
        return False
    if (kept.weights_sha256, kept.precision) != (weights_sha256, precision):
        return False
    there = {(row.task, row.length, row.files): row for row in kept.scores.scores}
    found = [(there.get((row.task, row.length, row.files)), row) for row in scores.scores]
    return all(
        before is not None and (before == row or before.samples > row.samples)
        for before, row in found
    )


def read_results(run: Path) -> list[RulerResult]:
    """Read the scores of all models of a run, by file name."""
    found = map(result_at, sorted((run / "eval" / FOLDER).glob("*.json")))
    return [each for each in found if each is not None]


def result_at(path: Path) -> RulerResult | None:
    """Return the scores in a file, or None if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise BrokenResultError(
            f"{path} is not JSON ({error}); remove it and score the answers again"
        ) from None
    try:
        return decode(RulerResult, content, str(path), unknown="ignore")
    except ValueError as error:
        raise BrokenResultError(str(error)) from None


def together(results: Sequence[RulerResult]) -> list[list[RulerResult]]:
    """Return the models in groups that were asked the same samples, in order."""
    groups: list[list[RulerResult]] = []
    for each in results:
        for group in groups:
            if all(not why_apart(other, each) for other in group):
                group.append(each)
                break
        else:
            groups.append([each])
    return groups


def why_apart(first: RulerResult, second: RulerResult) -> str:
    """Return why two models are not put side by side; empty if they are."""
    if first.scores.suite != second.scores.suite:
        return f"the suites differ ({first.scores.suite} and {second.scores.suite})"
    tokenizers = [first.tokenizer_sha256, second.tokenizer_sha256]
    if all(tokenizers) and len(set(tokenizers)) > 1:
        return f"their tokenizers differ (SHA-256 {' and '.join(map(_digest, tokenizers))})"
    ours, theirs = _samples(first), _samples(second)
    shared = [length for length in ours if length in theirs]
    if not shared:
        return "they have no length in common"
    for length in shared:
        if ours[length] == theirs[length]:
            continue
        at = f"at {length:,} tokens"
        if ours[length].keys() != theirs[length].keys():
            only = sorted(ours[length].keys() ^ theirs[length].keys())
            return f"{at} one of them alone was asked {', '.join(only)}"
        task = next(name for name in ours[length] if ours[length][name] != theirs[length][name])
        of = [f"{count:,} of SHA-256 {'+'.join(map(_digest, sums))}"
              for sums, count in (ours[length][task], theirs[length][task])]  # fmt: skip
        return f"{at} they were asked other samples of {task} ({' and '.join(of)})"
    return ""


def lengths_of(results: Sequence[RulerResult]) -> tuple[int, ...]:
    """Return the lengths of some models, in rising order."""
    return tuple(sorted({each.length for one in results for each in one.scores.averages}))


def _samples(result: RulerResult) -> dict[int, dict[str, Samples]]:
    found: dict[int, dict[str, Samples]] = {}
    for row in result.scores.scores:
        found.setdefault(row.length, {})[row.task] = samples_of(row)
    return found


def _digest(sha256: str) -> str:
    return sha256[:DIGEST]
