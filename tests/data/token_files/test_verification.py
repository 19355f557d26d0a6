# SPDX-License-Identifier: Apache-2.0
"""What is not as it was written is found, and named."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from data.files.sha256 import Hashing, Part, sha256_of
from data.store import Manifest, StoreError
from data.token_files import verification
from data.token_files.verification import is_sampled, verify, write_blocks

FILES = ("train.bin", "train.idx", "heldout.bin", "heldout.idx")


@pytest.fixture
def store(tmp_path: Path, shared_store: Manifest) -> Path:
    return Path(shutil.copytree(shared_store.root, tmp_path / "store"))


@pytest.fixture
def in_blocks(store: Path, monkeypatch) -> Manifest:
    """Return a store whose token files have many blocks."""
    manifest = Manifest.load(store)
    monkeypatch.setattr(verification, "BLOCK", 512)
    return replace(manifest, blocks=write_blocks(store, ["train.bin", "heldout.bin"]))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_store_as_it_was_written_is_verified_and_its_bytes_are_counted(store):
    manifest = Manifest.load(store)
    assert verify(manifest, whole=True) == sum((store / name).stat().st_size for name in FILES)
    assert is_sampled(manifest)


@pytest.mark.parametrize("name", [*FILES, "blocks.json"])
def test_a_flipped_byte_is_found_and_its_file_named(store, name):
    flip(store / name, 100)
    manifest = Manifest.load(store)
    with pytest.raises(StoreError, match=rf"{name} is damaged: its SHA-256 .*prepare the store"):
        verify(manifest)


@pytest.mark.parametrize("name", [*FILES, "blocks.json"])
def test_a_file_that_is_gone_once_the_store_is_open_is_named(store, name):
    manifest = Manifest.load(store)
    (store / name).unlink()
    with pytest.raises(StoreError, match=rf"{name} cannot be read \(No such file"):
        verify(manifest)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("longer", [False, True])
def test_a_file_of_another_size_once_the_store_is_open_is_named(store, name, longer):
    manifest = Manifest.load(store)
    content = (store / name).read_bytes()
    (store / name).write_bytes(content + b"x" if longer else content[:-1])
    with pytest.raises(StoreError, match=rf"{name} has [\d,]+ bytes where [\d,]+ were written"):
        verify(manifest)


def test_sums_of_another_number_of_blocks_are_refused(in_blocks, monkeypatch):
    monkeypatch.setattr(verification, "_blocks", lambda manifest: {"train.bin": ["0" * 64]})
    with pytest.raises(StoreError, match=r"blocks\.json has the sums of 1 blocks of train\.bin"):
        verify(in_blocks)


def test_the_other_split_is_not_read_where_one_is_asked_for(store):
    flip(store / "train.bin", 100)
    verify(Manifest.load(store), splits=("heldout",))


def test_an_exchanged_tokenizer_is_found(store):
    file = store / "tokenizer" / "tokenizer.json"
    definition = json.loads(file.read_text())
    definition["model"]["merges"].pop()
    file.write_text(json.dumps(definition))
    with pytest.raises(StoreError, match="another tokenizer"):
        verify(Manifest.load(store), splits=("heldout",))


def test_a_sample_has_the_first_block_the_last_and_some_between(in_blocks):
    root, blocks = in_blocks.root, 4 + 2
    index = sum((root / name).stat().st_size for name in FILES if name.endswith("idx"))
    whole = verify(in_blocks, whole=True) - index
    sampled = verify(in_blocks) - index
    assert whole > 4 * blocks * 512
    assert (2 * blocks - 2) * 512 < sampled <= 2 * blocks * 512
    for name, at in (("train.bin", 0), ("heldout.bin", -1)):
        flip(root / name, at)
        with pytest.raises(StoreError, match=rf"{name} is damaged: its SHA-256 of bytes [\d,]+ to"):
            verify(in_blocks)
        flip(root / name, at)
    verify(in_blocks, whole=True)


def test_samples_differ_and_all_of_it_finds_what_a_sample_misses(in_blocks):
    flip(in_blocks.root / "train.bin", (in_blocks.root / "train.bin").stat().st_size // 2)
    with pytest.raises(StoreError, match=r"train\.bin is damaged"):
        verify(in_blocks, whole=True)
    found = []
    for _ in range(200):
        try:
            verify(in_blocks)
        except StoreError:
            found.append(True)
    assert 0 < len(found) < 200


def test_a_flipped_bit_next_to_the_definition_of_the_tokenizer_is_damage_of_its_file(store):
    manifest = Manifest.load(store)
    flip(store / "tokenizer" / "tokenizer_config.json", 3)
    with pytest.raises(StoreError, match=r"tokenizer_config\.json is damaged"):
        verify(manifest)


def test_a_store_without_sums_of_blocks_is_read_whole_where_it_is_asked_for_or_small(
    store, monkeypatch
):
    content = json.loads((store / "manifest.json").read_text())
    del content["blocks"], content["own_sha256"]
    (store / "manifest.json").write_text(json.dumps(content))
    (store / "blocks.json").unlink()
    manifest = Manifest.load(store)
    flip(store / "train.bin", 100)
    with pytest.raises(StoreError, match=r"train\.bin is damaged"):
        verify(manifest)
    monkeypatch.setattr(verification, "BLOCK", 16)
    assert not is_sampled(manifest)
    verify(manifest)
    with pytest.raises(StoreError, match=r"train\.bin is damaged"):
        verify(manifest, whole=True)


def test_sums_of_parts_are_those_of_their_bytes(tmp_path):
    content = bytes(range(256)) * 9000
    path = tmp_path / "file"
    path.write_bytes(content)
    parts = [Part(path, 0, 10), Part(path, 10, 2**21), Part(path, 2**21), Part(tmp_path / "none")]
    with Hashing(parts) as hashing:
        *sums, missing = hashing.results()
    pieces = (content[:10], content[10 : 2**21], content[2**21 :])
    assert sums == [hashlib.sha256(piece).hexdigest() for piece in pieces]
    assert isinstance(missing, FileNotFoundError)
    assert sha256_of([path]) == [hashlib.sha256(content).hexdigest()]
    with pytest.raises(FileNotFoundError):
        sha256_of([path, tmp_path / "none"])
