# SPDX-License-Identifier: Apache-2.0
"""Named ranges of the parts of a Megatron-Core training step, for the timeline of a profiler.

    with named_parts(model, optimizer, module, mark=mark, others=EXCHANGE):
        step()

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

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Literal, get_args

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

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
Mark = Callable[[str], AbstractContextManager[Any]]
"""Returns a range of a name, which is open while the context is."""


class TorchRange:
    """A range in PyTorch's trace and, with `nvtx`, one in that of Nsight Systems."""

    def __init__(self, name: str, *, nvtx: bool = False) -> None:
        """Name it; it is not open yet."""
        self._record = torch.profiler.record_function(name)
        self._name, self._nvtx = name, nvtx

    def __enter__(self) -> None:
        self._record.__enter__()
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *error: Any) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._record.__exit__(*error)


@contextmanager
def named_parts(
    model: Iterable[Any],
    optimizer: Any,
    module: Any = None,
    *,
    mark: Mark,
    others: Iterable[Other] = (),
) -> Iterator[None]:
    """Open a range around each part of the steps inside the context.

    `model` has the chunks of this rank, `optimizer` is as `get_megatron_optimizer` returns it,
    `module`, if given, has the `data_step`, and `others` are further functions to name.
    """
    backwards = _Backwards(mark)
    with ExitStack() as stack:

        def name(owner: Any, method: str, wrap: Callable[[Any], Any]) -> None:
            stack.enter_context(_replaced(owner, method, wrap))

        name(schedules, "forward_step", _within(mark, "forward"))
        name(schedules, "backward_step", _within(mark, "backward"))
        name(_definer(type(optimizer), "step"), "step", _within(mark, "optimizer"))
        if module is not None:
            name(_definer(type(module), "data_step"), "data_step", _within(mark, "data wait"))
        for owner, function, part in others:
            name(owner, function, _within(mark, part))
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
            name(config, "finalize_model_grads_func", _within(mark, "gradient reduction"))
        yield


class _Backwards:
    """The range of the backward that runs now; one part's ends before another's begins."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._open: tuple[object, AbstractContextManager[Any]] | None = None

    def around(self, part: LayerPart) -> Callable[[Any], Any]:
        def wrap(forward: Any) -> Any:
            @wraps(forward)
            def run(module: Any, *args: Any, **kwargs: Any) -> Any:
                entered = kwargs.get("hidden_states", args[0] if args else None)
                again = torch._C._current_graph_task_id() != -1
                with self._mark(PREFIX + part + (" recompute" if again else "")):
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
            opened = self._mark(f"{PREFIX}{part} backward")
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


def _within(mark: Mark, name: str) -> Callable[[Any], Any]:
    def wrap(function: Any) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with mark(PREFIX + name):
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
