# SPDX-License-Identifier: Apache-2.0
"""Inputs of the first jobs of a chain, which make the store, as absolute paths.

A job runs in a folder of its own, where a relative path would name another file. The store is made
by one job, or by a plan, an array of jobs that share its parts, and a job that merges them.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.long_range.documents import without_tokenizer
from data.preparation.named_sources import parsed_sources
from data.preparation.work import Work
from data.prepare import prepare, run_tasks, write_plan
from data.readers import HUB_PREFIX
from data.sources import absolute, kind_of
from data.store import Manifest, is_store
from longhaul.jobs.ladder_run import LadderRun
from recipes.spec.gate import GateShutError

ARRAY_TASK = "SLURM_ARRAY_TASK_ID"
"""Environment variable: which job of its array a job is."""
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.A)
"""A model of the Hugging Face hub: `NAME` or `OWNER/NAME`."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The inputs of a store that does not exist yet."""

    source: str | dict[str, str] | None
    """A source, or several by name."""
    tokenizer: str | None
    vocab_size: int
    jobs: int | None = None
    """Jobs that share the parts; None: one job does everything."""

    @property
    def sources(self) -> list[str]:
        """The sources, if any are named."""
        if isinstance(self.source, dict):
            return list(self.source.values())
        return [] if self.source is None else [self.source]


def documents_of(
    plan: LadderRun, source: Sequence[str], tokenizer: str | None, jobs: int | None = None
) -> Documents | None:
    """Return the inputs of the store, or None if the store exists.

    Raises ValueError for documents or a tokenizer that do not exist, if no documents are named, and
    for synthetic documents alone without a tokenizer.
    """
    if plan.store.exists():
        given = "--source" if source else "--prepare-jobs" if jobs else None
        if given:
            raise ValueError(f"there is a store at {plan.store}; leave out {given}, or --store")
        return None
    if plan.card.hf_id is not None and not source:
        raise ValueError(
            f"there is no token store at {plan.store}; name --source DOCUMENTS to make one first"
        )
    documents = Documents(
        source=_sources(source),
        tokenizer=_tokenizer(tokenizer or plan.card.hf_id),
        vocab_size=plan.card.vocab,
        jobs=jobs,
    )
    if documents.tokenizer is None and {*map(kind_of, documents.sources)} == {"synthetic"}:
        raise without_tokenizer(documents.sources[0])
    return documents


def _sources(words: Sequence[str]) -> str | dict[str, str] | None:
    parsed = parsed_sources(words)
    if isinstance(parsed, dict):
        return {name: _source(word) for name, word in parsed.items()}
    return None if parsed is None else _source(parsed)


def _source(word: str) -> str:
    if word.startswith(HUB_PREFIX):
        return word
    if kind_of(word) != "documents":
        return absolute(word)
    path = Path(word).resolve()
    if not path.exists():
        raise ValueError(
            f"--source {word} is not there ({path}); name a file, a folder, or hf:NAME of the hub"
        )
    return str(path)


def _tokenizer(word: str | None) -> str | None:
    """Return the absolute path of a folder, or else a name of the hub as it is."""
    if word is None:
        return None
    path = Path(word).resolve()
    if path.exists():
        return str(path)
    if HUB_NAME.fullmatch(word):
        return word
    raise ValueError(
        f"--tokenizer {word} is not there ({path}); name a folder, or a model of the hub as "
        "OWNER/NAME"
    )


def require_heldout(manifest: Manifest, length: int) -> None:
    """Raise ValueError if no held-out document is longer than a length to evaluate at."""
    if manifest.heldout.longest <= length:
        raise ValueError(
            f"the longest held-out document of {manifest.root} has "
            f"{manifest.heldout.longest:,} tokens; evaluation at {length:,} needs a longer one: "
            "prepare a store from longer documents or with a larger --heldout-fraction; `longhaul "
            "evaluate` takes fewer tokens by --lengths"
        )


def plan_for(
    *, source: str | dict[str, str] | None, out: str, tokenizer: str | None, vocab_size: int
) -> None:
    """Write the plan and the tokenizer of a store, unless the store exists."""
    if not is_store(Path(out)):
        write_plan(source, out, tokenizer=tokenizer, vocab_size=vocab_size)


def share_of(*, out: str, jobs: int) -> None:
    """Do this array job's share of the parts of a store, unless the store exists."""
    if not is_store(Path(out)):
        run_tasks(Work.of_store(Path(out)).folder, int(os.environ[ARRAY_TASK]), jobs)


def prepare_for(
    length: int,
    *,
    source: str | dict[str, str] | None,
    out: str,
    tokenizer: str | None,
    vocab_size: int,
) -> None:
    """Make a store for stages of up to `length` tokens, unless it exists.

    A requeued job thus succeeds. Raises GateShutError, which ends the chain, for a store that
    could not be evaluated at that length.
    """
    if not is_store(Path(out)):
        prepare(source, out, tokenizer=tokenizer, vocab_size=vocab_size)
    manifest = Manifest.load(out)
    try:
        require_heldout(manifest, length)
    except ValueError as error:
        raise GateShutError(str(error)) from None
