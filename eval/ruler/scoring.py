# SPDX-License-Identifier: Apache-2.0
"""Scores of predictions by the paper's metrics, with standard errors, and the effective length.

    all    share of the answers that occur in the prediction, upper and lower case not told apart
    part   1 if any of the answers occurs in it, else 0

    score = 100 * mean over samples        (NVIDIA/RULER, `scripts/eval/synthetic/constants.py`)

Where every sample is 0 or 1 the interval of 95% is Wilson's, and the error that of a binomial; if
all are 0, or all 1, it is taken from the interval, since a few equal samples do not make it 0. Else
error and interval are those of a mean (`eval.uncertainty`). The average of a length is over tasks;
its error is that of independent tasks.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from data.files.sha256 import sha256_of
from eval.ruler.forms import Metric
from eval.ruler.length import RulerError
from eval.ruler.samples import (
    Sample,
    SampleFile,
    read_lines,
    read_manifest,
    read_samples,
    require_unchanged,
)
from eval.ruler.sources import OFFLINE
from eval.ruler.tasks import TASKS
from eval.uncertainty import NORMAL, interval_width, share_interval, standard_error
from recipes.spec.naming import length_shown

THRESHOLD = 85.6
"""Llama-2-7B (chat) at 4K: what the paper holds a length to that counts as effective."""
CONTROL = re.compile(r"[\x00-\x1f]")
TEXT_KEYS = ("prediction", "pred")
"""Field of a prediction's line; RULER's own scripts write `pred`."""
SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredFile:
    """A file of samples: its name and its SHA-256."""

    file: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The score of one task at one length, in percent."""

    task: str
    length: int
    samples: int
    score: float
    standard_error: float | None
    """None for one sample of a task that is not 0 or 1."""
    low: float
    high: float
    """Ends of an interval of 95%."""
    metric: str = ""
    """RULER's `all` or `part`."""
    files: tuple[ScoredFile, ...] = ()
    """Those whose first samples were scored, or all of them; in the order of their names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    """The average over the tasks of a length, in percent."""

    length: int
    tasks: int
    score: float
    standard_error: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """All scores of a suite."""

    suite: str
    scores: list[Score]
    averages: list[Average]
    effective_length: int | None
    """Largest length up to which every average exceeds the threshold; 0: none does."""
    not_stated_because: str
    """Why none is stated; empty if one is."""
    own_words: bool = False
    """Whether keys or word lists are of our own words, as a manifest says."""


def sample_score(metric: Metric, prediction: str, outputs: Sequence[str]) -> float:
    """Return the score of one prediction, 0 to 1."""
    text = CONTROL.sub("\n", prediction.strip()).strip().lower()
    found = [output.lower() in text for output in outputs]
    return float(any(found)) if metric == "part" else sum(found) / len(found)


def is_known(sample: Sample) -> bool:
    """Return whether a sample is of one of RULER's tasks."""
    return sample.task in TASKS and bool(sample.outputs)


def score_of(sample: Sample, prediction: str) -> float:
    """Return the score of a prediction by the metric of the sample's task, 0 to 1."""
    return sample_score(TASKS[sample.task].form.metric, prediction, sample.outputs)


def task_score(task: str, length: int, scores: Sequence[float]) -> Score:
    """Return the score of a task at a length from those of its samples."""
    count, mean = len(scores), sum(scores) / len(scores)
    if all(score in (0.0, 1.0) for score in scores):
        low, high = share_interval(round(sum(scores)), count)
        error = math.sqrt(mean * (1 - mean) / count) or (high - low) / (2 * NORMAL)
    else:
        error = standard_error(scores)
        reach = 1.0 if count == 1 else interval_width(count) * error
        low, high = max(mean - reach, 0.0), min(mean + reach, 1.0)
    return Score(
        task=task,
        length=length,
        samples=count,
        score=100 * mean,
        standard_error=None if math.isnan(error) else 100 * error,
        low=100 * low,
        high=100 * high,
    )


def average(length: int, scores: Sequence[Score]) -> Average:
    """Return the average over the tasks of a length."""
    errors = [score.standard_error for score in scores if score.standard_error is not None]
    whole = len(errors) == len(scores)
    return Average(
        length=length,
        tasks=len(scores),
        score=sum(score.score for score in scores) / len(scores),
        standard_error=math.sqrt(sum(each**2 for each in errors)) / len(scores) if whole else None,
    )


def effective_length(averages: Sequence[Average]) -> int:
    """Return the largest length up to which every average exceeds the threshold; 0 if none does."""
    effective = 0
    for one in sorted(averages, key=lambda each: each.length):
        if one.score <= THRESHOLD:
            break
        effective = one.length
    return effective


def effective_sentence(scores: Scores) -> str:
    """Return the sentence about the effective length."""
    if scores.effective_length is None:
        return f"effective length: not stated, since {scores.not_stated_because}"
    of = f"an average above {THRESHOLD}, Llama-2-7B's at 4K"
    if scores.suite == OFFLINE:
        of += " on RULER's own text; this suite has other text, so it is only an indication"
    elif scores.own_words:
        of += "; keys or word lists are of our own words, so it is only an indication"
    return f"effective length: {effective_text(scores)} ({of})"


def effective_text(scores: Scores) -> str:
    """Return the effective length in a word or two; empty if none is stated."""
    if scores.effective_length is None:
        return ""
    shown = length_shown(scores.effective_length or scores.averages[0].length)
    return shown if scores.effective_length else f"below {shown}"


def score(
    files: Sequence[Path], predictions: Sequence[Path], limit: int | None = None
) -> tuple[Scores, int]:
    """Return the scores of sample files, and how many predictions are of no sample.

    `limit` is the number of samples of each file that are scored; None for all.

    Raises:
        RulerError: if a sample has no prediction, or the files are of several suites or have a
            sample twice.
    """
    texts = read_predictions(predictions)
    suites: set[str] = set()
    of_file: dict[tuple[str, int], dict[str, float]] = {}
    sums: dict[tuple[str, int], set[ScoredFile]] = {}
    missing: list[str] = []
    for of, sample in _samples(files, limit):
        suites.add(sample.suite)
        scores = of_file.setdefault((sample.task, sample.max_length), {})
        sums.setdefault((sample.task, sample.max_length), set()).add(of)
        if sample.id in scores:
            raise RulerError(
                f"sample {sample.id} is in two of the files; name files of one tokenizer"
            )
        if sample.id not in texts:
            missing.append(sample.id)
            continue
        scores[sample.id] = score_of(sample, texts[sample.id])
    if len(suites) > 1:
        raise RulerError(f"the files are of {' and '.join(sorted(suites))}; score one suite alone")
    if missing:
        listed = ", ".join(missing[:SHOWN]) + (", ..." if len(missing) > SHOWN else "")
        raise RulerError(
            f"{len(missing):,} samples have no prediction ({listed}); predict them, or name fewer "
            "sample files"
        )
    unknown = len(texts) - sum(len(scores) for scores in of_file.values())
    suite = suites.pop()
    rows = [
        replace(
            task_score(*key, list(scores.values())),
            metric=TASKS[key[0]].form.metric,
            files=tuple(sorted(sums[key], key=lambda each: (each.file, each.sha256))),
        )
        for key, scores in of_file.items()
    ]
    own_words = any(row.own_words for row in map(_row_of, files) if row is not None)
    return replace(_scores(suite, rows), own_words=own_words), unknown


def _scores(suite: str, rows: Sequence[Score]) -> Scores:
    order = {task: number for number, task in enumerate(TASKS)}
    rows = sorted(rows, key=lambda row: (row.length, order.get(row.task, 0), row.task))
    lengths = sorted({row.length for row in rows})
    averages = [average(at, [row for row in rows if row.length == at]) for at in lengths]
    short = [one for one in averages if one.tasks < len(TASKS)]
    why = ""
    if short:
        why = f"{short[0].length:,} tokens has {short[0].tasks} of the {len(TASKS)} tasks"
    return Scores(
        suite=suite,
        scores=rows,
        averages=averages,
        effective_length=None if why else effective_length(averages),
        not_stated_because=why,
    )


def _samples(files: Iterable[Path], limit: int | None) -> Iterable[tuple[ScoredFile, Sample]]:
    for path in files:
        if (row := _row_of(path)) is not None:
            require_unchanged(path.parent, row)
        digest = sha256_of([path])[0] if row is None else row.sha256
        of = ScoredFile(file=path.name, sha256=digest)
        for sample in islice(read_samples(path), limit):
            if not is_known(sample):
                raise RulerError(f"{path} has a sample of no known task: {sample.task!r}")
            yield of, sample


def _row_of(path: Path) -> SampleFile | None:
    """Return the row of a file in its folder's manifest; None if it has none."""
    return read_manifest(path.parent).get(path.name)


def read_predictions(paths: Sequence[Path]) -> Mapping[str, str]:
    """Return the predicted text of each sample by its id.

    Raises:
        RulerError: for a line without an id and a text, and for an id that has two texts.
    """
    found: dict[str, str] = {}
    for path in paths:
        for number, content in read_lines(path):
            text = None
            if isinstance(content, dict):
                text = next((content[key] for key in TEXT_KEYS if key in content), None)
            if not isinstance(text, str) or not isinstance(content.get("id"), str):
                raise RulerError(
                    f"{path}: line {number} is not a prediction; expected "
                    '{"id": "...", "prediction": "..."}'
                )
            if found.setdefault(content["id"], text) != text:
                raise RulerError(
                    f"{path}: line {number} is a second, different prediction of {content['id']}"
                )
    return found
