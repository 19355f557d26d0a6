# SPDX-License-Identifier: Apache-2.0
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import AutoTokenizer
from typer.testing import CliRunner

from data import prepare as preparing
from data.prepare import prepare
from data.readers import SourceError
from data.store import SPLITS, Manifest, StoreError
from longhaul.commands.prepare import prepare as command


def decoded(manifest: Manifest, split: str) -> list[str]:
    """Texts of a split, read by Megatron and turned back by transformers; eod ids cut off."""
    tokenizer = AutoTokenizer.from_pretrained(str(manifest.tokenizer_path))
    stored = IndexedDataset(str(manifest.prefixes(split)[0]))
    for tokens in stored:
        assert tokens[-1] == manifest.tokenizer.eod_id
        assert manifest.tokenizer.eod_id not in tokens[:-1]
    return [tokenizer.decode(tokens[:-1]) for tokens in stored]


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_megatron_reads_every_document_once_and_in_order(
    shared_store: Manifest, texts: list[str]
) -> None:
    train, heldout = (decoded(shared_store, split) for split in SPLITS)
    assert [text for text in texts if text in set(train)] == train
    assert sorted(train + heldout) == sorted(texts)
    assert not set(train) & set(heldout)


def test_the_manifest_counts_what_megatron_counts(shared_store: Manifest) -> None:
    for name in SPLITS:
        split = shared_store.split(name)
        stored = IndexedDataset(str(shared_store.prefixes(name)[0]))
        assert split.documents == len(stored) == len(stored.document_indices) - 1
        assert split.tokens == int(stored.sequence_lengths.sum())
        assert split.longest == int(stored.sequence_lengths.max())
        assert sum(bucket.documents for bucket in split.lengths) == split.documents
        assert sum(bucket.tokens for bucket in split.lengths) == split.tokens


def test_the_split_does_not_depend_on_the_order_of_the_source(
    tmp_path: Path, shared_store: Manifest, texts: list[str]
) -> None:
    backwards = write_jsonl(tmp_path / "backwards.jsonl", texts[::-1])
    other = prepare(backwards, tmp_path / "store", vocab_size=400, heldout_fraction=0.2)
    assert sorted(decoded(other, "heldout")) == sorted(decoded(shared_store, "heldout"))
    assert other.tokenizer == shared_store.tokenizer


def test_the_seed_changes_the_split(texts: list[str]) -> None:
    held_out = [
        [text for text in texts if preparing.content_hash(text, seed) < 0.2] for seed in (0, 0, 1)
    ]
    assert held_out[0] == held_out[1] != held_out[2]
    assert all(10 < len(chosen) < 40 for chosen in held_out)


def test_the_same_source_gives_the_same_bytes(
    tmp_path: Path, shared_store: Manifest, corpus: Path
) -> None:
    again = prepare(str(corpus), tmp_path / "store", vocab_size=400, heldout_fraction=0.2)
    first = {path.name: path.read_bytes() for path in shared_store.root.rglob("*.*")}
    assert {path.name: path.read_bytes() for path in again.root.rglob("*.*")} == first
    assert again.root != shared_store.root


def test_copies_of_a_text_land_in_one_split(tmp_path: Path, texts: list[str]) -> None:
    source = write_jsonl(tmp_path / "twice.jsonl", texts + texts)
    manifest = prepare(source, tmp_path / "store", vocab_size=300, heldout_fraction=0.2)
    train, heldout = (decoded(manifest, split) for split in SPLITS)
    assert len(train) + len(heldout) == 2 * len(texts)
    assert not set(train) & set(heldout)


def test_a_store_made_with_a_given_tokenizer_has_its_fingerprint_and_tokens(
    tmp_path: Path, shared_store: Manifest, texts: list[str]
) -> None:
    source = write_jsonl(tmp_path / "some.jsonl", texts[:40])
    manifest = prepare(
        source,
        tmp_path / "store",
        tokenizer=str(shared_store.tokenizer_path),
        heldout_fraction=0.2,
    )
    assert manifest.tokenizer.fingerprint == shared_store.tokenizer.fingerprint
    assert set(decoded(manifest, "heldout")) <= set(decoded(shared_store, "heldout"))


def test_an_empty_split_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "one.jsonl", ["the only document"])
    with pytest.raises(SourceError, match=r"the heldout split .* is empty: the source has 1 doc"):
        prepare(source, tmp_path / "store", heldout_fraction=0.01)
    with pytest.raises(SourceError, match=r"the train split .* is empty"):
        prepare(source, tmp_path / "store", heldout_fraction=0.99)
    assert [path.name for path in tmp_path.iterdir()] == ["one.jsonl"]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
def test_a_fraction_that_is_none_is_refused(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(SourceError, match="not between 0 and 1"):
        prepare(None, tmp_path / "store", heldout_fraction=fraction)


def test_broken_lines_are_counted_in_the_manifest(tmp_path: Path, texts: list[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*texts[:40], ""])
    with Path(source).open("a") as file:
        file.write('{"text": 1}\nnot JSON\n')
    with pytest.raises(SourceError, match=r"a\.jsonl:42: "):
        prepare(source, tmp_path / "store", vocab_size=300)
    assert not (tmp_path / "store").exists()
    manifest = prepare(source, tmp_path / "store", vocab_size=300, skip_broken=True)
    assert manifest.skipped == {"empty": 1, "broken": 2}


def test_an_existing_store_is_replaced_only_when_asked_and_only_by_a_whole_one(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(str(corpus), tmp_path / "store", vocab_size=300, heldout_fraction=0.2)
    with pytest.raises(StoreError, match="--overwrite"):
        prepare(str(corpus), tmp_path / "store", vocab_size=310)

    with monkeypatch.context() as patch:

        def stop(self: Manifest) -> None:
            raise KeyboardInterrupt

        patch.setattr(Manifest, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(str(corpus), tmp_path / "store", vocab_size=310, overwrite=True)
    assert Manifest.load(tmp_path / "store") == first

    second = prepare(
        str(corpus), tmp_path / "store", vocab_size=310, heldout_fraction=0.2, overwrite=True
    )
    assert Manifest.load(tmp_path / "store") == second != first
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_folder_that_is_no_store_is_never_overwritten(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    (tmp_path / "home" / "manifest.json").write_text('{"name": "of something else"}')
    with pytest.raises(StoreError, match="is not a store"):
        prepare(str(corpus), tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"


def test_a_run_killed_before_its_manifest_leaves_no_store(tmp_path: Path, corpus: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from data.prepare import prepare\n"
        "from data.store import Manifest\n"
        "Manifest.write = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare(sys.argv[1], sys.argv[2], vocab_size=300)\n"
    )
    place = tmp_path / "store"
    killed = subprocess.run([sys.executable, "-c", program, str(corpus), str(place)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not place.exists()
    assert list(tmp_path.glob(".store.preparing/parts/*/*.train.bin"))
    with pytest.raises(StoreError, match="no store"):
        Manifest.load(place)
    with pytest.raises(StoreError, match="never finished"):
        Manifest.load(tmp_path / ".store.preparing" / "store")
    assert prepare(str(corpus), place, vocab_size=300) == Manifest.load(place)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_bad_source_is_refused_before_the_tokenizer_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        prepare(str(tmp_path / "nothing"), tmp_path / "store", tokenizer="no/such-tokenizer")


def test_the_command_prints_lengths_counts_and_place(tmp_path: Path, corpus: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    arguments = ["--source", str(corpus), "--vocab-size", "300", "--heldout-fraction", "0.2"]
    answer = CliRunner().invoke(app, ["--out", str(tmp_path / "store"), *arguments])
    manifest = Manifest.load(tmp_path / "store")
    assert answer.exit_code == 0, answer.output
    assert f"train: {manifest.train.documents:,} documents" in answer.output
    assert f"held out: {manifest.heldout.documents:,} documents" in answer.output
    for bucket in manifest.train.lengths:
        assert f"| {bucket.at_least:,} to {2 * bucket.at_least - 1:,} " in answer.output
    given = [*arguments, "--tokenizer", str(manifest.tokenizer_path), "--overwrite"]
    refused = CliRunner().invoke(app, ["--out", str(tmp_path / "store"), *given])
    assert isinstance(refused.exception, ValueError)
    assert "--vocab-size" in str(refused.exception)
