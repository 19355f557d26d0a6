# SPDX-License-Identifier: Apache-2.0
"""Input that cannot be used is named with its place, and skipped and counted only when asked."""

import json
import re
import resource
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data.files.whole import chain
from data.preparation import plan, room, task, token_files
from data.preparation.engine import Engine
from data.preparation.named_sources import parsed_sources
from data.preparation.plan import Settings, plan_of
from data.prepare import prepare, run_tasks, write_plan
from data.readers import SourceError
from data.store import StoreError
from data.tokenization.encoder import Encoder
from tests.data.preparation.conftest import contents


class Disk(NamedTuple):
    """What `shutil.disk_usage` returns."""

    free: int


@pytest.fixture
def broken(tmp_path, texts):
    """Return a file of several shards with a broken line in its last one."""
    lines = [json.dumps({"text": text}) for text in texts]
    lines[100] = '{"text": "open'
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(lines) + "\n")
    return path


def made(source, tmp_path, tokenizer_folder, **options):
    return prepare(
        str(source), tmp_path / "out" / "store", tokenizer=tokenizer_folder, heldout_fraction=0.3,
        **options,
    )  # fmt: skip


def test_a_broken_line_is_named_by_its_number_in_the_whole_file(
    broken, tmp_path, tokenizer_folder, capsys
):
    with pytest.raises(SourceError, match=r"a\.jsonl:101: invalid JSON .* --skip-broken"):
        made(broken, tmp_path, tokenizer_folder)
    assert "the same command continues" in capsys.readouterr().err
    manifest = made(broken, tmp_path, tokenizer_folder, skip_broken=True)
    assert manifest.skipped == {"broken": 1}
    assert re.search(r"skipped .*a\.jsonl:101: invalid JSON", capsys.readouterr().err)


def test_a_text_key_that_no_record_has_is_answered_before_a_tokenizer_is_loaded(broken, tmp_path):
    for tokenizer in (str(tmp_path / "gone"), None):
        with pytest.raises(SourceError, match=r"a\.jsonl:1: no field 'body'; .* --text-key text$"):
            prepare(str(broken.parent), tmp_path / "s", tokenizer=tokenizer, text_key="body")


def test_after_a_file_is_corrected_only_its_shards_are_done_again(
    broken, tmp_path, tokenizer_folder, monkeypatch
):
    other = broken.parent / "0.jsonl"
    other.write_text(broken.read_text().partition('{"text": "open')[0])
    done = []
    run = task._Task.run

    def noted(of):
        done.append({Path(piece.path).name for piece in of.work.shard(of.number).pieces})
        return run(of)

    monkeypatch.setattr(task._Task, "run", noted)
    with pytest.raises(SourceError):
        made(broken.parent, tmp_path, tokenizer_folder)
    of_other = done.count({other.name})
    assert of_other > 2
    broken.write_text(broken.read_text().replace('"open', '"closed"}'))
    manifest = made(broken.parent, tmp_path, tokenizer_folder)
    planned = plan_of([("documents", str(broken.parent))], Settings("text", 0.3, 0), {})
    names = [{Path(piece.path).name for piece in shard.pieces} for shard in planned.shards]
    assert done.count({other.name}) == names.count({other.name})
    assert manifest.train.documents + manifest.heldout.documents == 220


def test_more_broken_records_than_the_limit_end_the_run_and_a_higher_limit_continues_it(
    tmp_path, texts, tokenizer_folder
):
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join([*good, *["[]"] * 120]))
    with pytest.raises(SourceError, match=r"records are broken so far, more than --skip-limit 5 "):
        made(path, tmp_path, tokenizer_folder, skip_broken=True, skip_limit="5")
    with pytest.raises(SourceError, match=r"120 of 240 records are broken, more than --skip-limit"):
        made(path, tmp_path, tokenizer_folder, skip_broken=True)
    with pytest.raises(SourceError, match=r"a\.jsonl:121: not a JSON object"):
        made(path, tmp_path, tokenizer_folder)
    for limit in ("120", "50%"):
        manifest = made(
            path, tmp_path, tokenizer_folder, skip_broken=True, skip_limit=limit, overwrite=True
        )
        assert manifest.skipped == {"broken": 120}
    for limit in ("1.5", "many", "101%", "-1"):
        with pytest.raises(ValueError, match=r"--skip-limit .* is not a number of records"):
            made(path, tmp_path, tokenizer_folder, skip_broken=True, skip_limit=limit)


def test_a_file_that_changes_during_the_work_is_refused(tmp_path, corpus, tokenizer_folder):
    path = tmp_path / "a.jsonl"
    path.write_bytes(corpus.read_bytes())
    work = write_plan(str(path), tmp_path / "s", tokenizer=tokenizer_folder, heldout_fraction=0.2)
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl has changed since the plan was made"):
        run_tasks(work.folder, 0, 1)


def test_a_column_is_looked_for_in_every_file_before_the_work(tmp_path, texts, tokenizer_folder):
    folder = tmp_path / "in"
    folder.mkdir()
    parquet.write_table(pa.table({"text": texts}), folder / "a.parquet")
    parquet.write_table(pa.table({"body": texts, "id": range(len(texts))}), folder / "b.parquet")
    with pytest.raises(SourceError, match=r"b\.parquet: no column 'text'; the file has body, id"):
        made(folder, tmp_path, tokenizer_folder)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_disk_that_fills_is_named_and_the_same_command_continues(
    tmp_path, texts, tokenizer_folder, monkeypatch
):
    monkeypatch.setattr(plan, "SHARD_BYTES", 2**20)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text * 8}) + "\n" for text in texts))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # of one file: as a full disk
    try:
        with pytest.raises(OSError, match="File too large") as full:
            made(path, tmp_path, tokenizer_folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    named = [link.filename for link in chain(full.value) if isinstance(link, OSError)]
    assert named == [str(tmp_path / "out" / "store")]
    continued = made(path, tmp_path, tokenizer_folder)
    again = prepare(str(path), tmp_path / "b", tokenizer=tokenizer_folder, heldout_fraction=0.3)
    assert contents(continued.root) == contents(again.root)


@pytest.mark.parametrize("sample_bytes", [2**17, 300])  # 300 cut a line
def test_room_for_parts_and_store_is_measured_before_the_work(
    tmp_path, texts, tokenizer_folder, monkeypatch, sample_bytes
):
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    lines = [json.dumps({"id": "not text " * 8, "text": f"\u4e2d\U0001f600 {t}"}) for t in texts]
    path.write_text("\n".join(lines) + "\n")
    (path.parent / "b.txt").write_text("\n".join(texts))
    (path.parent / "c.txt").write_bytes(b"\xff" * 50)
    store = made(path.parent, tmp_path, tokenizer_folder, skip_broken=True)
    splits = (store.train, store.heldout)
    written = 2 * sum(file.bytes for split in splits for part in split.parts for file in part.bins)
    monkeypatch.setattr(room, "SAMPLE_BYTES", sample_bytes)
    monkeypatch.setattr("data.prepare.LEAST_SHARE", 0.0)
    options = {"skip_broken": True, "overwrite": True}
    free = {"at least": written // 2, "enough": 2 * written}
    for words, bytes_free in free.items():
        monkeypatch.setattr(room.shutil, "disk_usage", lambda _, free=bytes_free: Disk(free))
        if words == "enough":
            assert made(path.parent, tmp_path, tokenizer_folder, **options) == store
            continue
        with pytest.raises(ValueError, match=r"the store .* of 2 bytes, .* are written twice"):
            made(path.parent, tmp_path, tokenizer_folder, **options)
        assert [one.name for one in (tmp_path / "out").iterdir()] == ["store"]


def test_a_worker_s_error_is_raised_as_it_was_in_it(broken, tmp_path, tokenizer_folder):
    with pytest.raises(SourceError, match=r"a\.jsonl:101: invalid JSON"):
        made(broken, tmp_path, tokenizer_folder, engine=Engine(workers=2))


def test_a_document_of_more_tokens_than_an_index_can_hold_is_named(
    tmp_path, texts, tokenizer_folder, monkeypatch, long_lines
):
    monkeypatch.setattr(token_files, "LONGEST", 500)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "\n".join(texts)}) + "\n")
    with pytest.raises(SourceError, match=r"a\.jsonl:1: more than 499 tokens in one document"):
        made(path, tmp_path, tokenizer_folder)


def test_long_records_are_judged_as_short_ones(tmp_path, texts, tokenizer_folder, monkeypatch):
    rows = [texts[0] * 9, " " * 3000, "\ud800" + "x" * 3000, *texts[1:60], "y" * 3000]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    short = made(path, tmp_path, tokenizer_folder, skip_broken=True)
    monkeypatch.setattr("data.formats.jsonl.LONG_BYTES", 800)
    monkeypatch.setattr(task, "LONG_CHARS", 100)
    long = prepare(
        str(path), tmp_path / "long", tokenizer=tokenizer_folder, heldout_fraction=0.3,
        skip_broken=True,
    )  # fmt: skip
    assert short.skipped == long.skipped == {"broken": 1, "empty": 1}
    assert contents(long.root) == contents(short.root)


def test_another_release_of_tokenizers_is_refused(tmp_path, corpus, tokenizer_folder, monkeypatch):
    work = write_plan(str(corpus), tmp_path / "s", tokenizer=tokenizer_folder)
    monkeypatch.setattr("data.preparation.work.versions", lambda: {"tokenizers": "9.9"})
    with pytest.raises(StoreError, match=r"and this environment has 9\.9; use one environment"):
        run_tasks(work.folder, 0, 1)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["a=x", "a=y"], "two sources have the name a: --source a=x and --source a=y; give each"),
        (["a="], "--source a= names no documents; write --source a=PATH"),
        (["a=x", "y"], "--source y is one of several and has no name"),
        (["Web=."], "'Web' cannot name a source"),
    ],
)
def test_sources_that_cannot_be_told_apart_are_refused(words, problem):
    with pytest.raises(SourceError, match=problem):
        parsed_sources(words)


def test_a_path_with_an_equals_sign_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shard=1").mkdir()
    assert parsed_sources(["shard=1"]) == "shard=1"
    assert parsed_sources(["shard=2"]) == {"shard": "2"}
    assert parsed_sources(["web=a", "code=b"]) == {"web": "a", "code": "b"}
    assert parsed_sources(["only/path"]) == "only/path"
    assert parsed_sources([]) is None


def test_ids_of_a_text_in_chunks_are_those_of_the_whole(tokenizer, texts, tmp_path):
    text = "\n".join(texts) + "x" * 5000 + " ".join(texts)
    whole = tokenizer.encode_documents([text])[0]
    tokenizer.write(tmp_path / "encoder.json")
    loaded = Encoder.load(tmp_path / "encoder.json")
    assert loaded.sha256 == tokenizer.sha256
    for size in (1, 100, 4096, len(text)):
        chunks = (text[at : at + size] for at in range(0, len(text), size))
        assert np.array_equal(np.concatenate(list(loaded.encode_long(chunks))), whole)
