# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is read safely and compared with what was saved, whatever is wrong with it."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from custom_modules.checkpoints.index import CheckpointError, ForeignClassError
from recipes.checkpoints.files import Reading, described, for_marker, require_whole, saved_files
from recipes.checkpoints.marker import write_marker
from recipes.checkpoints.verified import described_by_ranks, names_of_rank, verified
from tests.ranks import run_ranks

FACTS = {"step": 2, "max_steps": 2, "tokenizer": "t"}
WEIGHT = torch.arange(6.0)


class Touching:
    """What touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def written(folder: Path, state: object = "adam") -> Path:
    """Write a checkpoint of a weight, a state and the common file, with their sums."""
    content = {"module.weight": WEIGHT, "state": state}
    save(content, storage_writer=FileSystemWriter(folder / "weights"), no_dist=True)
    torch.save({"step": 2, "names": ["a", 1.5, None]}, folder / "weights" / "common.pt")
    with_sums(folder)
    return folder


def with_sums(folder: Path) -> None:
    write_marker(folder, FACTS | {"files": for_marker(described(folder))})


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return written(tmp_path / "step=2")


def read(checkpoint: Path, *names: str, verify: bool = True) -> dict:
    """Return what a checkpoint holds under names, by a reader as any."""
    content = {"module.weight": torch.zeros(6), "state": ""}
    content = {name: content[name] for name in names or content}
    with verified(checkpoint, verify=verify):
        load(content, storage_reader=FileSystemReader(checkpoint / "weights"), no_dist=True)
    return content


def flip(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1 << at % 8
    return bytes(changed)


def test_a_checkpoint_as_it_was_saved_is_read(checkpoint):
    content = read(checkpoint)
    assert torch.equal(content["module.weight"], WEIGHT)
    assert content["state"] == "adam"


@pytest.mark.parametrize("name", ["common.pt", "__0_0.distcp", ".metadata"])
def test_a_flipped_bit_anywhere_is_damage_of_the_file_it_is_in(checkpoint, name):
    path = checkpoint / "weights" / name
    content = path.read_bytes()
    for at in range(0, len(content), 5):
        if flip(content, at)[at] == pickle.LONG_BINPUT[0]:
            continue  # pickle would make room for as many objects as its argument says
        path.write_bytes(flip(content, at))
        with pytest.raises(CheckpointError) as error:
            read(checkpoint)
        said = str(error.value)
        assert said.startswith(f"{path} "), said
        assert "is damaged: its SHA-256" in said or "is not the whole index" in said, said
        assert not isinstance(error.value, ForeignClassError)


def test_a_flipped_bit_without_sums_is_a_sentence_where_torch_notices_it(checkpoint):
    (checkpoint / "longhaul.json").unlink()
    path = checkpoint / "weights" / "common.pt"
    content, refused = path.read_bytes(), []
    for at in range(0, len(content), 5):
        path.write_bytes(flip(content, at))
        try:
            read(checkpoint)
        except CheckpointError as error:
            refused.append(error)
    assert len(refused) > 20
    assert all(str(error).startswith(f"{path} ") for error in refused)


@pytest.mark.parametrize("name", ["common.pt", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("of_sums", [False, True], ids=["tampered", "with its sum"])
def test_a_foreign_class_is_foreign_only_in_a_file_as_it_was_saved(tmp_path, name, of_sums):
    state = Touching(tmp_path / "ran") if name.endswith("distcp") else "adam"
    checkpoint = written(tmp_path / "step=2", state)
    path = checkpoint / "weights" / name
    if name == "common.pt":
        torch.save(Touching(tmp_path / "ran"), path)
    elif name == ".metadata":
        path.write_bytes(pickle.dumps(Touching(tmp_path / "ran")))
    else:
        path.write_bytes(path.read_bytes() + b"\0")
    if of_sums:
        with_sums(checkpoint)
    with pytest.raises(CheckpointError) as error:
        read(checkpoint, "state")
    said = str(error.value)
    assert isinstance(error.value, ForeignClassError) == of_sums
    assert said.startswith(f"{path} asks" if of_sums else f"{path} is damaged: its SHA-256")
    assert "asks for posix.system" in said
    assert "of it was run" in said
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match=r"asks for posix\.system"):
        read(checkpoint, "state", verify=False)
    assert not (tmp_path / "ran").exists()


def test_the_index_that_commands_read_before_ranks_is_told_in_the_same_words(tmp_path, checkpoint):
    index = checkpoint / "weights" / ".metadata"
    index.write_bytes(pickle.dumps(Touching(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"is damaged: .* and it asks for posix\.system;"):
        require_whole(checkpoint)
    with_sums(checkpoint)
    with pytest.raises(ForeignClassError, match=r"\.metadata asks for posix\.system"):
        require_whole(checkpoint)


def test_a_refusal_of_one_file_does_not_wait_for_the_sums_of_all(checkpoint, monkeypatch):
    (checkpoint / "weights" / "modelopt_state").mkdir()
    monkeypatch.setattr(Reading, "damaged", lambda self: pytest.fail("all files were awaited"))
    with pytest.raises(CheckpointError, match="modelopt_state is a pickle"):
        read(checkpoint)
    (checkpoint / "weights" / "modelopt_state").rmdir()
    path = checkpoint / "weights" / "common.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"common\.pt is damaged: its SHA-256"):
        read(checkpoint)


def test_a_mistake_of_the_reader_stays_what_it_is(checkpoint):
    path = checkpoint / "weights" / "__0_0.distcp"
    path.write_bytes(flip(path.read_bytes(), 0))
    with pytest.raises(ValueError, match="not of one model"), verified(checkpoint):
        raise ValueError("not of one model")
    with pytest.raises(CheckpointError, match="is damaged"), verified(checkpoint):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def test_each_file_is_described_by_one_rank_and_the_first_alone_walks_the_tree(
    checkpoint, monkeypatch
):
    for name in ("weights/__1_0.distcp", "weights/__1_1.distcp", "weights/__10_0.distcp",
                 "weights/__7_0.distcp", "weights/__1_x.distcp", "context/__1_0.distcp",
                 "context/io.json", ".longhaul.json.77.tmp", "weights/.metadata.tmp"):  # fmt: skip
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text(name)
    first = names_of_rank(checkpoint, 0, 4)
    assert sorted(first) == [
        "context/__1_0.distcp", "context/io.json", "weights/.metadata", "weights/__0_0.distcp",
        "weights/__10_0.distcp", "weights/__1_x.distcp", "weights/__7_0.distcp",
        "weights/common.pt",
    ]  # fmt: skip
    monkeypatch.setattr(Path, "rglob", None)
    monkeypatch.setattr(Path, "is_file", None)
    others = [sorted(names_of_rank(checkpoint, rank, 4)) for rank in (1, 2, 3)]
    assert others == [["weights/__1_0.distcp", "weights/__1_1.distcp"], [], []]


def save_twice(folder: str) -> None:
    """Save into one folder, mark it, and do so again with other weights, as a stage may."""
    checkpoint, rank = Path(folder), dist.get_rank()
    for number in range(2):
        weights = {"module.weight": WEIGHT + number, f"module.of_{rank}": WEIGHT * number}
        save(weights, storage_writer=FileSystemWriter(checkpoint / "weights"))
        if rank == 0:
            torch.save({"step": 2}, checkpoint / "weights" / "common.pt")
        files = described_by_ranks(checkpoint)
        if rank == 0:
            write_marker(checkpoint, FACTS | {"files": for_marker(files)})
        dist.barrier()


def test_a_folder_that_is_saved_into_twice_is_whole(tmp_path):
    checkpoint = tmp_path / "step=2"
    run_ranks(save_twice, 2, str(checkpoint))
    assert saved_files(checkpoint).keys() == {
        f"weights/{name}" for name in (".metadata", "common.pt", "__0_0.distcp", "__1_0.distcp")
    }
    require_whole(checkpoint)
    content = {"module.weight": torch.zeros(6)}
    with verified(checkpoint):
        load(content, storage_reader=FileSystemReader(checkpoint / "weights"), no_dist=True)
    assert torch.equal(content["module.weight"], WEIGHT + 1)
    assert "longhaul.json" not in json.loads((checkpoint / "longhaul.json").read_text())["files"]
