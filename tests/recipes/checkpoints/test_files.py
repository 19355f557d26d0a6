# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint against its marker, without torch's reading."""

import hashlib
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from custom_modules.checkpoints.index import CheckpointError
from recipes.checkpoints.files import (
    Reading,
    SavedFile,
    described,
    for_marker,
    note,
    require_undamaged,
    require_whole,
    saved_files,
    share,
)

DATA = "weights/__0_0.distcp"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "step=2"
    tensors = {"module.weight": torch.arange(6.0)}
    save(tensors, storage_writer=FileSystemWriter(folder / "weights"), no_dist=True)
    for name in ("context/io.json", "hugging_face/config.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{}")
    facts = {"step": 2, "max_steps": 2, "tokenizer": "t", "files": for_marker(described(folder))}
    (folder / "longhaul.json").write_text(json.dumps(facts))
    return folder


def test_the_marker_has_size_and_sha256_of_every_file_but_itself(checkpoint):
    files = saved_files(checkpoint)
    assert files.keys() == {
        "weights/.metadata", DATA, "context/io.json", "hugging_face/config.json",
    }  # fmt: skip
    for name, file in files.items():
        content = (checkpoint / name).read_bytes()
        assert file == SavedFile(len(content), hashlib.sha256(content).hexdigest())
    assert saved_files(checkpoint, but=("context", "weights")).keys() == {
        "hugging_face/config.json"
    }


def test_neither_an_earlier_marker_nor_a_file_that_is_being_written_is_described(checkpoint):
    before = described(checkpoint)
    (checkpoint / ".longhaul.json.77.tmp").touch()
    (checkpoint / "weights" / ".metadata.tmp").touch()
    assert described(checkpoint) == before


def test_a_damaged_index_that_names_more_bytes_is_the_file_that_is_named(checkpoint):
    index = checkpoint / "weights" / ".metadata"
    content = pickle.loads(index.read_bytes())  # noqa: S301  # written above
    (info,) = content.storage_data.values()
    info.length += 1_000
    index.write_bytes(pickle.dumps(content))
    facts = json.loads((checkpoint / "longhaul.json").read_text())
    facts["files"]["weights/.metadata"]["bytes"] = index.stat().st_size
    (checkpoint / "longhaul.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged: its SHA-256 differs"):
        require_whole(checkpoint)


def test_a_whole_checkpoint_passes_also_without_sums(checkpoint):
    require_whole(checkpoint)
    assert note(checkpoint, verify=True) is None
    assert "not verified, as --no-verify asks" in note(checkpoint, verify=False)
    (checkpoint / "longhaul.json").unlink()
    require_whole(checkpoint)
    assert "saved without SHA-256" in note(checkpoint, verify=True)


@pytest.mark.parametrize("with_sums", [True, False])
def test_a_cut_and_a_missing_file_are_told_with_their_sizes(checkpoint, with_sums):
    if not with_sums:
        (checkpoint / "longhaul.json").unlink()
    content = (checkpoint / DATA).read_bytes()
    (checkpoint / DATA).write_bytes(content[:100])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 100 bytes where [\d,]+ were"):
        require_whole(checkpoint)
    (checkpoint / DATA).unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing; restore it from a copy"):
        require_whole(checkpoint)


def test_what_the_reading_does_not_touch_may_change(checkpoint):
    (checkpoint / "context/io.json").write_text("another")
    (checkpoint / "hugging_face/config.json").unlink()
    require_whole(checkpoint)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read \(No such file"):
        require_undamaged(checkpoint, "hugging_face")


def test_a_state_of_the_model_optimizer_is_refused(checkpoint):
    (checkpoint / "weights" / "modelopt_state").mkdir()
    with pytest.raises(CheckpointError, match="modelopt_state is a pickle"):
        require_whole(checkpoint)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"sharded_backend": "zarr"}', "format is 'zarr'"),
        ("{", "cannot be read"),
        ("{}", "cannot"),
    ],
)
def test_a_checkpoint_in_another_format_is_refused(checkpoint, content, said):
    (checkpoint / "weights" / "metadata.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"metadata\.json .*{said}"):
        require_whole(checkpoint)


SUM = "0" * 64


@pytest.mark.parametrize(
    "files",
    [
        {"weights/x": 7},
        {"weights/x": {"bytes": 7}},
        {"weights/x": {"bytes": 7, "sha256": SUM, "more": 1}},
        {"weights/x": {"bytes": "12", "sha256": SUM}},
        {"weights/x": {"bytes": True, "sha256": SUM}},
        {"weights/x": {"bytes": -1, "sha256": SUM}},
        {"weights/x": {"bytes": 7, "sha256": None}},
        {"": {"bytes": 7, "sha256": SUM}},
        {".": {"bytes": 7, "sha256": SUM}},
        {"../x": {"bytes": 7, "sha256": SUM}},
        {"weights/../../x": {"bytes": 7, "sha256": SUM}},
        {"/etc/passwd": {"bytes": 7, "sha256": SUM}},
        {"weights/a\0b": {"bytes": 7, "sha256": SUM}},
        ["weights/x"],
        None,
        7,
    ],
    ids=repr,
)
def test_a_marker_that_says_something_else_of_its_files_is_damaged(checkpoint, files):
    facts = json.loads((checkpoint / "longhaul.json").read_text())
    (checkpoint / "longhaul.json").write_text(json.dumps(facts | {"files": files}))
    with pytest.raises(CheckpointError, match=r"longhaul\.json is damaged \("):
        require_whole(checkpoint)


def test_a_flipped_byte_is_found_by_the_rank_whose_share_it_is(checkpoint):
    content = bytearray((checkpoint / DATA).read_bytes())
    content[-1] ^= 1
    (checkpoint / DATA).write_bytes(content)
    require_whole(checkpoint)
    files = saved_files(checkpoint)
    found = []
    for rank in range(3):
        with Reading(checkpoint, files, rank=rank, ranks=3) as reading:
            found += reading.damaged()
    (sentence,) = found
    assert sentence.startswith(f"{checkpoint / DATA} is damaged: its SHA-256 differs")
    assert "--no-verify" in sentence


def test_every_file_is_in_one_share_and_shares_are_of_about_as_many_bytes():
    files = {f"f{at}": SavedFile(size, "") for at, size in enumerate([8, 7, 6, 5, 4, 3, 2, 1])}
    shares = [share(files, rank, 3) for rank in range(3)]
    assert sorted(name for part in shares for name in part) == sorted(files)
    sizes = [sum(file.bytes for file in part.values()) for part in shares]
    assert sizes == [13, 12, 11]
    assert share(files, 5, 16).keys() == {"f5"}
    assert share(files, 12, 16) == {}
