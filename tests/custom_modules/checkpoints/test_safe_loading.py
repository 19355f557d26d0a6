# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of torch's is read without running what it asks for."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from custom_modules.checkpoints.index import CheckpointError, ForeignClassError, outline
from custom_modules.checkpoints.safe_loading import read_safely, require_common
from recipes.checkpoints.verified import is_of_all_ranks, refusal

DATA = "__0_0.distcp"


class Touching:
    """A state that touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


class Asking:
    """An attribute that is asked for when it is unpickled."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple:
        return getattr, (self.of, self.name)


def saved(folder: Path, state: object) -> Path:
    """Write a checkpoint of a tensor and a state that is none."""
    content = {"weight": torch.arange(6.0).reshape(2, 3), "state": state}
    save(content, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    read_safely()
    return saved(tmp_path / "checkpoint", {"lr": [1.0, None], "name": "adam"})


def loaded(folder: Path) -> dict:
    content = {"weight": torch.zeros(2, 3), "state": {"lr": [0.0, 0.0], "name": ""}}
    load(content, storage_reader=FileSystemReader(folder), no_dist=True)
    return content


def told(folder: Path) -> CheckpointError:
    """Return what is behind the error of loading."""
    with pytest.raises((CheckpointException, CheckpointError)) as error:
        loaded(folder)
    found = refusal(error.value)
    assert found is not None
    return found


def test_a_sound_checkpoint_is_read_as_by_torch_alone(checkpoint):
    read_safely()  # again, which changes nothing
    content = loaded(checkpoint)
    assert torch.equal(content["weight"], torch.arange(6.0).reshape(2, 3))
    assert content["state"] == {"lr": [1.0, None], "name": "adam"}
    assert isinstance(FileSystemReader(checkpoint).read_metadata(), Metadata)
    (name, least), *more = outline(checkpoint / ".metadata").items()
    assert (name, more) == (DATA, [])
    assert 0 < least <= (checkpoint / DATA).stat().st_size


@pytest.fixture
def enums_as_in_3_11_2(monkeypatch):
    """Members of enumerations are pickled by `getattr`, as Debian 12's Python does."""
    by_name = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)


def test_an_index_of_python_3_11_2_is_read(enums_as_in_3_11_2, tmp_path):
    read_safely()
    folder = saved(tmp_path / "checkpoint", 1)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    (of_weight,) = (
        found.properties.memory_format
        for name, found in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if name == "weight"
    )
    assert of_weight is torch.contiguous_format
    assert list(outline(folder / ".metadata")) == [DATA]


@pytest.mark.parametrize(
    ("of", "name"),
    [(torch.Size, "__init__"), (Metadata, "__class__"), (_MEM_FORMAT_ENCODING, "__class__")],
)
def test_nothing_but_a_member_of_an_enumeration_is_asked_of_getattr(checkpoint, of, name):
    index = checkpoint / ".metadata"
    index.write_bytes(pickle.dumps(Asking(of, name)))
    with pytest.raises(ForeignClassError, match=r"\.metadata asks for builtins\.getattr"):
        FileSystemReader(checkpoint).read_metadata()


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_foreign_class_in_the_index_is_refused_by_name_and_does_not_run(
    checkpoint, tmp_path, protocol
):
    index = checkpoint / ".metadata"
    index.write_bytes(pickle.dumps([1, Touching(tmp_path / "ran")], protocol))
    for reading in (lambda: outline(index), FileSystemReader(checkpoint).read_metadata):
        with pytest.raises(ForeignClassError, match=r"\.metadata asks for (posix|os)\.system"):
            reading()
    with pytest.raises(CheckpointException, match=r"asks for posix\.system"):
        loaded(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_what_hides_below_an_admitted_class_is_refused_too(checkpoint):
    # protocol 4 takes dotted names apart: this one leads from torch.Size to a module's globals
    words = b"\x80\x04\x8c\x05torch\x8c\x19Size.__init__.__globals__\x93."
    (checkpoint / ".metadata").write_bytes(words)
    with pytest.raises(ForeignClassError, match=r"asks for torch\.Size\.__init__\.__globals__"):
        FileSystemReader(checkpoint).read_metadata()


def test_a_foreign_class_in_a_state_is_refused_with_its_file_and_does_not_run(tmp_path):
    read_safely()
    folder = saved(tmp_path / "checkpoint", Touching(tmp_path / "ran"))
    with pytest.raises((CheckpointException, CheckpointError)) as error:
        load({"state": None}, storage_reader=FileSystemReader(folder), no_dist=True)
    found = refusal(error.value)
    assert isinstance(found, ForeignClassError)
    assert f"{folder / DATA} asks for posix.system in state" in str(found)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage", pickle.dumps(7), pickle.dumps({})])
def test_an_index_that_is_none_is_one_sentence(checkpoint, content):
    index = checkpoint / ".metadata"
    index.write_bytes(content)
    for reading in (lambda: outline(index), FileSystemReader(checkpoint).read_metadata):
        with pytest.raises(
            CheckpointError, match="is not the whole index of a checkpoint"
        ) as error:
            reading()
        assert str(error.value).startswith(str(index))
        assert "\n" not in str(error.value)


def test_an_index_cut_at_any_place_is_refused(checkpoint):
    index = checkpoint / ".metadata"
    content = index.read_bytes()
    for length in range(0, len(content), 37):
        index.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata is not the whole index"):
            outline(index)


def test_an_index_may_not_name_files_of_other_folders(checkpoint):
    index = checkpoint / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"\x0c__0_0.distcp", b"\x0c../x.distcp_"))
    with pytest.raises(CheckpointError, match=r"names the file '\.\./x\.distcp_', outside of its"):
        outline(index)


def test_a_cut_data_file_is_named(checkpoint):
    data = checkpoint / DATA
    data.write_bytes(data.read_bytes()[:100])
    assert str(told(checkpoint)).startswith(f"{data} cannot be read (")


def test_a_damaged_state_without_a_foreign_name_is_not_called_foreign(tmp_path):
    read_safely()
    folder = saved(tmp_path / "checkpoint", "adam")
    content = (folder / DATA).read_bytes()
    at = content.index(b"\x80\x02")  # the beginning of the state's pickle
    (folder / DATA).write_bytes(content[: at + 2] + b"\xff" + content[at + 3 :])
    with pytest.raises((CheckpointException, CheckpointError)) as error:
        load({"state": None}, storage_reader=FileSystemReader(folder), no_dist=True)
    found = refusal(error.value)
    assert not isinstance(found, ForeignClassError)
    assert str(found).startswith(f"{folder / DATA} cannot be read (UnpicklingError: ")
    assert "it is cut off or damaged" in str(found)


def test_a_missing_data_file_is_named(checkpoint):
    (checkpoint / DATA).unlink()
    assert str(told(checkpoint)).startswith(f"{checkpoint / DATA} cannot be read (FileNotFound")


def test_an_index_may_not_name_what_is_not_a_name_and_its_place_not_numbers(checkpoint):
    index = checkpoint / ".metadata"
    content = pickle.loads(index.read_bytes())  # noqa: S301 - this test has written it
    places = list(content.storage_data.values())
    for changed, said in (
        ({"relative_path": Path(DATA)}, "a place in it is not a name and two numbers"),
        ({"relative_path": 7}, "a place in it is not a name and two numbers"),
        ({"length": "12"}, "a place in it is not a name and two numbers"),
        ({"relative_path": ""}, "names the file '', outside of its folder"),
        ({"relative_path": ".."}, "names the file '..', outside of its folder"),
        ({"relative_path": "a\0b"}, "outside of its folder"),
    ):
        before = dict(vars(places[0]))
        vars(places[0]).update(changed)
        index.write_bytes(pickle.dumps(content))
        vars(places[0]).update(before)
        with pytest.raises(CheckpointError) as error:
            outline(index)
        assert str(error.value).startswith(str(index))
        assert said in str(error.value)


def test_a_common_state_that_would_run_code_or_is_cut_is_refused_by_name(tmp_path):
    path = tmp_path / "common.pt"
    torch.save({"content_metadata": {"singleton_local_shards": False}, "step": 3}, path)
    require_common(path)
    torch.save(Touching(tmp_path / "ran"), path)
    with pytest.raises(ForeignClassError, match=r"common\.pt asks for posix\.system in its state"):
        require_common(path)
    assert not (tmp_path / "ran").exists()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"common\.pt cannot be read \(RuntimeError"):
        require_common(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"common\.pt cannot be read \(FileNotFound"):
        require_common(path)


def test_a_flipped_bit_anywhere_in_a_common_state_is_one_sentence_with_its_file(tmp_path):
    path = tmp_path / "common.pt"
    facts = {"content_metadata": {"a": [1, 2.5, None]}, "rng": torch.arange(9), "name": "adam"}
    torch.save(facts, path)
    content, refused = path.read_bytes(), []
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        try:
            require_common(path)
        except CheckpointError as error:
            refused.append(error)
    assert {error.path for error in refused} == {path}
    for said in map(str, refused):
        assert said.startswith(f"{path} ")
        assert "\n" not in said
        assert "weights_only" not in said
    # some bits do not matter to torch; those that do break its parsers in many ways
    causes = {type(error.__cause__) for error in refused}
    assert {UnicodeDecodeError, pickle.UnpicklingError, RuntimeError} <= causes
    assert causes & {KeyError, IndexError, TypeError, AttributeError}


@pytest.mark.parametrize(
    ("error", "of_content"),
    [
        (FileNotFoundError(2, "no such file"), True),
        (OSError(5, "input/output error"), True),
        (OSError(24, "too many open files"), False),
        (OSError(12, "cannot allocate memory"), False),
        (MemoryError(), False),
        (RuntimeError("PytorchStreamReader failed reading file data.pkl"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (EOFError(), True),
        (KeyError("a mistake of a planner"), False),
    ],
    ids=str,
)
def test_only_what_a_file_holds_is_called_damaged(checkpoint, monkeypatch, error, of_content):
    def fail(*_):
        raise error

    monkeypatch.setattr(DefaultLoadPlanner, "resolve_tensor", fail)
    with pytest.raises(CheckpointException) as raised:
        loaded(checkpoint)
    assert (refusal(raised.value) is not None) == of_content
    if of_content:
        assert str(refusal(raised.value)).startswith(f"{checkpoint / DATA} cannot be read")


def test_what_is_behind_an_error_of_all_ranks_is_found():
    cause = CheckpointError("the file")
    of_all = CheckpointException("read", {1: (cause, None)})
    error = RuntimeError("as NeMo says it")
    error.__context__ = of_all
    assert refusal(error) is cause
    assert is_of_all_ranks(error)
    assert refusal(RuntimeError("another")) is None
    assert not is_of_all_ranks(cause)
