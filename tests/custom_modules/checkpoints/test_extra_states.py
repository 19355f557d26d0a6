# SPDX-License-Identifier: Apache-2.0
"""FP8 states: what Transformer Engine writes is admitted, anything else does not reach it."""

import io
import os
import pickle
import sys
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from custom_modules.checkpoints.extra_states import what_it_asks
from custom_modules.checkpoints.index import CheckpointError, ForeignClassError
from custom_modules.checkpoints.safe_loading import read_safely, require_common
from recipes.checkpoints.verified import refusal

NAME = "module.decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2"
RECIPE = "transformer_engine.common.recipe"


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_compute_algo: object = "max"


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(False)


@pytest.fixture(autouse=True)
def recipes_of_transformer_engine(monkeypatch):
    """Put the classes above where Transformer Engine has those that its states consist of."""
    module = ModuleType(RECIPE)
    for one in (_FormatHelper, Format, MMParams, DelayedScaling, Float8CurrentScaling):
        monkeypatch.setattr(one, "__module__", RECIPE)
        setattr(module, one.__name__, one)
    for name in ("transformer_engine", "transformer_engine.common", RECIPE):
        monkeypatch.setitem(sys.modules, name, module)


def state(**changed: object) -> dict[str, object]:
    """Return what a linear layer in delayed scaling saves."""
    return {
        "recipe": DelayedScaling(),
        "scale_fwd": torch.ones(3),
        "amax_history_fwd": torch.arange(12.0).reshape(4, 3),
        "extra_fp8_variables": {
            "fp8_checkpoint": True, "num_gemms": 1, "fp8_max_fwd": 448.0, "name": "qkv",
            "local_recipes": [Float8CurrentScaling(), DelayedScaling()],
        },
    } | changed  # fmt: skip


def saved(content: object) -> torch.Tensor:
    """Return a state as Transformer Engine serialises it."""
    return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)


def raw(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Touching:
    """What touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


class Calling:
    """What asks for a call when it is unpickled, and for a state to be set after it."""

    def __init__(self, function: object, *args: object, then: object = None) -> None:
        self.parts = (function, args, then)

    def __reduce__(self) -> tuple:
        return self.parts


@pytest.mark.parametrize(
    "content",
    [
        state(),
        state(recipe=Float8CurrentScaling()),
        {"forward": {"recipe": DelayedScaling(fp8_format=Format.E4M3), "scale": torch.ones(1)}},
        {"scale_inv_fwd": torch.ones(1), "extra_fp8_variables": {}},  # of version 1
    ],
    ids=["delayed", "current", "nested", "without a recipe"],
)
def test_what_transformer_engine_writes_is_admitted(content):
    tensor = saved(content)
    assert what_it_asks(NAME, tensor) is None
    again = pickle.loads(tensor.numpy().tobytes())  # noqa: S301 - as Transformer Engine does
    assert again.keys() == content.keys()


def test_a_tensor_that_a_later_megatron_core_wrote_is_admitted(monkeypatch):
    def safe_load_from_bytes(content: bytes) -> object:
        return torch.load(io.BytesIO(content), weights_only=True)

    later = ModuleType("megatron.core.safe_globals")
    safe_load_from_bytes.__module__ = later.__name__
    safe_load_from_bytes.__qualname__ = "safe_load_from_bytes"
    later.safe_load_from_bytes = safe_load_from_bytes
    monkeypatch.setitem(sys.modules, later.__name__, later)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", safe_load_from_bytes)
    tensor = saved(state())
    assert later.__name__.encode() in tensor.numpy().tobytes()
    assert what_it_asks(NAME, tensor) is None
    del later.safe_load_from_bytes  # as before 0.17, which could not load it
    assert what_it_asks(NAME, tensor) == (
        "asks for megatron.core.safe_globals.safe_load_from_bytes, which Megatron-Core 0.17 and "
        f"later have and this one does not, in {NAME}"
    )


def test_the_empty_states_of_models_without_fp8_are_admitted():
    assert what_it_asks(NAME, None) is None
    assert what_it_asks(NAME, torch.empty(0, dtype=torch.uint8)) is None


def test_formats_by_name_are_admitted_and_getattr_of_anything_else_is_not():
    assert what_it_asks(NAME, saved({"format": Calling(getattr, Format, "HYBRID")})) is None
    for args in ((Format, "__init__"), (DelayedScaling, "HYBRID"), ("word", "HYBRID")):
        asks = what_it_asks(NAME, saved({"format": Calling(getattr, *args)}))
        assert asks == f"asks for builtins.getattr in {NAME}"


def storage_bytes(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def cases(ran: Path) -> dict[str, tuple[torch.Tensor, str]]:
    """Return states that would run code, or could, with what is said of each."""
    from torch._utils import _rebuild_tensor_v2
    from torch.storage import _load_from_bytes

    strange = f"holds {NAME}, which is not what Transformer Engine writes there"
    system, touch = f"asks for posix.system in {NAME}", Touching(ran)
    storage = torch.ones(2)._typed_storage()
    hooks = OrderedDict()
    changed = {"fields": [1]}
    by_memo = b"\x80\x04}\x94(\x8c\x01a" + pickle.dumps(touch)[2:-1] + b"u."
    return {
        "itself": (saved(touch), system),
        "a value": (saved(state(scale_fwd=touch)), system),
        "a field of a recipe": (saved(state(recipe=DelayedScaling(margin=touch))), system),
        "by opcodes": (raw(by_memo), system),
        "a function for a value": (saved(state(recipe=DelayedScaling(margin=len))),
                                   f"asks for builtins.len in {NAME}"),
        "a function that is admitted": (saved(state(scale_fwd=_load_from_bytes)), strange),
        "a class that is admitted": (saved(state(scale_fwd=DelayedScaling)), strange),
        "in the bytes of a storage": (
            saved(state(scale_fwd=Calling(_load_from_bytes, storage_bytes(touch)))), strange,
        ),
        "not the bytes of a storage": (
            saved(state(scale_fwd=Calling(_load_from_bytes, storage_bytes({"a": 1})))), strange,
        ),
        "hooks of a tensor": (
            saved(state(scale_fwd=Calling(
                _rebuild_tensor_v2, storage, 0, (2,), (1,), False, {"hook": 1}
            ))),
            strange,
        ),
        "a state of a tensor": (
            saved(state(scale_fwd=Calling(
                _rebuild_tensor_v2, storage, 0, (2,), (1,), False, hooks, then={"a": 1}
            ))),
            strange,
        ),
        "attributes of a recipe": (
            saved(state(recipe=Calling(DelayedScaling, then=(None, changed)))), strange,
        ),
        "a set": (saved(state(scale_fwd={1, 2})), strange),
        "not a dict": (saved([1, 2]), strange),
        "floats": (torch.ones(3), strange),
        "a stream": (io.BytesIO(b"content"), strange),
        "a list": ([torch.ones(1)], strange),
    }  # fmt: skip


@pytest.mark.parametrize("name", cases(Path()))
def test_what_transformer_engine_does_not_write_is_refused_and_does_not_run(tmp_path, name):
    tensor, said = cases(tmp_path / "ran")[name]
    assert what_it_asks(NAME, tensor) == said
    assert not (tmp_path / "ran").exists()


def test_a_field_that_is_changed_after_it_was_set_is_seen_as_it_was_set():
    # a dict with a function is set as the fields of a recipe, and emptied of it afterwards
    fields = b"}\x94(\x8c\x06margin\x8c\x0dtorch.storage\x8c\x10_load_from_bytes\x93u"
    recipe = b"\x8c\x20transformer_engine.common.recipe\x8c\x0eDelayedScaling\x93)\x81"
    later = b"h\x00\x8c\x06marginK\x00s0"
    content = b"\x80\x04}\x8c\x06recipe" + recipe + fields + b"b" + later + b"s."
    made = pickle.loads(content)["recipe"]  # noqa: S301 - it calls nothing
    assert callable(made.margin)
    assert "is not what Transformer Engine writes" in str(what_it_asks(NAME, raw(content)))


def test_cut_bytes_are_damage_and_not_foreign():
    with pytest.raises(pickle.UnpicklingError):
        what_it_asks(NAME, saved(state())[:-20].clone())


def test_a_function_that_is_given_attributes_is_refused():
    # BUILD with slots sets the default arguments of a function, which a later call would take
    content = b"\x80\x04}\x8c\x01a\x8c\x0dtorch.storage\x8c\x10_load_from_bytes\x93N}\x86bs."
    assert "is not what Transformer Engine writes" in str(what_it_asks(NAME, raw(content)))


class Objects(DefaultSavePlanner):
    """Saves the one value of a list as an object, also where it is a tensor."""

    def transform_object(self, write_item: object, value: list) -> io.BytesIO:
        stream = io.BytesIO()
        torch.save(value[0], stream)
        return stream


def of_megatron(folder: Path, value: object) -> Path:
    """Write a checkpoint with the state of one module."""
    planner, writer = Objects(flatten_state_dict=False), FileSystemWriter(folder)
    save({NAME: [value]}, storage_writer=writer, planner=planner, no_dist=True)
    return folder


def loaded(folder: Path) -> object:
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    content = {NAME: io.BytesIO()}
    load(content, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    return planner.state_dict[NAME]


def test_a_state_in_a_data_file_is_refused_with_its_file_and_does_not_run(tmp_path):
    read_safely()
    bad = saved(Touching(tmp_path / "ran"))
    for number, (value, said) in enumerate(
        (
            ([bad], "asks for posix.system in"),
            ([None, bad], "asks for posix.system in"),
            (bad.reshape(1, -1), "holds module."),  # which would be taken for a list of rows
        )
    ):
        folder = of_megatron(tmp_path / str(number), value)
        with pytest.raises((CheckpointException, CheckpointError)) as error:
            loaded(folder)
        found = refusal(error.value)
        assert isinstance(found, ForeignClassError)
        assert f"{folder / '__0_0.distcp'} {said}" in str(found)
        assert NAME in str(found)
    assert not (tmp_path / "ran").exists()


def test_a_sound_state_in_a_data_file_is_read(tmp_path):
    read_safely()
    tensor = saved(state())
    (found,) = loaded(of_megatron(tmp_path, [tensor]))
    assert torch.equal(found, tensor)
    assert loaded(of_megatron(tmp_path, [None])) == [None]


@pytest.mark.parametrize("nested", [False, True])
def test_a_state_that_hides_in_the_common_file_is_refused(tmp_path, nested):
    path, name = tmp_path / "common.pt", "module.output_layer._extra_state"
    sound = {name: torch.empty(0, dtype=torch.uint8), "step": 3}
    bad = {name: saved(Touching(tmp_path / "ran"))}
    torch.save({"state_dict": [sound]} if nested else sound, path)
    require_common(path)
    torch.save({"state_dict": [bad]} if nested else bad, path)
    with pytest.raises(ForeignClassError, match=r"common\.pt asks for posix\.system in module\."):
        require_common(path)
    assert not (tmp_path / "ran").exists()
