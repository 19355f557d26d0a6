# SPDX-License-Identifier: Apache-2.0
"""Sample files: one for each task and length, made once, found and checked afterwards.

    OUT/ruler-offline-<tokenizer>/manifest.json
    OUT/ruler-offline-<tokenizer>/niah_single_1-131072-seed0.jsonl

A line has the fields of RULER's own files (`index`, `input`, `answer_prefix`, `outputs`, `length`),
and an `id`, the exact tokens of the prompt and the tokens that may be generated. Sample `n` depends
on the seed, the task, the length and `n` alone. The manifest has the SHA-256 of every file. An
`id` ends in digits of the SHA-256 of its prompt, so that answers to other texts are not scored.
"""

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

from data.files.sha256 import sha256_of
from data.files.whole import replacing, write_text
from eval.ruler.length import Fitted, RulerError, ShortLengthError, fit
from eval.ruler.sources import Setting, Sources
from eval.ruler.tasks import Task
from eval.ruler.tokens import Tokens

FORMAT = 2
"""Raised when the same seed gives other samples; files of another format are made again."""
MANIFEST = "manifest.json"
TOKENS_AT_ONCE = 2**21
"""Tokens of the prompts that are made and encoded together."""
MOST_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sample, as a line of a file has it."""

    id: str
    suite: str
    task: str
    index: int
    max_length: int
    """Tokens of prompt and answer that were asked for."""
    length: int
    """Tokens of the prompt and those that may be generated: at most `max_length`."""
    prompt_tokens: int
    max_new_tokens: int
    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    expected: str
    """The whole answer as a continuation; to produce it exactly is to answer in full."""
    by_template: Literal[False] = False
    """A field of format 2: no chat template writes these prompts."""

    @property
    def prompt(self) -> str:
        """Return what the model reads."""
        return self.input + self.answer_prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFile:
    """A file of the manifest."""

    file: str
    task: str
    length: int
    seed: int
    samples: int
    sha256: str
    unit: str
    fewest_tokens: int
    median_tokens: float
    most_tokens: int
    """Of the prompts."""
    budget: int
    """Tokens that a prompt may have: the length without the tokens to generate."""
    seconds: float
    own_words: bool
    sources: dict[str, str]
    """SHA-256 of the files that the text is from."""
    format: int


def suite_folder(out: Path, sources: Sources, tokens: Tokens) -> Path:
    """Return the folder of RULER's files for a tokenizer."""
    return out / f"{sources.suite}-{tokens.tokenizer.sha256[:12]}"


def make(
    folder: Path,
    task: Task,
    *,
    length: int,
    samples: int,
    seed: int,
    tokens: Tokens,
    sources: Sources,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[SampleFile, bool]:
    """Return the row of a task's file, and whether it was there already; make it if it was not.

    Args:
        folder: `suite_folder`.
        length: tokens of prompt and answer together.
        progress: told how many samples are done.

    Raises:
        RulerError: if the length is too short for the task, or a file has changed since.
    """
    if samples < 1:
        raise RulerError(f"{samples} samples cannot be made; ask for at least 1")
    rows = read_manifest(folder)
    name = f"{task.name}-{length}-seed{seed}.jsonl"
    row = rows.get(name)
    if row is not None and (folder / name).exists() and _same(row, samples, sources):
        require_unchanged(folder, row)
        return row, True
    began = time.monotonic()
    budget = length - task.form.new_tokens
    setting = Setting(length=length, budget=budget, seed=seed, tokens=tokens, sources=sources)
    counted: list[int] = []
    with replacing(folder / name) as hidden, hidden.open("w", encoding="utf-8") as file:
        for sample in drawn(task, setting, samples):
            counted.append(sample.prompt_tokens)
            file.write(json.dumps(asdict(sample), ensure_ascii=False) + "\n")
            progress(len(counted))
    row = SampleFile(
        file=name, task=task.name, length=length, seed=seed, samples=samples,
        sha256=sha256_of([folder / name])[0], unit=task.unit, fewest_tokens=min(counted),
        median_tokens=median(counted), most_tokens=max(counted), budget=budget,
        seconds=round(time.monotonic() - began, 2), own_words=sources.own_words,
        sources=sources.sha256, format=FORMAT,
    )  # fmt: skip
    write_manifest(folder, {**read_manifest(folder), name: row}, tokens, sources.suite)
    return row, False


def require_length(task: Task, length: int, seed: int, tokens: Tokens, sources: Sources) -> None:
    """Raise RulerError if the first sample of a task is longer than `length` at its shortest."""
    budget = length - task.form.new_tokens
    setting = Setting(length=length, budget=budget, seed=seed, tokens=tokens, sources=sources)
    next(drawn(task, setting, 1))


def drawn(task: Task, setting: Setting, samples: int) -> Iterator[Sample]:
    """Yield the samples of a file in order.

    Raises:
        RulerError: if the length is too short for the task.
    """
    too_short = f"{task.name} cannot be made at {setting.length:,} tokens: the answer may take"
    if setting.budget < 1:
        raise RulerError(f"{too_short} {task.form.new_tokens}; give a greater length")
    at_once = max(1, min(MOST_AT_ONCE, TOKENS_AT_ONCE // setting.budget))
    ratio = 1.0
    for start in range(0, samples, at_once):
        numbers = range(start, min(start + at_once, samples))
        seed = f"ruler {setting.seed} {task.name} {setting.length}"
        drafts = [
            task.draft(setting, random.Random(f"{seed} {number}"), number) for number in numbers
        ]
        try:
            fitted, ratio = fit(drafts, setting.budget, setting.tokens.of_prompts, ratio=ratio)
        except ShortLengthError as error:
            needed = error.tokens + task.form.new_tokens
            raise RulerError(
                f"{too_short} {task.form.new_tokens} and the shortest prompt {error.tokens:,}; "
                f"give at least {needed:,}, or more where another sample is longer"
            ) from None
        for number, draft, one in zip(numbers, drafts, fitted, strict=True):
            yield _sample(task, setting, number, one, draft.outputs, draft.answer)


def _sample(
    task: Task, setting: Setting, number: int, fitted: Fitted, outputs: tuple[str, ...], answer: str
) -> Sample:
    return Sample(
        id=f"{task.name}-{setting.length}-seed{setting.seed}-{number}-{prompt_digest(fitted.prompt.text)}",
        suite=setting.sources.suite,
        task=task.name,
        index=number,
        max_length=setting.length,
        length=fitted.tokens + task.form.new_tokens,
        prompt_tokens=fitted.tokens,
        max_new_tokens=task.form.new_tokens,
        input=fitted.prompt.input,
        answer_prefix=fitted.prompt.prefix,
        outputs=outputs,
        expected=answer,
    )


def prompt_digest(prompt: str) -> str:
    """Return eight digits of a prompt's SHA-256: other texts have other predictions."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of a file.

    Raises:
        RulerError: if the file is not one of samples.
    """
    for number, content in read_lines(path):
        try:
            outputs = content["outputs"]
            if not isinstance(outputs, list) or not all(isinstance(one, str) for one in outputs):
                raise TypeError(outputs)
            yield Sample(**{**content, "outputs": tuple(outputs)})
        except (KeyError, TypeError):
            raise RulerError(
                f"{path} is not a file of samples (line {number}); name what `longhaul ruler make` "
                "wrote"
            ) from None


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of each line of a JSONL file; empty ones are left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json.loads(line.decode())
                except ValueError:
                    raise RulerError(f"{path} is not JSONL: line {number} is not JSON") from None


def read_manifest(folder: Path) -> dict[str, SampleFile]:
    """Return the rows of a folder's manifest by file; empty if there is none.

    Raises:
        RulerError: if the manifest is of another form.
    """
    path = folder / MANIFEST
    if not path.exists():
        return {}
    try:
        return {row["file"]: SampleFile(**row) for row in json.loads(path.read_text())["files"]}
    except (KeyError, TypeError, ValueError):
        raise RulerError(f"{path} is not a manifest of samples; remove {folder}") from None


def require_unchanged(folder: Path, row: SampleFile) -> None:
    """Raise RulerError if a file that exists is not what the manifest says."""
    path = folder / row.file
    if sha256_of([path])[0] != row.sha256:
        raise RulerError(
            f"{path} has changed since it was made (another SHA-256 than in {MANIFEST}); remove "
            "it, and the same command makes it again"
        )


def _same(row: SampleFile, samples: int, sources: Sources) -> bool:
    return (row.format, row.samples, row.sources) == (FORMAT, samples, sources.sha256)


def write_manifest(folder: Path, rows: dict[str, SampleFile], tokens: Tokens, suite: str) -> None:
    """Write the manifest of a folder, with the rows of its files by name."""
    content = {
        "suite": suite,
        "tokenizer": {"name": tokens.tokenizer.name, "sha256": tokens.tokenizer.sha256},
        "tokenizers": version("tokenizers"),
        "files": [asdict(rows[name]) for name in sorted(rows)],
    }
    write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def files_of(places: Sequence[Path]) -> list[Path]:
    """Return the sample files of folders and files; raise RulerError if there are none."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            found += sorted(place.rglob("*-seed*.jsonl"))
        elif place.is_file():
            found.append(place)
        else:
            raise RulerError(f"{place} does not exist; name a file of samples, or their folder")
    if not found:
        raise RulerError(f"{places[0]} has no sample files; `longhaul ruler make` writes them")
    return list(dict.fromkeys(found))
