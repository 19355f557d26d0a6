# SPDX-License-Identifier: Apache-2.0
"""Make a token store from sources: plan, tokenize in parts, merge (`data.preparation`).

A document is held out if the hash of its text falls below the held-out fraction. The choice does
not depend on the order of the source or on other documents, and two copies of one text always
land in the same split.

The parts lie in a hidden folder next to the store (`data.preparation.work`). Whatever ends a run,
the same command continues it, and the store is renamed to its destination when it is complete: the
destination has a complete store or nothing. Only a store is ever overwritten.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.files.appearing import replace_folder
from data.files.sha256 import sha256_of
from data.files.whole import missing_folders, name_place, remove_empty, write_text
from data.files.writable import require_folder
from data.formats.by_content import Format
from data.hub import LOADED_FROM, matching
from data.preparation.engine import Engine, connected, run_engine
from data.preparation.named_sources import named_sources
from data.preparation.plan import Plan, Settings, plan_of
from data.preparation.room import require_room
from data.preparation.skip_limit import SKIP_LIMIT, require_limit
from data.preparation.work import HeldError, Work
from data.progress import say
from data.readers import SourceError
from data.store import (
    MANIFEST,
    Manifest,
    StoreError,
    is_store,
    tokenizer_named,
    versions,
)

if TYPE_CHECKING:
    from data.tokenization.tokenizer import DocumentTokenizer

VOCAB_SIZE = 2_048
HELDOUT_FRACTION = 0.1
"""For the standard library it holds out some 30 documents of more than 8,192 tokens."""

LEAST_SHARE = 0.5
"""Room for a store as a share of its input, until its tokenizer is known (`data.preparation.room`):
2 bytes for a token of 8, in its part and in the store."""
MERGED = "merged.json"
"""Written when the store is complete, and removed last."""

Source = str | Mapping[str, str] | None
"""One source (`data.readers`), or several by name."""


def prepare(
    source: Source,
    out: Path | str,
    *,
    tokenizer: str | None = None,
    vocab_size: int = VOCAB_SIZE,
    text_key: str = "text",
    first_token: bool = True,
    heldout_fraction: float = HELDOUT_FRACTION,
    seed: int = 0,
    skip_broken: bool = False,
    skip_limit: str = SKIP_LIMIT,
    file_format: Format | None = None,
    skip: Sequence[str] = (),
    overwrite: bool = False,
    engine: Engine | None = None,
) -> Manifest:
    """Write the store of one or more sources and return its manifest.

    Args:
        source: see `data.readers`; several by name.
        tokenizer: folder or name of a Hugging Face tokenizer; without it one is trained on the
            documents that are not held out.
        vocab_size: vocabulary of the tokenizer to train.
        first_token: whether documents begin with the tokens that the tokenizer puts first.
        seed: seed of the hash that chooses the held-out documents.
        skip_limit: broken records that `skip_broken` may skip: a count, or a share such as 1%.
        file_format: of all files; None: that of each by its content.
        skip: patterns of the files that are left out, such as `*.png` or `images/*`.

    Raises:
        ValueError: in one sentence, for a source, tokenizer or destination that cannot be used.
            Then nothing has been replaced.
    """
    _require_options(heldout_fraction, skip_limit)
    place = Path(out).absolute()
    engine = engine or Engine()
    with _preparing(place, overwrite) as work, connected(engine):
        _plan(
            work, place, source, Settings(text_key, heldout_fraction, seed, first_token), tokenizer,
            vocab_size, file_format, skip, skip_broken=skip_broken, skip_limit=skip_limit,
        )  # fmt: skip
        if (manifest := _merged(work, place, overwrite)) is not None:
            return manifest
        from data.preparation.merge import UnfinishedError

        run_engine(work, work.by_size(), engine)
        try:
            return _merge(work, place, overwrite)
        except UnfinishedError as error:
            say(f"{len(error.numbers):,} parts are damaged and are prepared again")
        run_engine(work, work.by_size(), engine)
        return _merge(work, place, overwrite)


def write_plan(
    source: Source,
    out: Path | str,
    *,
    tokenizer: str | None = None,
    vocab_size: int = VOCAB_SIZE,
    text_key: str = "text",
    first_token: bool = True,
    heldout_fraction: float = HELDOUT_FRACTION,
    seed: int = 0,
    skip_broken: bool = False,
    skip_limit: str = SKIP_LIMIT,
    file_format: Format | None = None,
    skip: Sequence[str] = (),
    overwrite: bool = False,
) -> Work:
    """Write the plan and the tokenizer of a store; return the folder in which tasks work."""
    _require_options(heldout_fraction, skip_limit)
    place = Path(out).absolute()
    with _preparing(place, overwrite) as work:
        _plan(
            work, place, source, Settings(text_key, heldout_fraction, seed, first_token), tokenizer,
            vocab_size, file_format, skip, skip_broken=skip_broken, skip_limit=skip_limit,
        )  # fmt: skip
        return work


def run_tasks(folder: Path, first: int, step: int | None, engine: Engine | None = None) -> int:
    """Do one task of a plan, or every `step`-th by size; return how many were left to do.

    A task that has been done is not done again, and several processes may do the same one.
    """
    work = Work.open(folder)
    if not 0 <= first < (step or work.count):
        raise ValueError(
            f"--task {first} is not one of 0 to {(step or work.count) - 1}; {folder} has "
            f"{work.count:,} parts"
        )
    numbers = [first] if step is None else work.by_size()[first::step]
    engine = engine or Engine()
    with connected(engine):
        return run_engine(work, numbers, engine)


def merge_plan(folder: Path, *, overwrite: bool = False) -> Manifest:
    """Merge the parts of a plan to its store; raise ValueError while some are missing."""
    work = Work.open(folder)
    place = work.place
    with _preparing(place, overwrite, planned=True):
        return _merged(work, place, overwrite) or _merge(work, place, overwrite)


def content_hash(text: str, seed: int) -> float:
    """Return a number in [0, 1) that depends on the text and the seed alone."""
    from data.preparation.task import ContentHash

    digest = ContentHash(seed)
    digest.update(text.encode())
    return digest.place()


@contextmanager
def _preparing(place: Path, overwrite: bool, *, planned: bool = False) -> Iterator[Work]:
    """Yield the work folder of a store, held; if nothing is done in it, it is removed on an error.

    It is kept if it was `planned` by a command of its own.

    Raises StoreError for a destination that cannot be used, or one that is being prepared.
    """
    work = Work.of_store(place)
    if not (work.folder / MERGED).exists():
        _require_free(place, overwrite)
    require_folder(place, "the store")
    made = missing_folders(place.parent)
    try:
        with work.held():
            yield work
    except BaseException as error:
        if isinstance(error, HeldError):
            raise
        if not planned and not work.has_parts():
            shutil.rmtree(work.folder, ignore_errors=True)
            remove_empty(made)
        elif not planned:
            with suppress(OSError):
                say(f"finished parts are in {work.folder}; the same command continues with them")
        name_place(error, place, work.folder)
        raise


def _require_options(heldout_fraction: float, skip_limit: str) -> None:
    if not 0 < heldout_fraction < 1:
        raise SourceError(
            f"the held-out fraction is {heldout_fraction}, not between 0 and 1; give one as 0.1"
        )
    require_limit(skip_limit)


def _require_free(place: Path, overwrite: bool) -> None:
    if not place.exists() and not place.is_symlink():
        return
    if not place.is_dir() or place.is_symlink():
        raise StoreError(f"{place} exists and is not a folder; choose another folder for the store")
    if not any(place.iterdir()):
        return
    if not is_store(place):
        raise StoreError(
            f"{place} exists and is not a store; only a store is ever overwritten, so"
            " name another folder"
        )
    if not overwrite:
        raise StoreError(f"{place} exists; `--overwrite` replaces it once the new store is whole")


def _plan(
    work: Work,
    place: Path,
    source: Source,
    settings: Settings,
    tokenizer: str | None,
    vocab_size: int,
    file_format: Format | None,
    skip: Sequence[str],
    **facts: Any,
) -> None:
    """Write the plan and the tokenizer, unless those of the same plan are there."""
    of_tokenizer = _tokenizer_facts(tokenizer, vocab_size)
    plan = plan_of(named_sources(source), settings, of_tokenizer, file_format, skip)
    facts["store"] = place.name
    if work.is_planned and _is_same(work, plan):
        work.write_plan(plan, tokenizer_facts=work.facts["tokenizer_facts"], **facts)
        return
    require_folder(place, "the store", room=LEAST_SHARE * plan.cost)
    work.forget_plan()
    chosen = _tokenizer(plan, tokenizer, vocab_size, facts["skip_broken"])
    shutil.rmtree(work.tokenizer, ignore_errors=True)
    stored = chosen.save(work.tokenizer)
    chosen.write(work.folder / "encoder.json")
    require_room(place, plan, chosen, done_bytes=work.bytes_of_parts())
    work.write_plan(plan, tokenizer_facts=asdict(stored), **facts)


def _is_same(work: Work, plan: Plan) -> bool:
    return work.facts["sha256"] == plan.sha256 and work.facts["versions"] == versions()


def _tokenizer_facts(name: str | None, vocab_size: int) -> dict[str, Any]:
    """Return what a plan says of its tokenizer: a folder whose files change is another one."""
    if name is None:
        return {"train": vocab_size}
    folder = Path(tokenizer_named(name))
    files = matching(folder, LOADED_FROM)
    names = (path.relative_to(folder).as_posix() for path in files)
    return {"load": name, "files": dict(zip(names, sha256_of(files), strict=True))}


def _tokenizer(
    plan: Plan, name: str | None, vocab_size: int, skip_broken: bool
) -> "DocumentTokenizer":
    """Return the tokenizer of a plan.

    A source whose first document cannot be read is refused before a tokenizer is loaded.
    """
    from data.preparation.sample import require_first_document, training_texts

    if name is not None:
        require_first_document(plan, skip_broken=skip_broken)
        from data.tokenization.tokenizer import load

        say(f"loading the tokenizer {name}")
        loaded = load(name)
        return loaded if plan.settings.first_token else replace(loaded, first_ids=())
    from data.tokenization.tokenizer import require_vocab_size, train

    require_vocab_size(vocab_size)
    named = " and ".join(source.origin for source in plan.sources)
    say(f"reading {named} to train a tokenizer of {vocab_size:,} tokens")
    return train(training_texts(plan, skip_broken=skip_broken), vocab_size)


def _merge(work: Work, place: Path, overwrite: bool) -> Manifest:
    """Write the store of a plan, move it to its destination, and remove the parts."""
    from data.preparation.merge import merge

    manifest = merge(work)
    for example in skipped_examples(work):
        say(f"skipped {example}")
    facts = {"plan": work.facts["sha256"], "manifest": _manifest_sha256(work.store)}
    write_text(work.folder / MERGED, json.dumps(facts) + "\n")
    _require_free(place, overwrite)
    _move(work, place)
    _remove(work)
    return replace(manifest, root=place)


def skipped_examples(work: Work, most: int = 5) -> Sequence[str]:
    """Return some of the records that were skipped, with place and problem."""
    receipts = (work.receipt(number) for number in range(work.count))
    examples = [line for receipt in receipts if receipt is not None for line in receipt.examples]
    return examples[:most]


def _merged(work: Work, place: Path, overwrite: bool) -> Manifest | None:
    """Return the store of a plan if it is at its destination already, and remove its parts."""
    try:
        facts = json.loads((work.folder / MERGED).read_text(encoding="utf-8"))
        is_there = _manifest_sha256(place) == facts["manifest"]
    except (OSError, ValueError, KeyError):
        is_there = False
    if is_there and facts["plan"] == work.facts["sha256"]:
        _remove(work)
        return Manifest.load(place)
    (work.folder / MERGED).unlink(missing_ok=True)
    _require_free(place, overwrite)
    return None


def _manifest_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def _move(work: Work, place: Path) -> None:
    """Move a complete store to its destination; the old one is removed."""
    replace_folder(work.store, place, work.folder / "old")


def _remove(work: Work) -> None:
    """Remove the work folder, what says that it is done with last."""
    for path in work.folder.iterdir():
        if path.name not in ("plan.json", "shards.jsonl", "encoder.json", MERGED):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    for name in ("encoder.json", "shards.jsonl", "plan.json", MERGED):
        (work.folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        work.folder.rmdir()
