# SPDX-License-Identifier: Apache-2.0
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from data.long_range.spec import Spec
from data.preparation.engine import Engine
from data.preparation.plan import Settings, plan_of
from data.prepare import prepare, write_plan
from data.readers import SourceError
from data.sources import absolute, documents, kind_of, numbered, path_of
from data.store import Manifest
from data.token_files.held_out import long_documents
from data.tokenization.tokenizer import DocumentTokenizer


def test_each_source_has_its_kind() -> None:
    assert kind_of(None) == kind_of("books.jsonl") == kind_of("hf:name") == "documents"
    assert kind_of("synthetic:copy") == "synthetic"
    assert kind_of("repositories:code") == "repositories"


def test_numbered_sources_are_read_in_the_order_of_their_numbers(
    tokenizer: DocumentTokenizer, corpus: Path
) -> None:
    name = f"synthetic:retrieval,length=1K,documents=5,filler={corpus}"
    source = numbered(name, tokenizer.count)
    assert source.kind == "synthetic"
    assert [made.text for made in documents(name, count=tokenizer.count)] == [
        source.document(n, Counter()).text for n in range(5)
    ]


def test_other_sources_are_read_as_before(corpus: Path, texts: list[str]) -> None:
    assert [made.text for made in documents(str(corpus))] == texts


def test_a_repository_without_text_is_counted_and_a_source_without_any_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "all" / "a").mkdir(parents=True)
    (tmp_path / "all" / "b").mkdir()
    (tmp_path / "all" / "b" / "b.py").write_text("b = 1\n")
    skipped = Counter[str]()
    name = f"repositories:{tmp_path / 'all'}"
    assert [made.text for made in documents(name, skipped=skipped)] == ["# b.py\nb = 1\n"]
    assert skipped == {"empty": 1}
    (tmp_path / "all" / "b" / "b.py").unlink()
    with pytest.raises(SourceError, match="holds no document with text"):
        list(documents(name))


def test_a_store_of_synthetic_documents_has_their_length_and_text(
    tmp_path: Path, shared_store: Manifest, tokenizer: DocumentTokenizer
) -> None:
    name = "synthetic:retrieval,length=1K,documents=20,keys=8,form=code"
    made = prepare(
        name, tmp_path / "store", tokenizer=str(shared_store.tokenizer_path), heldout_fraction=0.3
    )
    assert made.source == numbered(name).origin
    assert made.sources[0].kind == "synthetic"
    assert made.train.documents + made.heldout.documents == 20
    stored = [
        tokens
        for split in ("train", "heldout")
        for tokens in long_documents(made, min_tokens=1, split=split)
    ]
    assert all(1024 - 32 <= len(tokens) <= 1024 for tokens in stored)


def test_a_synthetic_store_needs_a_tokenizer_and_leaves_nothing_without(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --tokenizer"):
        prepare("synthetic:retrieval", tmp_path / "store", vocab_size=300)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_source_is_refused_before_a_tokenizer_is_loaded(tmp_path: Path) -> None:
    for name, sentence in (
        ("synthetic:nothing", "'nothing' is not a kind"),
        (f"synthetic:copy,filler={tmp_path / 'none'}", "none does not exist"),
        (f"repositories:{tmp_path / 'none'}", "does not name a folder"),
    ):
        with pytest.raises(ValueError, match=sentence):
            prepare(name, tmp_path / "store", tokenizer=str(tmp_path / "no_tokenizer"))


def test_paths_of_a_job_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code" / "one").mkdir(parents=True)
    (tmp_path / "books.jsonl").write_text(json.dumps({"text": "a"}))
    assert absolute("repositories:code") == f"repositories:{tmp_path}/code"
    for filler, whole in (
        ("books.jsonl", f"{tmp_path}/books.jsonl"),
        ("repositories:code", f"repositories:{tmp_path}/code"),
        ("hf:books", "hf:books"),
    ):
        assert Spec.parse(absolute(f"synthetic:copy,filler={filler}")).filler == whole
    assert Spec.parse(absolute("synthetic:copy,length=8K")) == Spec.parse(
        "synthetic:copy,length=8K"
    )


def test_the_path_that_a_source_reads_is_known() -> None:
    assert path_of("/a/b.jsonl") == path_of("repositories:/a/b.jsonl") == "/a/b.jsonl"
    assert path_of("synthetic:copy,filler=/a/b.jsonl") == "/a/b.jsonl"
    assert path_of("synthetic:copy,filler=repositories:/code") == "/code"
    assert path_of("synthetic:copy,filler=hf:acme/books") is None
    assert path_of("synthetic:copy") is path_of("hf:acme/books") is None


def test_a_numbered_source_is_made_in_shards_by_any_process(
    tmp_path: Path, shared_store: Manifest, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "made": f"synthetic:retrieval,length=1K,documents=30,filler={corpus}",
        "text": str(corpus),
    }
    options = {"tokenizer": str(shared_store.tokenizer_path), "heldout_fraction": 0.3}
    whole = prepare(sources, tmp_path / "whole", **options)
    monkeypatch.setattr("data.preparation.plan.MADE_BYTES", 9000)
    work = write_plan(sources, tmp_path / "parts", **options)
    ranges = [shard.pieces[0] for shard in work.plan.shards if shard.source == "made"]
    assert len(ranges) > 2
    assert [piece.start for piece in ranges] == [0, *(piece.stop for piece in ranges[:-1])]
    parts = prepare(sources, tmp_path / "parts", engine=Engine(workers=2), **options)
    assert [source.kind for source in parts.sources] == ["synthetic", "documents"]
    for split in ("train", "heldout"):
        assert parts.split(split) == whole.split(split)


def test_a_million_documents_are_planned_as_a_few_ranges() -> None:
    source = "synthetic:copy,length=1K,documents=1000000"
    planned = plan_of([("made", source)], Settings("text", 0.3, 0), {})
    pieces = [piece for shard in planned.shards for piece in shard.pieces]
    assert 1000 < len(pieces) == len(planned.shards) <= 4097
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == 10**6
    assert planned.cost == 10**6 * numbered(source).size(0)


def test_a_plan_has_the_absolute_paths_of_its_sources(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code" / "one").mkdir(parents=True)
    (tmp_path / "a.jsonl").write_bytes(corpus.read_bytes())
    here = ["a.jsonl", "code", "repositories:code", "synthetic:copy,filler=a.jsonl", "hf:a/b"]
    whole = [word.replace("code", f"{tmp_path}/code") for word in here]
    whole = [word.replace("a.jsonl", f"{tmp_path}/a.jsonl") for word in whole]
    monkeypatch.chdir(tmp_path)
    plans = [
        plan_of([(f"s{at}", word) for at, word in enumerate(words)], Settings("text", 0.3, 0), {})
        for words in (here, whole)
    ]
    assert plans[0].sha256 == plans[1].sha256
    origins = [source.origin for source in plans[0].sources]
    assert origins == [*whole[:3], str(Spec.parse(whole[3])), "hf:a/b"]


def test_a_store_of_a_kind_that_is_gone_is_read(tmp_path: Path, shared_store: Manifest) -> None:
    shutil.copytree(shared_store.root, tmp_path / "old")
    origin = "synthetic:questions,length=4096,documents=120,seed=0,queries=1"
    (source,) = shared_store.sources
    of_before = replace(source, kind="synthetic", origin=origin)
    replace(shared_store, root=tmp_path / "old", sources=(of_before,)).write()
    old = Manifest.load(tmp_path / "old")
    assert (old.source, old.sources[0].kind) == (origin, "synthetic")
    assert len(list(long_documents(old, min_tokens=1))) == shared_store.heldout.documents
