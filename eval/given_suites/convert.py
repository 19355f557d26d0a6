# SPDX-License-Identifier: Apache-2.0
"""Write the rows of published files as sample files, each in the bin of its length.

    length of a row = tokens of the prompt + tokens of the answer + extra tokens
    bin of length L:  L / 2 < length <= L        (openai/mrcr has the bins 4K to 8K, 8K to 16K, ...)

A row is in the smallest of the asked lengths that holds it. One that is longer than all of them is
left out and counted, and so is one of at most half of that length. Nothing is truncated.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO

from data.files.sha256 import sha256_of
from data.files.whole import replacing
from eval.given_suites.rendering import Rendering
from eval.given_suites.row import Row
from eval.given_suites.suites import Suite
from eval.ruler.length import RulerError
from eval.ruler.samples import (
    FORMAT,
    Sample,
    SampleFile,
    folder_of,
    prompt_digest,
    read_manifest,
    write_manifest,
)
from eval.ruler.tokens import Tokens

TOO_LONG, TOO_SHORT, SPECIAL = "too long", "too short", "special token"
"""Why a row is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """What a conversion wrote."""

    folder: Path
    files: list[SampleFile]
    left_out: dict[str, int]
    """Rows that no file has, by reason."""
    by_template: bool
    """Whether a chat template wrote the prompts."""
    joined: int
    """Prompts whose messages were joined, since the template refused them."""


@dataclass(slots=True)
class _Bin:
    """The file of a task and length while it is written."""

    file: IO[str]
    prompts: list[int] = field(default_factory=list)
    """Tokens of each."""
    fewest_new: int = 0


def convert(
    folder: Path,
    out: Path,
    suite: Suite,
    *,
    tokens: Tokens,
    lengths: Sequence[int],
    extra_tokens: int,
    samples: int | None = None,
) -> Converted:
    """Write a file for each task and length that has a row, and list it in the manifest.

    Args:
        lengths: tokens of prompt and answer together.
        extra_tokens: tokens that may be generated beyond those of the answer.
        samples: rows of each task and length at most, the first of the files; None for all.

    Raises:
        RulerError: if files or columns are missing, or no row is within the lengths.
    """
    files, sources = suite.files(folder), suite.sources(folder)
    began = time.monotonic()
    rendering = Rendering(tokens.tokenizer.hugging_face)
    names = [path.relative_to(folder).as_posix() for path in sources]
    sums = dict(zip(names, sha256_of(sources), strict=True))
    target = folder_of(out, suite.name, tokens)
    left_out: Counter[str] = Counter()
    bins: dict[tuple[str, int], _Bin] = {}
    with ExitStack() as stack:
        for row in (row for path in files for row in suite.rows(path)):
            sample = (
                row
                if isinstance(row, str)
                else _sample(row, suite, rendering, tokens, sorted(lengths), extra_tokens)
            )
            if isinstance(sample, str):
                left_out[sample] += 1
                continue
            place = (sample.task, sample.max_length)
            if place not in bins:
                hidden = stack.enter_context(replacing(target / _name(*place)))
                bins[place] = _Bin(stack.enter_context(hidden.open("w", encoding="utf-8")))
            _write(bins[place], sample, samples)
        if not bins:
            raise RulerError(_none(folder, suite, left_out, lengths))
    seconds = round(time.monotonic() - began, 2)
    written = [
        SampleFile(
            file=_name(*place), task=place[0], length=place[1], seed=0, samples=len(one.prompts),
            sha256=sha256_of([target / _name(*place)])[0], unit="row",
            fewest_tokens=min(one.prompts), median_tokens=median(one.prompts),
            most_tokens=max(one.prompts), budget=place[1] - one.fewest_new, seconds=seconds,
            own_words=False, sources={**sums, **rendering.sha256}, format=FORMAT,
        )
        for place, one in sorted(bins.items())
    ]  # fmt: skip
    listed = read_manifest(target) | {row.file: row for row in written}
    write_manifest(target, listed, tokens, suite.name)
    return Converted(
        folder=target,
        files=written,
        left_out=dict(left_out),
        by_template=rendering.by_template,
        joined=rendering.joined,
    )


def _sample(
    row: Row,
    suite: Suite,
    rendering: Rendering,
    tokens: Tokens,
    lengths: Sequence[int],
    extra_tokens: int,
) -> Sample | str:
    """Return the sample of a row, without its number; or why the row is left out."""
    if rendering.special_token_in(row.messages):
        return SPECIAL
    prompt = rendering.prompt(row.messages)
    read = len(tokens.prompt(prompt, by_template=rendering.by_template))
    new = len(tokens.continuation(prompt, row.expected)) + extra_tokens
    within = next((at for at in lengths if read + new <= at), None)
    if within is None:
        return TOO_LONG
    if 2 * (read + new) <= within:
        return TOO_SHORT
    return Sample(
        id=f"{row.task}-{within}-{prompt_digest(prompt)}",
        suite=suite.name,
        task=row.task,
        index=0,
        max_length=within,
        length=read + new,
        prompt_tokens=read,
        max_new_tokens=new,
        input=prompt,
        answer_prefix="",
        outputs=row.outputs,
        expected=row.expected,
        by_template=rendering.by_template,
    )


def _write(into: _Bin, sample: Sample, most: int | None) -> None:
    number = len(into.prompts)
    if most is not None and number >= most:
        return
    start, _, digest = sample.id.rpartition("-")
    line = asdict(sample) | {"id": f"{start}-{number}-{digest}", "index": number}
    into.file.write(json.dumps(line, ensure_ascii=False) + "\n")
    into.prompts.append(sample.prompt_tokens)
    into.fewest_new = min(into.fewest_new or sample.max_new_tokens, sample.max_new_tokens)


def _name(task: str, length: int) -> str:
    return f"{task}-{length}-seed0.jsonl"


def _none(folder: Path, suite: Suite, left_out: Counter[str], lengths: Sequence[int]) -> str:
    """Return the message for no sample at all."""
    if not left_out:
        return f"the files of {folder} have no rows; {suite.download(folder)} writes them again"
    known = (TOO_LONG, TOO_SHORT, SPECIAL)
    others = "".join(f", {left_out[each]:,} a {each}" for each in left_out if each not in known)
    return (
        f"no row of {folder} is within the lengths: {left_out[TOO_LONG]:,} have more than "
        f"{max(lengths):,} tokens, {left_out[TOO_SHORT]:,} at most half of the length that holds "
        f"them, {left_out[SPECIAL]:,} a special token in a message{others}; give other --lengths"
    )
