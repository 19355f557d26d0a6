# SPDX-License-Identifier: Apache-2.0
"""FP8 states of a checkpoint, admitted only in the form that Transformer Engine writes.

A module of Transformer Engine saves its FP8 scaling, under a name that ends with `_extra_state`, as
a tensor of bytes: a pickle, or nothing:

    {"recipe": DelayedScaling(...), "scale_fwd": Tensor, ..., "extra_fp8_variables": {...}}

Loading unpickles any such tensor that is not empty (`set_extra_state` of Transformer Engine 2.9,
`_decode_extra_state` of Megatron-Core 0.15), also in a model that is trained in bf16: modules know
of FP8 only from their first forward, and a stage in bf16 may begin from one in FP8. So the bytes of
every model are read here first, with a stand-in for each name that Transformer Engine writes and
none for any other. A stand-in does nothing. It refuses arguments that the original would not get,
so an admitted state consists of numbers, strings, tensors, and recipes made of these.
"""

import io
import pickle
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

SUFFIX = "_extra_state"
"""Substring of the names of such states; torch's own."""


class _RefusedError(Exception):
    """A state that Transformer Engine does not write; the message has the name it asks for."""


class _StandIn:
    """Stand-in for an object of torch or Transformer Engine."""

    def __setstate__(self, state: Any) -> None:
        """Refuse: setting attributes of a function or a tensor could change what it does."""
        raise _RefusedError


class _Settings(_StandIn):
    """Stand-in for a recipe or a part of one, which are dataclasses."""

    def __new__(cls) -> "_Settings":
        """Take no arguments: the values come as a state."""
        made = super().__new__(cls)
        made.fields = {}
        return made

    fields: dict[Any, Any]

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            raise _RefusedError
        self.fields |= state  # a copy, as the original makes: the dict may be changed later


class _Bounds(_StandIn):
    """Stand-in for the largest values of a format."""

    def __new__(cls, max_fwd: Any, max_bwd: Any) -> "_Bounds":
        """Take two numbers."""
        if not {type(max_fwd), type(max_bwd)} <= {int, float}:
            raise _RefusedError
        return super().__new__(cls)


class _Format(_StandIn):
    """Stand-in for a member of an enumeration of formats."""

    def __new__(cls, value: Any) -> "_Format":
        """Take the member's value."""
        if type(value) is not _Bounds:
            raise _RefusedError
        return super().__new__(cls)


class _Member(_StandIn):
    """Stand-in for `getattr`, by which Python 3.11.0 saves a member of an enumeration."""

    def __call__(self, of: Any, name: Any) -> _Format:
        if of is not _Format or name not in ("E2M1", "E4M3", "E5M2", "HYBRID"):
            raise _RefusedError("asks for builtins.getattr")
        return _Format(_Bounds(0, 0))


class _Hooks(_StandIn):
    """Stand-in for the empty hooks of a tensor."""


class _Storage(_StandIn):
    """Stand-in for the memory of a tensor."""


class _Tensor(_StandIn):
    """Stand-in for a tensor."""


class _NoHooks(_StandIn):
    """Stand-in for `OrderedDict`."""

    def __call__(self) -> _Hooks:
        return _Hooks()


class _StorageFromBytes(_StandIn):
    """Stand-in for torch's loader of a storage, which would unpickle whatever is in the bytes."""

    def __call__(self, content: Any) -> _Storage:
        if type(content) is not bytes:
            raise _RefusedError
        try:
            storage = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise _RefusedError from error
        if not isinstance(storage, torch.storage.TypedStorage | torch.UntypedStorage):
            raise _RefusedError
        return _Storage()


class _TensorOfStorage(_StandIn):
    """Stand-in for torch's constructor of a tensor."""

    def __call__(
        self, storage: Any, offset: Any, size: Any, stride: Any, gradient: Any, hooks: Any
    ) -> _Tensor:
        if (
            [type(value) for value in (storage, offset, gradient, hooks)]
            != [_Storage, int, bool, _Hooks]
            or {type(size), type(stride)} != {tuple}
            or not {type(length) for length in (*size, *stride)} <= {int}
        ):
            raise _RefusedError
        return _Tensor()


_RECIPE = "transformer_engine.common.recipe"
_LATER = ("megatron.core.safe_globals", "safe_load_from_bytes")
"""Loader of a storage in states written by Megatron-Core 0.17 or later, by module and name."""
_STAND_INS: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _Member(),
    ("collections", "OrderedDict"): _NoHooks(),
    ("torch._utils", "_rebuild_tensor_v2"): _TensorOfStorage(),
    ("torch.storage", "_load_from_bytes"): _StorageFromBytes(),
    _LATER: _StorageFromBytes(),
    (_RECIPE, "Format"): _Format,
    (_RECIPE, "_FormatHelper"): _Bounds,
    **{
        (_RECIPE, name): _Settings
        for name in (
            "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MMParams",
            "MXFP8BlockScaling", "NVFP4BlockScaling", "QParams",
        )
    },
}  # fmt: skip
"""Stand-ins for the names in Transformer Engine's states, by module and name."""


def _has_later() -> bool:
    """Whether this Megatron-Core can load such a storage."""
    module, name = _LATER
    try:
        return hasattr(import_module(module), name)
    except ModuleNotFoundError:
        return False


class _Reader(pickle.Unpickler):
    """Reads into stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name; nothing is imported that the state names."""
        if (module, name) not in _STAND_INS:
            raise _RefusedError(f"asks for {module}.{name}")
        if (module, name) == _LATER and not _has_later():
            raise _RefusedError(
                f"asks for {module}.{name}, which Megatron-Core 0.17 and later have and this one "
                "does not,"
            )
        return _STAND_INS[module, name]


def what_it_asks(name: str, state: Any) -> str | None:
    """Return the part of a module's state that Transformer Engine does not write, or None.

    Raises UnpicklingError for truncated or damaged bytes.
    """
    strange = f"holds {name}, which is not what Transformer Engine writes there"
    if state is None:
        return None
    if type(state) is not Tensor or state.layout != torch.strided or state.is_meta:
        return strange
    if not state.numel():
        return None
    if state.dtype != torch.uint8:
        return strange
    try:
        content = _Reader(io.BytesIO(state.detach().cpu().numpy().tobytes())).load()
        admitted = type(content) is dict and _is_inert(content)
    except _RefusedError as error:
        return f"{error} in {name}" if str(error) else strange
    except Exception as error:  # a pickle that breaks may raise almost anything
        raise pickle.UnpicklingError(f"{name}: {type(error).__name__}: {error}") from error
    return None if admitted else strange


def _is_inert(value: Any) -> bool:
    """Whether a value is of the types that a state may consist of."""
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(_is_inert, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_inert, value))
    if type(value) is _Settings:
        return _is_inert(value.fields)
    return value is None or type(value) in (bool, int, float, str, _Format, _Tensor)
