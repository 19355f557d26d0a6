# SPDX-License-Identifier: Apache-2.0
"""A source of several pairs is the same to every reader as one pair with its documents."""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.adoption.checks import HeldOut
from data.adoption.pairs import Named
from data.census import census
from data.mixture.config import Mix
from data.mixture.dataset import MixedDataset
from data.mixture.stage_rows import StageRows
from data.splits import StoreError
from data.store import SPLITS, Manifest
from data.token_files.held_out import long_documents
from data.token_files.stored_documents import StoredDocuments
from data.token_files.tokens import MAPPED, JoinedTokens
from data.token_files.verification import verify
from tests.data.adoption.conftest import write_pair

LENGTH, STEPS, ROWS = 96, 5, 4


def write_pairs(
    folder: Path, documents: Sequence[Sequence[int]], bounds: Sequence[int], **options
) -> Path:
    """Write documents to a folder as pairs that end at the given documents and at the last."""
    begins, ends = (0, *bounds), (*bounds, len(documents))
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        write_pair(folder / f"part_{number}", [[ids] for ids in documents[begin:end]], **options)
    return folder


def samples(manifest: Manifest, mix: Mix) -> list[dict[str, list]]:
    """Return every sample of a stage with a mix."""
    files = [StoredDocuments(str(prefix)) for prefix in manifest.prefixes("train")]
    rows = StageRows.of(
        manifest, mix, seq_length=LENGTH, steps=STEPS, rows=ROWS, seed=7,
        document_lengths=[file.sequence_lengths for file in files],
    )  # fmt: skip
    of_stage = MixedDataset(
        rows, files, within=True, data_ranks=1, micro_batch=1, eod_id=manifest.tokenizer.eod_id
    )
    return [
        {name: tensor.tolist() for name, tensor in of_stage[number].items()}
        for number in range(STEPS * ROWS)
    ]


@pytest.mark.parametrize("bounds", [(1, 2), (37, 38), (59, 119)], ids=str)
def test_three_pairs_have_the_rows_samples_and_census_of_one_pair(
    adopted: Callable[..., Manifest], encoded: list[list[int]], tmp_path: Path, bounds
) -> None:
    heldout = HeldOut(documents=11)
    whole = write_pair(tmp_path / "one", [[ids] for ids in encoded])
    one = adopted(Named(path=whole, name="web"), heldout=heldout)
    one = replace(one, root=one.root.rename(tmp_path / "store of one"))
    folder = write_pairs(tmp_path / "three", encoded, bounds)
    three = adopted(Named(path=folder, name="web"), heldout=heldout)

    assert Manifest.load(three.root) == three
    (source,) = three.sources
    assert (source.name, source.origin) == ("web", str(folder))
    for split in SPLITS:
        (of_one,), (of_three,) = one.split(split).parts, three.split(split).parts
        assert replace(of_three, bins=of_one.bins) == of_one
        assert [file.path for file in of_three.bins] == [
            f"{split}.bin/{number:05d}.bin" for number in range(3)
        ]
        read, expected = (
            [ids.tolist() for ids in long_documents(store, min_tokens=1, split=split)]
            for store in (three, one)
        )
        assert read == expected
        assert len(read) == {"train": len(encoded) - 11, "heldout": 11}[split]
    assert census(three) == census(one)
    for mix in (Mix(), Mix(packing="cut")):
        assert samples(three, mix) == samples(one, mix)
    assert verify(three, whole=True) == verify(one, whole=True)


def test_pairs_of_a_source_may_be_named_apart_and_are_in_that_order(
    adopted, encoded, tmp_path
) -> None:
    folder = write_pairs(tmp_path / "d", encoded, (50, 70))
    words = [f"web={folder / 'part_2.bin'}", f"code={folder / 'part_1'}", f"web={folder}/part_0"]
    manifest = adopted(*map(Named.of_word, words))
    assert [source.name for source in manifest.sources] == ["web", "code"]
    links = [manifest.root / file.path for file in manifest.train.parts[0].bins]
    assert [link.resolve().name for link in links] == ["part_2.bin", "part_0.bin"]
    assert manifest.train.parts[1].bins[0].path == "train-code.bin"


def test_a_path_with_an_equals_sign_that_exists_is_not_split(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "a=b.idx").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        for word in ("a=b.idx", "a=b"):
            assert Named.of_word(word) == Named(path=Path(word))
        assert Named.of_word("a=c") == Named(path=Path("c"), name="a")
    assert Named.of_word("A=c") == Named(path=Path("A=c"))


@pytest.mark.parametrize("wrong", range(3))
def test_the_pair_that_is_wrong_is_named(adopted, encoded, tmp_path, tokenizer, wrong: int) -> None:
    def refused(said: str) -> None:
        with pytest.raises(ValueError, match=said) as error:
            adopted(Named(path=folder, name="web"))
        assert str(folder / f"part_{wrong}.") in str(error.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]

    folder = write_pairs(tmp_path / "d", encoded, (40, 80))
    path = folder / f"part_{wrong}.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    refused("one of them is truncated")
    path.write_bytes(content[:-2] + b"\x01\x00")
    refused("the documents of .* end with the token")
    path.write_bytes(tokenizer.vocab_size.to_bytes(2, "little") + content[2:])
    refused("has the token id")
    some = [[ids] for ids in encoded[:9]]
    write_pair(folder / f"part_{wrong}", some, np.int32)
    refused(r"have one type: adopt this pair|has tokens of type uint16")


def test_names_that_do_not_fit_together_are_refused(adopted, encoded, tmp_path) -> None:
    folder = write_pairs(tmp_path / "d", encoded, (40, 80))
    both = [Named(path=folder, name="web"), Named(path=folder / "part_1", name="code")]
    with pytest.raises(ValueError, match=r"part_1 would be in the sources web and code"):
        adopted(*both)
    with pytest.raises(ValueError, match=r"would both be the source part_0"):
        adopted(folder / "part_0", Named(path=folder / "part_1", name="part_0"))
    manifest = adopted(Named(path=folder, name="web"))
    with pytest.raises(ValueError, match=r"train\.bin is a folder: .* a source of several pairs"):
        adopted(manifest.root.rename(tmp_path / "first") / "train")


def test_a_changed_file_of_a_source_and_one_too_many_are_named(adopted, encoded, tmp_path) -> None:
    folder = write_pairs(tmp_path / "d", encoded, (40, 80))
    manifest = adopted(Named(path=folder, name="web"))
    path = folder / "part_1.bin"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(StoreError, match=r"train\.bin/00001\.bin is damaged"):
        verify(Manifest.load(manifest.root))
    path.write_bytes(content[:-2])
    with pytest.raises(StoreError, match=r"train\.bin/00001\.bin has .* bytes where"):
        Manifest.load(manifest.root)
    path.write_bytes(content)
    (manifest.root / "heldout.bin" / "00000a.bin").symlink_to(path)
    with pytest.raises(StoreError, match=r"heldout\.bin has 4 token files .* lists 3"):
        Manifest.load(manifest.root)


def test_megatron_s_reader_reads_through_all_files_and_is_copied_by_its_state(
    adopted, encoded, tmp_path
) -> None:
    folder = write_pairs(tmp_path / "d", encoded, (1, 3), dtype=np.int32)
    manifest = adopted(Named(path=folder, name="web"), heldout=HeldOut(documents=1))
    (prefix,) = manifest.prefixes("train")
    stored = copy.copy(StoredDocuments(str(prefix)))  # by its state, as a spawned loader gets it
    documents = [stored[number].tolist() for number in range(len(stored))]
    (left_out,) = [ids.tolist() for ids in long_documents(manifest, min_tokens=1)]
    assert sorted([*documents, left_out]) == sorted(encoded)
    assert stored.get(0, offset=3, length=4).tolist() == documents[0][3:7]


def test_slices_are_those_of_the_files_end_to_end_with_few_of_them_open(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    sizes = draw.integers(0, 5, size=MAPPED + 90)
    values = np.arange(sizes.sum(), dtype=np.uint16)
    files = [tmp_path / f"{number:05d}.bin" for number in range(len(sizes))]
    for path, part in zip(files, np.split(values, np.cumsum(sizes)[:-1]), strict=True):
        path.write_bytes(part.tobytes())
    before = len(os.listdir("/proc/self/fd"))
    joined = JoinedTokens(files, values.dtype)
    assert len(joined) == len(values)
    for first, stop in draw.integers(0, len(values) + 3, size=(2_000, 2)):
        assert np.array_equal(joined[first:stop], values[first:stop])
    held = joined[:]
    assert np.array_equal(held, values)
    assert len(os.listdir("/proc/self/fd")) - before <= MAPPED


def test_a_pair_without_a_document_of_its_own_is_part_of_a_source(adopted, encoded, tmp_path):
    folder = tmp_path / "d"
    write_pair(folder / "0", [[ids] for ids in encoded])
    write_pair(folder / "1", [[[]], [[]]])
    write_pair(folder / "2", [[[5, 6, 7]]])
    source = Named(path=folder, name="web")
    whole = adopted(
        source, leave_out_empty=True, without_eod="leave-out", heldout=HeldOut(documents=1)
    )
    assert whole.skipped == {"empty": 2, "without_eod": 1}
    assert whole.train.documents + whole.heldout.documents == len(encoded)
    with pytest.raises(ValueError, match=r"1\.idx has no document that is not empty"):
        adopted(folder / "1", leave_out_empty=True, overwrite=True)
