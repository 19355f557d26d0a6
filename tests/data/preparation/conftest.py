# SPDX-License-Identifier: Apache-2.0
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data.formats import jsonl
from data.preparation import plan, task
from data.prepare import prepare
from data.store import Manifest

SHARD_BYTES = 4000
"""Bytes of a shard in these tests, so that little text makes many."""


def contents(store: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a store, by its path."""
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setattr(task, "BATCH_CHARS", 1500)


@pytest.fixture
def long_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read lines of more than 1,000 bytes in chunks."""
    monkeypatch.setattr(jsonl, "LONG_BYTES", 1000)


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> dict[str, str]:
    """Return two sources: a folder with files of several formats, and a JSONL file."""
    import gzip

    import pyarrow as pa
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("sources")
    web = folder / "web"
    web.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (web / "a.jsonl").write_text("".join(lines[:40]) + "\n" + json.dumps({"text": ""}) + "\n")
    (web / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[40:60]).encode(), mtime=0))
    parquet.write_table(pa.table({"text": texts[60:90]}), web / "c.parquet", row_group_size=8)
    for number, text in enumerate(texts[90:100]):
        (web / f"d{number}.txt").write_text(text)
    code = folder / "code.jsonl"
    code.write_text("".join(lines[20:]) + json.dumps({"text": "\n".join(texts)}) + "\n")
    return {"web": str(web), "code": str(code)}


@pytest.fixture(scope="session")
def tokenizer_folder(shared_store: Manifest) -> str:
    return str(shared_store.tokenizer_path)


@pytest.fixture
def make(mixed: dict[str, str], tokenizer_folder: str, tmp_path: Path) -> Callable[..., Manifest]:
    """Return a function that prepares the two sources."""

    def made(name: str = "store", **options: object) -> Manifest:
        return prepare(
            mixed, tmp_path / name, tokenizer=tokenizer_folder, heldout_fraction=0.3,
            **options,  # type: ignore[arg-type]
        )  # fmt: skip

    return made


@pytest.fixture(scope="session")
def reference(
    mixed: dict[str, str], tokenizer_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Manifest:
    """Return the store of the two sources, made in one process with one shard for each."""
    place = tmp_path_factory.mktemp("reference") / "store"
    return prepare(mixed, place, tokenizer=tokenizer_folder, heldout_fraction=0.3)
