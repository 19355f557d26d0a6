# SPDX-License-Identifier: Apache-2.0
"""Answers in CUDA's place: eight GPUs whose tensors have shapes, dtypes and devices but no data.

PyTorch's fake tensors (`FakeTensorMode`) run an operator's shape rules instead of its kernel. What
asks the driver itself is answered here. Needs a build of torch with CUDA, and no GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

GPUS, HOPPER = 8, (9, 0)
BYTES = 80 * 2**30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=BYTES,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
)


class _Stream:
    """A stream in which nothing runs."""

    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, *_: object, **__: object) -> None:
        pass

    wait_stream = wait_event = record = wait

    def synchronize(self) -> None:
        _waited()

    def record_event(self, *_: object) -> "_Stream":
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


def _waited(*_: object) -> None:
    raise AssertionError("the host waits for the device: a stream, event or device is synchronized")


def _nothing() -> Callable[..., None]:
    """Return a function that does nothing; torch.compile wants one of its own for each name."""
    return lambda *_, **__: None


def _answers(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Return functions of torch.cuda by name."""
    major, minor = capability
    properties = SimpleNamespace(**vars(PROPERTIES) | {"major": major, "minor": minor})
    fixed: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": GPUS,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": PROPERTIES.name,
        "mem_get_info": (BYTES, BYTES),
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "memory_stats": {},
        "initial_seed": 0,
    }
    zero = (
        "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved",
    )  # fmt: skip
    nothing = (
        "init", "_lazy_init", "set_device", "empty_cache", "manual_seed",
        "manual_seed_all", "set_rng_state", "set_rng_state_all", "reset_peak_memory_stats",
        "set_per_process_memory_fraction",
    )  # fmt: skip
    found: dict[str, Callable[..., Any]] = {name: _nothing() for name in nothing}
    for name, value in (fixed | dict.fromkeys(zero, 0)).items():
        found[name] = lambda *_, value=value, **__: value
    for name in ("current_stream", "default_stream", "Stream", "Event"):
        found[name] = _Stream
    found["stream"] = lambda _: nullcontext()
    found["synchronize"] = _waited
    found["device"] = lambda _: nullcontext()
    found["get_rng_state"] = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    for name, dtype in (("IntTensor", torch.int32), ("FloatTensor", torch.float32)):
        found[name] = lambda data, dtype=dtype: torch.tensor(data, dtype=dtype, device="cuda")
    return found


def _moved(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the parameters and buffers of a module; fake ones cannot be changed in place."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                changed = change(parameter)
            if changed is not parameter:
                new = torch.nn.Parameter(changed.detach(), requires_grad=parameter.requires_grad)
                new.__dict__.update(parameter.__dict__ | new.__dict__)  # new: its fake device
                each._parameters[name] = new
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = change(buffer)


def _cuda(module: torch.nn.Module, device: object = None) -> torch.nn.Module:
    _moved(module, lambda tensor: tensor.to("cuda:0"))
    return module


def _apply(
    module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    _moved(module, change)
    return module


@contextmanager
def fake_cuda(capability: tuple[int, int] = HOPPER) -> Iterator[FakeTensorMode]:
    """Answer in CUDA's place in this context; its tensors are fake in the mode that it gives.

    All but the compute capability are an H100's.
    """
    import nemo.collections.llm  # noqa: F401  # what it imports must not see what is patched here
    from megatron.core.tensor_parallel import random

    with ExitStack() as stack:

        def patch(owner: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for name, answer in _answers(capability).items():
            patch(torch.cuda, name, answer)
        for name in ("range_push", "range_pop", "mark"):
            patch(torch.cuda.nvtx, name, _nothing())
        patch(fake_tensor, "init_gpu_context", _nothing())
        patch(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
        patch(torch.nn.Module, "cuda", _cuda)
        patch(torch.nn.Module, "_apply", _apply)
        patch(random.CudaRNGStatesTracker, "fork", lambda *_, **__: nullcontext())
        patch(random, "_set_cuda_rng_state", _nothing())
        patch(FakeTensorMode, "avoid_device_init", True)  # it asks whether CUDA is available
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
