# SPDX-License-Identifier: Apache-2.0
"""Named ranges of the parts of a Megatron-Core training step, for the timeline of a profiler.

    with named_parts(model, optimizer, module, others=EXCHANGE):
        step()
    rows, exposed_seconds = part_times(profiler.events())

| range | opened around |
| --- | --- |
| data wait | the model's `data_step`: the next micro-batch, its shard and its copy to the device |
| forward, backward | Megatron-Core's `forward_step` and `backward_step`, once a micro-batch |
| gradient reduction | what Megatron-Core calls after the last backward: `finalize_model_grads` |
| optimizer | Megatron-Core's optimizer: clipping, update, gather of parameters |
| attention, MLP, loss | the two halves of a layer, each with its norm and residual; the LM head |

Functions of other modules, such as context parallelism's messages, are given as `others`.

A part of a layer has three ranges: `attention`, `attention backward`, and `attention recompute`
where a backward rebuilds it. Autograd runs a backward and does not say which module it is at, so
the backward of a part begins when the gradient of its output is there, and ends with that of its
input. The hooks only look: gradients have the bits that they have without.

Methods are replaced on their classes inside the context and restored after it, so a step that is
not profiled runs the same code as ever.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]  # where events have it from
from torch.profiler import record_function

LayerPart = Literal["attention", "MLP", "loss"]
LAYER_PARTS: tuple[LayerPart, ...] = get_args(LayerPart)
PARTS = (
    "data wait", "forward", "backward", "gradient reduction", "optimizer",
    *(f"{part}{run}" for part in LAYER_PARTS for run in ("", " recompute", " backward")),
)  # fmt: skip
"""Names of all ranges inside a step, but for those of `others`."""
PREFIX = "part: "
"""Begins the name of a range, so that no operator is taken for one."""

Other = tuple[Any, str, str]
"""A module or class, the name of its function, and the name of the range around it."""
_CALL = re.compile(r"cu(da)?[A-Z]\w*")
"""A call of CUDA's runtime or driver, by the name that CUPTI gives it."""


@contextmanager
def named_parts(
    model: Iterable[Any],
    optimizer: Any,
    module: Any = None,
    *,
    others: Iterable[Other] = (),
) -> Iterator[None]:
    """Open a range around each part of the steps inside the context.

    `model` has the chunks of this rank, `optimizer` is as `get_megatron_optimizer` returns it,
    `module`, if given, has the `data_step`, and `others` are further functions to name.
    """
    backwards = _Backwards()
    with ExitStack() as stack:

        def name(owner: Any, method: str, wrap: Callable[[Any], Any]) -> None:
            stack.enter_context(_replaced(owner, method, wrap))

        name(schedules, "forward_step", _within("forward"))
        name(schedules, "backward_step", _within("backward"))
        name(_definer(type(optimizer), "step"), "step", _within("optimizer"))
        if module is not None:
            name(_definer(type(module), "data_step"), "data_step", _within("data wait"))
        for owner, function, part in others:
            name(owner, function, _within(part))
        layers: dict[tuple[type, str], LayerPart] = {}
        configs: dict[int, Any] = {}
        for each in (each for chunk in model for each in chunk.modules()):
            methods: dict[str, LayerPart] = {}
            if isinstance(each, TransformerLayer):
                methods = {"_forward_attention": "attention", "_forward_mlp": "MLP"}
            elif isinstance(each, GPTModel):
                methods = {"_postprocess": "loss"}
                if getattr(each.config, "finalize_model_grads_func", None) is not None:
                    configs[id(each.config)] = each.config
            layers |= {(_definer(type(each), method), method): of for method, of in methods.items()}
        for (owner, method), of_layer in layers.items():
            name(owner, method, backwards.around(of_layer))
        for config in configs.values():
            name(config, "finalize_model_grads_func", _within("gradient reduction"))
        yield


class _Backwards:
    """The range of the backward that runs now; one part's ends before another's begins."""

    def __init__(self) -> None:
        self._open: tuple[object, AbstractContextManager[Any]] | None = None

    def around(self, part: LayerPart) -> Callable[[Any], Any]:
        def wrap(forward: Any) -> Any:
            @wraps(forward)
            def run(module: Any, *args: Any, **kwargs: Any) -> Any:
                entered = kwargs.get("hidden_states", args[0] if args else None)
                again = torch._C._current_graph_task_id() != -1
                with record_function(PREFIX + part + (" recompute" if again else "")):
                    result = forward(module, *args, **kwargs)
                self._follow(part, entered, result[0] if isinstance(result, tuple) else result)
                return result

            return run

        return wrap

    def _follow(self, part: LayerPart, entered: Any, left: Any) -> None:
        """Open a range in the backward between the gradients of an output and of its input."""
        if not all(isinstance(t, Tensor) and t.requires_grad for t in (entered, left)):
            return
        token = object()

        def begin(_: Tensor) -> None:
            self._end()
            opened = record_function(f"{PREFIX}{part} backward")
            opened.__enter__()
            self._open = token, opened

        def end(_: Tensor) -> None:
            if self._open is not None and self._open[0] is token:
                self._end()

        left.register_hook(begin)
        entered.register_hook(end)

    def _end(self) -> None:
        if self._open is not None:
            opened, self._open = self._open[1], None
            opened.__exit__(None, None, None)


def _within(name: str) -> Callable[[Any], Any]:
    def wrap(function: Any) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(PREFIX + name):
                return function(*args, **kwargs)

        return run

    return wrap


def _definer(kind: type, method: str) -> type:
    """Return the class that a method of `kind` is defined in."""
    return next(owner for owner in kind.__mro__ if method in vars(owner))


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace what `owner` itself has under a name, and restore exactly that."""
    before = vars(owner)[name]
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def part_times(events: Sequence[Any]) -> tuple[list[dict[str, Any]], float | None]:
    """Return the parts by their time, and the seconds in which NCCL's kernels ran alone.

    The time of a part is `host_seconds`, while its range was open, and on a GPU `device_seconds`:
    of the kernels that were launched meanwhile, by any thread, since autograd launches those of a
    backward from its own. A kernel has the number of the call of CUDA that launched it. Parts lie
    in each other and kernels overlap, so times do not add up to those of the steps.
    """
    host = [each for each in events if each.device_type == DeviceType.CPU]
    kernels = [
        each
        for each in events
        if each.device_type != DeviceType.CPU and not each.is_user_annotation
    ]
    calls = {each.id: each.time_range.start for each in host if _CALL.fullmatch(each.name)}
    launched = sorted(
        (calls[each.id], each.time_range.elapsed_us()) for each in kernels if each.id in calls
    )
    starts = [start for start, _ in launched]
    sums = list(accumulate((duration for _, duration in launched), initial=0.0))
    rows: dict[str, dict[str, Any]] = {}
    for each in (each for each in host if each.name.startswith(PREFIX)):
        name = each.name.removeprefix(PREFIX)
        zero = {"name": name, "calls": 0, "host_seconds": 0.0}
        row = rows.setdefault(name, zero | ({"device_seconds": 0.0} if kernels else {}))
        row["calls"] += 1
        row["host_seconds"] += each.time_range.elapsed_us() / 1e6
        if kernels:
            first = bisect_left(starts, each.time_range.start)
            last = bisect_left(starts, each.time_range.end)
            row["device_seconds"] += (sums[last] - sums[first]) / 1e6
    by = "device_seconds" if kernels else "host_seconds"
    alone = _covered(kernels) - _covered(k for k in kernels if not k.name.startswith("nccl"))
    return sorted(rows.values(), key=lambda row: -row[by]), alone / 1e6 if kernels else None


def _covered(kernels: Iterable[Any]) -> float:
    """Return the microseconds in which at least one of some kernels ran."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted((each.time_range.start, each.time_range.end) for each in kernels):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
