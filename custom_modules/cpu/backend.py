# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core on CPU under gloo: one context that handles every assumption of CUDA.

Megatron-Core and NeMo name CUDA in three ways: they pass `device="cuda"` (or the result of
`torch.cuda.current_device()`) to factory functions, they call `torch.cuda` for streams, events,
memory figures and random state, and they compare `Tensor.type()` with `"torch.cuda.FloatTensor"`.
`cpu_backend()` handles all three while it is entered:

* a `TorchFunctionMode` rewrites CUDA devices to CPU in every torch call, drops `pin_memory`, and
  gives `Tensor.type()` the CUDA name (gradient clipping and the bf16 optimizer assert on it);
* the functions of `torch.cuda` that would initialise a driver are replaced by ones that do
  nothing or answer for the CPU; streams and events have no effect, since CPU code is in order;
* functions that Megatron compiles for a GPU (such as `squared_relu`) run uncompiled, since
  torch's compiler asks for properties of the device;
* Megatron's random-state tracker keeps the CPU generator's state instead of CUDA's;
* the optimizers use torch's operators where Transformer Engine is installed too
  (`custom_modules.cpu.plain_kernels`), and the distributed one keeps torch's Adam, whose
  checkpoints need `custom_modules.cpu.torch_adam`;
* the dispatcher of tokens to experts gets its counts as arrays, as from a GPU, and gathers shards
  of different sizes (`custom_modules.cpu.uneven_shards`);
* gloo's groups share a device, and so a thread (`custom_modules.cpu.gloo_device`).

The context can be nested, and it restores everything on exit. It refuses to start if CUDA is
available, unless `force` is set: a run on a GPU machine must ask for the CPU. It does not change
results: fp32 and bf16 run as torch runs them on CPU.

Limits: CUDA graphs, Transformer Engine and FP8 have no CPU counterpart; asynchronous checkpoints
copy nothing to pinned memory. The mode is active in the thread that entered it, which is where
Megatron runs forward and, on CPU, backward.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from custom_modules.cpu.gloo_device import one_gloo_device
from custom_modules.cpu.plain_kernels import plain_kernels
from custom_modules.cpu.torch_adam import sharded_torch_adam
from custom_modules.cpu.uneven_shards import uneven_shards
from custom_modules.patching import patched

CPU = torch.device("cpu")
_TO, _PIN_MEMORY, _TYPE = torch.Tensor.to, torch.Tensor.pin_memory, torch.Tensor.type


@contextmanager
def cpu_backend(*, force: bool = False) -> Iterator[None]:
    """Run Megatron-Core on CPU inside this context.

    Raises RuntimeError if CUDA is available and `force` is not set.
    """
    if torch.cuda.is_available() and not force:
        raise RuntimeError(
            "the CPU backend was started on a machine with CUDA; request it with device cpu"
        )
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    with ExitStack() as stack:
        for name, stand_in in _TORCH_CUDA.items():
            stack.enter_context(patched(torch.cuda, name, stand_in))
        stack.enter_context(patched(torch.Tensor, "cuda", _stay))
        stack.enter_context(patched(torch.nn.Module, "cuda", _stay))
        stack.enter_context(patched(megatron_random, "_get_cuda_rng_state", _rng_state))
        stack.enter_context(patched(megatron_random, "_set_cuda_rng_state", _set_rng_state))
        stack.enter_context(patched(token_dispatcher, "maybe_move_tensor_to_cpu", _counted))
        stack.enter_context(uneven_shards())
        stack.enter_context(plain_kernels())
        stack.enter_context(sharded_torch_adam())
        stack.enter_context(one_gloo_device())
        stack.enter_context(patched(torch.autograd, "_engine_run_backward", _run_backward))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_CudaNamesMeanCpu())
        yield


class _CudaNamesMeanCpu(TorchFunctionMode):
    """Rewrite CUDA devices to CPU and give `Tensor.type()` the CUDA name."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if kwargs:
            kwargs = dict(kwargs)
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if func is _TO:
            if len(args) > 1 and _is_cuda(args[1]):
                args = (args[0], CPU, *args[2:])
        elif func is _PIN_MEMORY:
            return args[0]
        elif func is _TYPE and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs) if kwargs else func(*args)


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    with _CudaNamesMeanCpu():  # torch leaves the mode while it handles backward()
        return _engine_run_backward(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int)  # a bare index is CUDA's


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _counted(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _Stream:
    """A stream without effect: CPU work is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return event or _Event()


class _Event:
    """A point in time, for timers that measure between two events."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter()

    def record(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        """Return milliseconds, as `torch.cuda.Event` does."""
        return (end.seconds - self.seconds) * 1000

    def query(self) -> bool:
        return True

    wait = synchronize = _nothing


def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def _answering(value: Any) -> Callable[..., Any]:
    """Return a function that takes any arguments and returns `value`; torch's compiler keeps one
    rule per function, so names must not share one."""
    return lambda *args, **kwargs: value


_TORCH_CUDA: dict[str, Any] = {
    "Stream": _Stream,
    "Event": _Event,
    "current_stream": lambda *args: _Stream(),
    "default_stream": lambda *args: _Stream(),
    "stream": lambda stream: nullcontext(),
    "get_rng_state": lambda *args: torch.get_rng_state(),
    "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    "manual_seed": _manual_seed,
    "is_available": _answering(False),  # a CUDA build asks device_count, where Lightning has it so
    "is_initialized": _answering(True),
    "device_count": _answering(1),  # NeMo seeds Megatron's generators if there is a device
    **{
        name: _answering(0)
        for name in (
            "current_device",
            "memory_allocated",
            "memory_reserved",
            "max_memory_allocated",
            "max_memory_reserved",
        )
    },
    **{
        name: _answering(None)
        for name in (
            "set_device",
            "synchronize",
            "empty_cache",
            "ipc_collect",
            "reset_peak_memory_stats",
        )
    },
}
