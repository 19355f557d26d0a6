# SPDX-License-Identifier: Apache-2.0
"""A file of predictions: which model made them, and which samples are left after an interruption.

    predictions.jsonl                  a line {"id", "prediction"} for each sample, in any order
    predictions.jsonl.job/model.json   the model and the samples: a file has those of one model

Ids of samples do not name the tokenizer or the suite, so both are recorded too.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data.files.whole import write_text
from data.tokenization.encoder import Encoder
from eval.ruler.length import RulerError
from eval.ruler.samples import (
    MANIFEST,
    Sample,
    files_of,
    read_manifest,
    read_samples,
    require_unchanged,
)
from eval.ruler.scoring import is_known, read_predictions

SUFFIX = ".job"
MODEL = "model.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Sample files to be answered."""

    files: tuple[Path, ...]
    suite: str
    tokenizer: str
    """SHA-256 of the tokenizer that they were made with."""
    format: int
    sources: Mapping[str, str]
    lengths: Mapping[str, int]
    """Tokens of each sample's prompt and of those that may be generated, by the sample's id."""

    @property
    def longest(self) -> str:
        """Return the id of the longest sample."""
        return max(self.lengths, key=lambda each: self.lengths[each])

    def facts(self) -> dict[str, Any]:
        """Return what a file of predictions records of its samples."""
        return {
            "suite": self.suite,
            "tokenizer": self.tokenizer,
            "format": self.format,
            "sources": dict(self.sources),
        }


def questions(places: Sequence[Path], limit: int | None = None) -> Questions:
    """Return the sample files of folders and files, of each at most `limit` samples.

    Raises:
        RulerError: if a file is not one of samples or differs from its manifest, if there is no
            sample, or if files are of several suites or tokenizers.
    """
    files = files_of(places)
    lengths: dict[str, int] = {}
    facts: dict[Path, dict[str, Any]] = {}
    for path in files:
        suites = set()
        for sample in first_samples(path, limit):
            if not is_known(sample):
                raise RulerError(f"{path} has a sample of no known task: {sample.task!r}")
            if sample.id in lengths:
                raise RulerError(
                    f"sample {sample.id} is in two of the files; name files of one tokenizer"
                )
            lengths[sample.id] = sample.length
            suites.add(sample.suite)
        if not suites:
            raise RulerError(f"{path} has no samples; `longhaul ruler make` writes them")
        facts[path] = {"suite": suites.pop(), **_of_manifest(path)}
    common = facts[files[0]]
    for path, own in facts.items():
        for name, value in own.items():
            if value != common[name]:
                raise RulerError(
                    f"{files[0]} and {path} differ in {name}: {common[name]} and {value}; answer "
                    "them by one command each"
                )
    return Questions(files=tuple(files), lengths=lengths, **common)


def first_samples(path: Path, limit: int | None) -> Iterator[Sample]:
    """Yield the first samples of a file, at most `limit`; None for all."""
    return islice(read_samples(path), limit)


def _of_manifest(path: Path) -> dict[str, Any]:
    manifest = path.parent / MANIFEST
    row = read_manifest(path.parent).get(path.name)
    if row is None:
        raise RulerError(
            f"{manifest} does not list {path.name}, so its tokenizer is unknown; name the folder "
            "that `longhaul ruler make` wrote"
        )
    require_unchanged(path.parent, row)
    try:
        tokenizer = json.loads(manifest.read_text(encoding="utf-8"))["tokenizer"]["sha256"]
    except (KeyError, TypeError):
        raise RulerError(f"{manifest} does not name a tokenizer; make the samples again") from None
    return {"tokenizer": tokenizer, "format": row.format, "sources": row.sources}


def require_tokenizer(asked: Questions, tokenizer: Encoder, of: str) -> None:
    """Raise RulerError unless samples were made with this tokenizer; `of` says what has it."""
    if asked.tokenizer != tokenizer.sha256:
        raise RulerError(
            f"{asked.files[0]} was made with another tokenizer than {of}: SHA-256 "
            f"{asked.tokenizer[:12]}, not {tokenizer.sha256[:12]}; make the samples with the "
            "model's tokenizer"
        )


def require_room(asked: Questions, context: int, of: str) -> None:
    """Raise RulerError if a sample is longer than the context of the model, which `of` names."""
    longest = asked.longest
    if asked.lengths[longest] > context:
        raise RulerError(
            f"sample {longest} takes {asked.lengths[longest]:,} tokens with its answer, and the "
            f"context of {of} is {context:,}; name files of shorter samples"
        )


def job_folder(out: Path) -> Path:
    """Return the folder next to a file of predictions that has its records and the job's output."""
    return out.with_name(out.name + SUFFIX)


def require_same(out: Path, facts: Mapping[str, Any]) -> None:
    """Raise RulerError if a file has predictions of another model or of other samples."""
    if not out.exists() or not out.stat().st_size:
        return
    path = job_folder(out) / MODEL
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        differing = [name for name in facts if before.get(name) != facts[name]]
    except (OSError, ValueError, AttributeError):
        raise RulerError(
            f"--out {out} exists, and no {path} says which model made it; name another file"
        ) from None
    if differing:
        name = differing[0]
        raise RulerError(
            f"--out {out} has predictions of another model or of other samples ({name} "
            f"{before.get(name)}, not {facts[name]}); name another file"
        )


def begin(out: Path, facts: Mapping[str, Any]) -> set[str]:
    """Record what makes the predictions; return the ids of those that the file has.

    A line that an interruption cut off is removed.

    Raises:
        RulerError: if the file is of another model, or a line of it is not a prediction.
    """
    require_same(out, facts)
    if out.exists():
        whole_lines(out)
    write_text(job_folder(out) / MODEL, json.dumps(facts, indent=1) + "\n")
    return answered(out)


def whole_lines(out: Path) -> None:
    """Remove a line that an interruption cut off."""
    content = out.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(out, end)


def answered(out: Path) -> set[str]:
    """Return the ids of the samples that a file has predictions of."""
    return set(read_predictions([out])) if out.exists() else set()


def append(out: Path, sample: str, prediction: str) -> None:
    """Append a line by one write, so that processes of one machine can share the file."""
    line = (json.dumps({"id": sample, "prediction": prediction}) + "\n").encode()
    descriptor = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if written < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))
