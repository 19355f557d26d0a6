# SPDX-License-Identifier: Apache-2.0
"""The bytes of one training step of a Megatron-Core model, by category, on this rank.

    measured = measure(build, device)
    measured.at_peak["attention"], measured.peak_bytes

`build` returns a model in Megatron-Core's data parallelism, its optimizer and a step. It is called
while bytes are already counted, so everything has a category:

* weights, gradients and optimizer are found by walking the model's parameters, the buffers of its
  data parallelism (or of its FSDP) and the optimizer's state;
* attention and MLP are the two halves of `TransformerLayer`, each with its norm and its residual;
  the input of a layer counts as a saved input; loss is everything after the last layer. The halves
  are entered again if a layer is recomputed, and stay valid for layers that override them;
* communication and host name themselves (`custom_modules.profiling.memory_by_category`).

Peaks are those of the second of two steps, including its optimizer step: the first one allocates
Adam's moments, and reused buffers, which every later step has from the beginning. Weights may be
rounded up to the padded buffers of data parallelism.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils._pytree import tree_leaves

from custom_modules.patching import patched
from custom_modules.profiling.categories import Category, category, retag
from custom_modules.profiling.memory_by_category import MemoryByCategory


@dataclass(frozen=True, kw_only=True)
class Training:
    """Model, optimizer and step to measure."""

    model: Sequence[Any]
    """The model's chunks on this rank, each in Megatron-Core's data parallelism."""
    optimizer: Any
    """As `get_megatron_optimizer` returns it."""
    step: Callable[[], Any]
    """Forward and backward of one global batch, gradients reduced; returns its loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Bytes of one rank."""

    at_peak: dict[Category, int]
    """Bytes by category at the moment when most bytes were live on the device."""
    most: dict[Category, int]
    """The peak of each category, at any moment of the step."""
    peak_bytes: int
    """Peak of the device: the sum of `at_peak` over all but host."""
    peak_in: tuple[Category, bool]
    """The category whose allocation made the peak, and whether in backward."""
    allocator_bytes: int | None
    """The peak that CUDA's allocator saw; None on CPU."""


def measure(build: Callable[[], Training], device: torch.device) -> Measured:
    """Build the training, run two steps, and count the bytes of the second."""
    on_cuda = device.type == "cuda"
    with MemoryByCategory(device) as memory:
        training = build()
        with named_parts(training.model):
            whole_step(training)
            name_state(training)
            memory.restart()
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
            whole_step(training)
    return Measured(
        at_peak=memory.at_peak,
        most=memory.most,
        peak_bytes=memory.peak_bytes,
        peak_in=memory.peak_in,
        allocator_bytes=torch.cuda.max_memory_allocated() if on_cuda else None,
    )


def whole_step(training: Training) -> tuple[Any, Any]:
    """Run one step: gradients cleared, forward and backward, and the optimizer's step.

    Returns the loss, as the training's step does, and the norm of the gradients.
    """
    for chunk in training.model:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    loss = training.step()
    with category("optimizer"):
        _, norm, _ = training.optimizer.step()
    return loss, norm


def name_state(training: Training) -> None:
    """Count weights, gradient buffers and the optimizer's state under their names."""
    # The optimizer's parameters are fp32 copies, or views of the weights, which are named last.
    for tensor in _optimizer_state(training.optimizer):
        _name(tensor, "optimizer")
    for chunk in training.model:
        for name, tensor in _buffers(chunk):
            _name(tensor, name)
        for parameter in chunk.parameters():
            _name(parameter, "weights")


def state_bytes(model: Sequence[Any], optimizer: Any) -> dict[Category, int]:
    """Return the bytes of weights, gradient buffers and the optimizer's state, each storage once.

    The arguments are those of `Training`. A weight that lies in a gradient buffer counts as weight.
    """
    named: list[tuple[Category, Any]] = [
        ("weights", parameter) for chunk in model for parameter in chunk.parameters()
    ]
    named += (pair for chunk in model for pair in _buffers(chunk))
    named += (("optimizer", tensor) for tensor in _optimizer_state(optimizer))
    total: dict[Category, int] = {"weights": 0, "gradients": 0, "optimizer": 0}
    seen = set()
    for name, tensor in named:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total[name] += storage.nbytes()
    return total


def _name(tensor: Any, name: Category) -> None:
    retag(getattr(tensor, "_local_tensor", tensor), name)  # of a DTensor: the part on this rank


def _buffers(chunk: Any) -> Iterator[tuple[Category, Tensor]]:
    """Yield the buffers of data parallelism, or of Megatron-Core's FSDP, with their categories."""
    fsdp = getattr(chunk, "param_and_grad_buffer", None)
    if fsdp is None:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield "gradients", buffer.grad_data
            if buffer.param_data is not None:
                yield "weights", buffer.param_data
        return
    categories: dict[str, Category] = {
        "main_weight_buffer": "optimizer",  # fp32 weights, if the model's are bf16
        "main_grad_buffer": "gradients",
        "model_weight_buffer": "weights",
    }
    for group in fsdp.parameter_groups:
        for attribute, name in categories.items():
            buffer = getattr(group, attribute)
            if buffer is not None:
                yield name, buffer.data


def _optimizer_state(optimizer: Any) -> Iterator[Tensor]:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = [group["params"] for group in one.optimizer.param_groups]
        leaves = tree_leaves([groups, list(one.optimizer.state.values())])
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


@contextmanager
def named_parts(model: Iterable[Any]) -> Iterator[None]:
    """Name the category of the allocations of each part of a model, inside the context."""
    with ExitStack() as stack:
        for module in (module for chunk in model for module in chunk.modules()):
            parts: dict[str, Callable[[Any], Any]] = {}
            if isinstance(module, TransformerLayer):
                parts = {"_forward_attention": _attention, "_forward_mlp": _part("mlp")}
            elif isinstance(module, GPTModel):
                parts = {"_preprocess": _rotation, "_postprocess": _part("loss")}
                norm = module.decoder.final_layernorm
                if norm is not None:
                    stack.enter_context(patched(norm, "forward", _final_norm(norm.forward)))
            for name, named in parts.items():
                stack.enter_context(patched(module, name, named(getattr(module, name))))
        yield


def _part(name: Category) -> Callable[[Any], Any]:
    def named(forward: Any) -> Any:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with category(name):
                return forward(*args, **kwargs)

        return run

    return named


def _attention(forward: Any) -> Any:
    run = _part("attention")(forward)

    @wraps(forward)
    def of_saved(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        retag(hidden_states, "saved inputs")
        return run(hidden_states, *args, **kwargs)

    return of_saved


def _final_norm(forward: Any) -> Any:
    run = _part("loss")(forward)

    @wraps(forward)
    def of_last(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        retag(hidden_states, "loss")
        return run(hidden_states, *args, **kwargs)

    return of_last


def _rotation(preprocess: Any) -> Any:
    @wraps(preprocess)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = preprocess(*args, **kwargs)
        for leaf in tree_leaves(found[1:]):  # the first is the embedded input
            if isinstance(leaf, Tensor):
                retag(leaf, "attention")
        return found

    return run
