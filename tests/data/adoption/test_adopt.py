# SPDX-License-Identifier: Apache-2.0
"""A store of foreign token files has their documents, and each damage of them is refused."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from data.adoption.checks import Checked, HeldOut, held_out
from data.adoption.pairs import Named, source_name
from data.census import indexes
from data.splits import StoreError
from data.store import SPLITS, Manifest
from data.token_files.held_out import long_documents
from data.token_files.verification import verify
from tests.data.adoption.conftest import write_pair


def documents_of(manifest: Manifest, split: str) -> list[tuple[int, ...]]:
    """Read every document of a split with Megatron's own reader."""
    found = []
    for prefix in manifest.prefixes(split):
        read = IndexedDataset(str(prefix))
        found += [tuple(map(int, read[number])) for number in range(len(read))]
    return found


def copy(foreign: Path, to: Path) -> Path:
    """Copy a pair and return its prefix."""
    to.mkdir(exist_ok=True)
    for ending in (".bin", ".idx"):
        (to / f"{foreign.name}{ending}").write_bytes(Path(f"{foreign}{ending}").read_bytes())
    return to / foreign.name


def test_an_adopted_store_has_every_document_once_and_copies_no_token(
    adopted: Callable[..., Manifest], foreign: Path, encoded: list[list[int]]
) -> None:
    manifest = adopted(foreign)
    assert manifest == Manifest.load(manifest.root)
    train, heldout = (documents_of(manifest, split) for split in SPLITS)
    assert sorted(train + heldout) == sorted(map(tuple, encoded))
    assert not set(train) & set(heldout)
    assert (manifest.root / "train.bin").resolve() == Path(f"{foreign}.bin")
    assert sum(file.stat().st_size for file in manifest.root.glob("*.idx")) < 20 * 120 + 100
    (source,) = manifest.sources
    assert (source.name, source.kind, source.origin) == ("web", "adopted", str(foreign))
    for split in SPLITS:
        lengths = [len(ids) for ids in documents_of(manifest, split)]
        for bucket in manifest.split(split).lengths:
            within = [size for size in lengths if size // bucket.at_least == 1]
            assert (bucket.documents, bucket.tokens) == (len(within), sum(within))
        assert manifest.split(split).tokens == sum(lengths)
    assert verify(manifest, whole=True) > 0
    longest = max(len(ids) for ids in heldout)
    assert len(next(long_documents(manifest, min_tokens=longest))) == longest


def test_a_changed_token_file_is_noticed(adopted, foreign, tmp_path) -> None:
    prefix = copy(foreign, tmp_path / "own")
    manifest = adopted(prefix)
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[40] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    with pytest.raises(StoreError, match=r"train\.bin is damaged"):
        verify(Manifest.load(manifest.root))
    Path(f"{prefix}.bin").write_bytes(content[:-2])
    with pytest.raises(StoreError, match=r"train\.bin has .* bytes where"):
        Manifest.load(manifest.root)


def test_copies_of_a_document_are_in_one_split_whatever_the_type_of_the_ids(
    adopted, encoded, tmp_path
) -> None:
    twice = [[ids] for ids in encoded + encoded[::-1]]
    wide = write_pair(tmp_path / "files" / "wide", twice, np.int32)
    manifest = adopted(wide, heldout=HeldOut(fraction=0.3))
    train, heldout = (documents_of(manifest, split) for split in SPLITS)
    assert not set(train) & set(heldout)
    narrow = write_pair(tmp_path / "files" / "narrow", twice)
    (manifest.root).rename(tmp_path / "first")
    again = adopted(narrow, heldout=HeldOut(fraction=0.3))
    assert sorted(documents_of(again, "heldout")) == sorted(heldout)
    assert again.heldout_fraction == 0.3


def test_a_number_of_held_out_documents_is_drawn_by_their_lengths() -> None:
    random = np.random.default_rng(0)
    lengths = np.where(np.arange(5_000) % 100 == 0, 10_000, 100).astype(np.int32)
    hashes = random.integers(0, 2**63, 5_000).astype(np.uint64)
    documents = Checked("web", np.dtype("u2"), lengths, lengths.astype(np.int64), hashes, 0, 0)
    chosen = held_out(documents, HeldOut(documents=60), 0)
    assert chosen.sum() == 60
    assert 18 < (lengths[chosen] == 10_000).sum() < 42  # half of the tokens are in the 50 long ones
    by_share = held_out(documents, HeldOut(), 0)
    assert lengths[by_share].sum() <= 0.1 * lengths.sum()
    assert not np.array_equal(chosen, held_out(documents, HeldOut(documents=60), 1))


@pytest.mark.parametrize("seed", range(5))
def test_without_a_choice_a_long_document_and_many_copies_are_not_held_out(seed) -> None:
    lengths = np.array([10] * 15 + [1_000] + [100] * 9, dtype=np.int32)
    hashes = np.array([5] * 15 + [*range(10, 20)], dtype=np.uint64) * np.uint64(2**59 // 7)
    documents = Checked("web", np.dtype("u2"), lengths, lengths.astype(np.int64), hashes, 0, 0)
    chosen = held_out(documents, HeldOut(), seed)
    assert 0 < lengths[chosen].sum() <= 0.1 * lengths.sum()
    assert chosen[:15].all() or not chosen[:15].any()
    few = replace(documents, lengths=lengths[15:], hashes=hashes[15:])
    held = held_out(few, HeldOut(), seed)
    assert held.sum() == 1
    assert not held[0]
    two = replace(documents, lengths=lengths[14:16], hashes=hashes[14:16])
    alone = replace(documents, lengths=lengths[20:], hashes=hashes[20:])
    assert held_out(two, HeldOut(), seed).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"each document of web has more than 10% .* 20%: choose"):
        held_out(alone, HeldOut(), seed)


def test_a_store_is_overwritten_if_asked_and_its_own_files_are_not(
    adopted, foreign, tmp_path
) -> None:
    first = adopted(foreign)
    with pytest.raises(ValueError, match=r"store already exists; `--overwrite` replaces it"):
        adopted(foreign)
    second = adopted(foreign, overwrite=True, heldout=HeldOut(fraction=0.3))
    assert Manifest.load(first.root) == second != first
    assert list(tmp_path.iterdir()) == [first.root]
    inside = copy(foreign, first.root / "own")
    with pytest.raises(ValueError, match="a store has links to the files that it adopts"):
        adopted(inside, overwrite=True)
    (first.root / "manifest.json").unlink()
    with pytest.raises(ValueError, match="only a store is ever overwritten"):
        adopted(foreign, overwrite=True)
    assert (first.root / "train.idx").exists()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("train-code_text_document", "code"),
        ("train_Web", "web"),
        ("heldout-code", "heldout-code"),
        ("train-00000-of-00016_text_document", "train-00000-of-00016"),
        ("train", "train"),
        ("training", "training"),
    ],
)
def test_a_source_has_the_name_of_its_file_without_what_says_that_it_is_for_training(
    file: str, name: str
) -> None:
    assert source_name(file) == name


def test_a_name_may_precede_a_path_unless_a_file_is_named_so(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Named.of_word("web=/data/a=b") == Named(path=Path("/data/a=b"), name="web")
    assert Named.of_word("/data/a=b") == Named(path=Path("/data/a=b"))
    Path("a=b.bin").touch()
    assert Named.of_word("a=b") == Named(path=Path("a=b"))


def test_several_sources_have_names_and_files_of_their_own(
    adopted, foreign, encoded, tmp_path
) -> None:
    folder = tmp_path / "b c"
    write_pair(folder / "Books.v2_text_document", [[ids] for ids in encoded[:60]], np.int32)
    write_pair(folder / "deep" / "code", [[ids] for ids in encoded[60:]])
    manifest = adopted(folder, Named(path=Path(f"{foreign}.idx"), name="crawl"))
    assert [source.name for source in manifest.sources] == ["books-v2", "code", "crawl"]
    assert {path.name for path in manifest.root.glob("*.bin")} == {
        f"{split}-{name}.bin" for split in SPLITS for name in ("books-v2", "code", "crawl")
    }
    assert len(documents_of(manifest, "train")) + len(documents_of(manifest, "heldout")) == 240
    assert verify(manifest, whole=True) > 0
    assert list(indexes(manifest, "train")) == ["books-v2", "code", "crawl"]


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"PK", "is not an index of Megatron"),
        (9, struct.pack("<Q", 2), "has version 2"),
        (17, b"\x07", "float32"),
        (17, b"\x63", "the code 99"),
        (17, b"\x04", "one of them is truncated, or they are not of one data set"),
        (18, struct.pack("<Q", 2**50), "its header describes"),
        (34, struct.pack("<i", -5), "not of one data set"),
    ],
)
def test_a_damaged_index_is_refused_with_its_name(
    adopted, foreign, tmp_path, at: int, value: bytes, said: str
) -> None:
    prefix = copy(foreign, tmp_path / "own")
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[at : at + len(value)] = value
    Path(f"{prefix}.idx").write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        adopted(prefix)
    assert "web_text_document." in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize(
    ("ending", "left"), [(".bin", -2), (".idx", -8), (".idx", 20), (".idx", 0)]
)
def test_a_truncated_file_is_refused(adopted, foreign, tmp_path, ending: str, left: int) -> None:
    prefix = copy(foreign, tmp_path / "own")
    file = Path(f"{prefix}{ending}")
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"truncated|not an index"):
        adopted(prefix)


def test_a_document_outside_of_the_token_file_is_refused(adopted, encoded, tmp_path) -> None:
    prefix = write_pair(tmp_path / "d" / "web", [[ids] for ids in encoded[:4]])
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[34 + 4 * 4 + 8 : 34 + 4 * 4 + 16] = struct.pack("<q", 2**40)
    Path(f"{prefix}.idx").write_bytes(content)
    with pytest.raises(ValueError, match=r"sequence 1 has .* from byte 1,099,511,627,776 on"):
        adopted(prefix)


def test_sequences_of_a_document_that_are_apart_are_refused(adopted, encoded, tmp_path) -> None:
    prefix = write_pair(tmp_path / "d" / "web", [[[1, 2], [3, 4]], [encoded[0]]])
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    pointers = 34 + 4 * 3
    first, second = content[pointers : pointers + 8], content[pointers + 8 : pointers + 16]
    content[pointers : pointers + 16] = second + first
    Path(f"{prefix}.idx").write_bytes(content)
    with pytest.raises(ValueError, match="sequences of document 0 are not next to each other"):
        adopted(prefix)


def test_ids_of_another_tokenizer_are_refused(adopted, encoded, tmp_path, tokenizer) -> None:
    wrong = [[ids] for ids in encoded[:4]] + [[[1, tokenizer.vocab_size, tokenizer.eod_id]]]
    prefix = write_pair(tmp_path / "d" / "web", wrong)
    with pytest.raises(ValueError, match=rf"token id {tokenizer.vocab_size:,}; .* from 0 to"):
        adopted(prefix)
    negative = write_pair(tmp_path / "d" / "web", [[[1, -7, 0]], [encoded[0]]], np.int32)
    with pytest.raises(ValueError, match="the token id -7"):
        adopted(negative)


def test_documents_without_an_end_are_refused_kept_or_left_out(
    adopted, encoded, tmp_path, tokenizer
) -> None:
    assert tokenizer.eod_id != 5
    documents = [[ids] for ids in encoded[:9]] + [[[5, 5, 5]]]
    prefix = write_pair(tmp_path / "d" / "web", documents)
    with pytest.raises(ValueError, match=r"90\.0% of the documents .* 1 do not, .* number 9"):
        adopted(prefix)
    with pytest.raises(ValueError, match=r"write them again with the token at each end"):
        adopted(prefix)
    left_out = adopted(prefix, without_eod="leave-out")
    assert left_out.skipped == {"without_eod": 1}
    assert left_out.train.documents + left_out.heldout.documents == 9
    left_out.root.rename(tmp_path / "first")
    every = adopted(prefix, without_eod="keep")
    assert every.train.documents + every.heldout.documents == 10


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_the_token_that_documents_of_another_tokenizer_end_with_is_named(
    adopted, encoded, tmp_path, tokenizer, dtype
) -> None:
    other = tokenizer.backend.token_to_id("e")
    documents = [[[*ids[:-1], other]] for ids in encoded[:20]] + [[encoded[20]]]
    prefix = write_pair(tmp_path / "d" / "web", documents, dtype)
    with pytest.raises(ValueError, match=rf"95% of them end with the token {other} \('e'\); name"):
        adopted(prefix)
    mixed = [[[*ids[:-1], 7 + number]] for number, ids in enumerate(encoded[:20])]
    with pytest.raises(ValueError, match=r"write them again with the token at each end"):
        adopted(write_pair(tmp_path / "d" / "mixed", mixed, dtype))


def test_empty_documents_are_refused_or_left_out(adopted, encoded, tmp_path) -> None:
    prefix = write_pair(tmp_path / "d" / "web", [[encoded[0]], [[]], [encoded[1]], [encoded[2]]])
    with pytest.raises(ValueError, match="1 empty documents, the first is number 1"):
        adopted(prefix)
    manifest = adopted(prefix, leave_out_empty=True, heldout=HeldOut(documents=1))
    assert manifest.skipped == {"empty": 1}
    kept = documents_of(manifest, "train") + documents_of(manifest, "heldout")
    assert sorted(kept) == sorted(map(tuple, encoded[:3]))


def test_paths_without_pairs_and_names_that_collide_are_refused(adopted, foreign, tmp_path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "readme.txt").write_text("x")
    half = tmp_path / "half.bin"
    half.write_bytes(b"x")
    other = copy(foreign, tmp_path / "own")
    for paths, said in [
        ((tmp_path / "none",), "has no token files"),
        ((tmp_path / "nowhere",), "there are no token files at"),
        ((half,), r"half\.idx is missing"),
        ((foreign, other), "would both be the source web; name one of them with NAME="),
    ]:
        with pytest.raises(ValueError, match=said):
            adopted(*paths)
    named = adopted(foreign, Named(path=other, name="other"))
    assert [source.name for source in named.sources] == ["web", "other"]


@pytest.mark.parametrize("word", ["web", "=x", "web=", "We b=x", "a/b=x", "n" * 33 + "=x"])
def test_a_name_that_is_not_one_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"--name .* is not NAME=PATH"):
        Named.parse(word)


@pytest.mark.parametrize("heldout", [{"documents": 120}, {"fraction": 1e-9}])
def test_a_split_without_documents_is_refused(adopted, foreign, tmp_path, heldout) -> None:
    with pytest.raises(ValueError, match="split of web is empty"):
        adopted(foreign, heldout=HeldOut(**heldout))
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_taken_is_left_alone(adopted, foreign, tmp_path) -> None:
    (tmp_path / "store").mkdir()
    with pytest.raises(ValueError, match=r"--out .*store already exists"):
        adopted(foreign)
