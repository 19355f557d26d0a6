# SPDX-License-Identifier: Apache-2.0
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from data.splits import Split
from data.store import (
    Manifest,
    StoreError,
    require_rows,
    require_tokenizer,
    tokenizer_fingerprint,
)
from data.token_files.held_out import long_documents


@pytest.fixture
def store(tmp_path: Path, shared_store: Manifest) -> Path:
    return Path(shutil.copytree(shared_store.root, tmp_path / "store"))


def change_manifest(store: Path, change: Callable[[dict], object]) -> None:
    content = json.loads((store / "manifest.json").read_text())
    del content["own_sha256"]  # as in a store of an earlier version
    change(content)
    (store / "manifest.json").write_text(json.dumps(content))


def part_of(content: dict, split: str = "train") -> dict:
    return content["splits"][split]["parts"][0]


def test_a_number_that_a_flipped_bit_made_another_is_damage(store: Path) -> None:
    text = (store / "manifest.json").read_text()
    (store / "manifest.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(StoreError, match=r"manifest\.json is damaged: its SHA-256 differs"):
        Manifest.load(store)


def test_a_loaded_manifest_is_the_one_that_was_written(shared_store: Manifest) -> None:
    loaded = Manifest.load(shared_store.root)
    assert loaded == shared_store
    assert loaded.prefixes("train") == (shared_store.root / "train",)


def test_a_manifest_of_version_1_is_read_as_a_store_of_one_source(store: Path) -> None:
    def to_version_1(content: dict) -> None:
        content.update(version=1, source=content.pop("sources")[0]["origin"])
        for name, split in content["splits"].items():
            (part,) = split["parts"]
            (part["bin"],) = part.pop("bins")
            content["splits"][name] = {key: part[key] for key in part if key != "source"}

    written = Manifest.load(store)
    change_manifest(store, to_version_1)
    (source,) = written.sources
    assert source.sha256 is not None
    assert Manifest.load(store) == replace(written, sources=(replace(source, sha256=None),))


def test_a_manifest_of_version_2_has_one_token_file_for_each_index(store: Path) -> None:
    def to_version_2(content: dict) -> None:
        content.update(version=2)
        for split in content["splits"].values():
            for part in split["parts"]:
                (part["bin"],) = part.pop("bins")

    written = Manifest.load(store)
    change_manifest(store, to_version_2)
    assert Manifest.load(store) == written


def test_a_split_of_two_sources_adds_up_to_both(shared_store: Manifest) -> None:
    (train,), (heldout,) = shared_store.train.parts, shared_store.heldout.parts
    both = Split(parts=(train, replace(heldout, source="other")))
    assert both.documents == train.documents + heldout.documents
    assert both.tokens == sum(bucket.tokens for bucket in both.lengths)
    assert both.longest == max(train.longest, heldout.longest)
    assert both.sha256 not in (train.bins[0].sha256, heldout.bins[0].sha256)
    with pytest.raises(StoreError, match="of the source 'other'; the manifest lists documents"):
        replace(shared_store, train=both)
    with pytest.raises(StoreError, match="one of each"):
        Split(parts=(train, train))


def test_a_vocabulary_that_does_not_fit_a_model_is_answered_with_what_does(
    shared_store: Manifest,
) -> None:
    require_rows(shared_store, 400)
    with pytest.raises(StoreError, match=r"ids up to 399 .* 300 rows; .* with --vocab-size 300$"):
        require_rows(shared_store, 300)
    other = replace(shared_store, tokenizer=replace(shared_store.tokenizer, name="owner/model"))
    with pytest.raises(StoreError, match=r"with the model's tokenizer, by --tokenizer$"):
        require_rows(other, 300)


def test_a_missing_folder_and_a_missing_manifest_are_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        Manifest.load(tmp_path / "elsewhere")
    (store / "manifest.json").unlink()
    (store / "manifest.json").mkdir()
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read: is a directory; give"):
        Manifest.load(store)
    (store / "manifest.json").rmdir()
    with pytest.raises(StoreError, match="never finished"):
        Manifest.load(store)


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "heldout.bin", "heldout.idx"])
def test_a_truncated_file_is_refused_with_both_sizes(store: Path, name: str) -> None:
    content = (store / name).read_bytes()
    (store / name).write_bytes(content[:-2])
    with pytest.raises(StoreError, match=name) as error:
        Manifest.load(store)
    assert f"{len(content) - 2:,} bytes where {len(content):,} were written" in str(error.value)


@pytest.mark.parametrize("name", ["train.bin", "heldout.idx", "tokenizer/tokenizer.json"])
def test_a_lost_file_is_refused(store: Path, name: str) -> None:
    (store / name).unlink()
    with pytest.raises(StoreError, match="has lost"):
        Manifest.load(store)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda c: c.update(version=99), "format version 99", id="version"),
        pytest.param(lambda c: c.update(format="x"), "not the manifest of", id="format"),
        pytest.param(
            lambda c: c["sources"][0].update(name="../x"), "source name '../x' has", id="name"
        ),
        pytest.param(lambda c: c["sources"][0].update(kind="x"), "is 'x', not one of", id="kind"),
        pytest.param(lambda c: c.pop("seed"), "is damaged .*seed", id="missing key"),
        pytest.param(
            lambda c: c["tokenizer"].update(more=1), "is damaged .*more", id="unknown key"
        ),
        pytest.param(
            lambda c: part_of(c)["bins"][0].update(bytes="9"),
            "is damaged",
            id="type",
        ),
        pytest.param(
            lambda c: part_of(c)["lengths"][0].update(documents=0),
            "is damaged: no documents have the lengths .*documents=0",
            id="no documents",
        ),
        pytest.param(
            lambda c: part_of(c)["lengths"][0].update(tokens="x"),
            "is damaged: no documents have the lengths",
            id="lengths in words",
        ),
        pytest.param(
            lambda c: part_of(c)["bins"][0].update(path="../train.bin"),
            "outside the store",
            id="parent",
        ),
        pytest.param(
            lambda c: part_of(c)["idx"].update(path="/etc/train.idx"),
            "outside the store",
            id="absolute",
        ),
        pytest.param(
            lambda c: part_of(c).update(idx=part_of(c, "heldout")["idx"]),
            "not the files of one split",
            id="mixed splits",
        ),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused(
    store: Path, change: Callable[[dict], object], message: str
) -> None:
    change_manifest(store, change)
    with pytest.raises(StoreError, match=message):
        Manifest.load(store)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
def test_a_manifest_that_is_no_json_object_is_refused(store: Path, content: str) -> None:
    (store / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(StoreError, match=r"manifest\.json"):
        Manifest.load(store)


def test_another_tokenizer_is_refused_naming_both(shared_store: Manifest) -> None:
    own = tokenizer_fingerprint(shared_store.tokenizer_path)
    require_tokenizer(shared_store, {"tokenizer": own}, "here")
    with pytest.raises(StoreError, match="another tokenizer") as error:
        require_tokenizer(shared_store, {"tokenizer": "f" * 64}, "there")
    assert own in str(error.value)
    assert "f" * 64 in str(error.value)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_long_documents_are_those_megatron_reads_of_at_least_that_length(
    shared_store: Manifest, split: str
) -> None:
    stored = [list(tokens) for tokens in IndexedDataset(str(shared_store.prefixes(split)[0]))]
    bound = sorted(map(len, stored))[len(stored) // 2]
    found = [list(tokens) for tokens in long_documents(shared_store, min_tokens=bound, split=split)]
    assert found == [tokens for tokens in stored if len(tokens) >= bound]
    assert 0 < len(found) < len(stored)
    short = long_documents(shared_store, min_tokens=1, max_tokens=bound, split=split)
    assert [list(tokens) for tokens in short] == [each for each in stored if len(each) <= bound]
    assert not list(long_documents(shared_store.root, min_tokens=10**6, split=split))


def test_an_unknown_split_and_a_foreign_index_are_refused(store: Path) -> None:
    manifest = Manifest.load(store)
    with pytest.raises(StoreError, match="train and heldout, not 'test'"):
        list(long_documents(manifest, min_tokens=1, split="test"))
    index, data = store / "heldout.idx", store / "heldout.bin"
    content, tokens = index.read_bytes(), data.read_bytes()
    for damaged in (b"x" * len(content), content[:20], content[:40], b""):
        index.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"idx is not the index .*; restore it, or prepare"):
            list(long_documents(manifest, min_tokens=1))
    index.write_bytes(content)
    data.write_bytes(tokens[:-2])
    with pytest.raises(StoreError, match=r"heldout.bin has [\d,]+ bytes and its index describes"):
        list(long_documents(manifest, min_tokens=1))
    data.unlink()
    with pytest.raises(StoreError, match=r"heldout.bin has 0 bytes"):
        list(long_documents(manifest, min_tokens=1))
