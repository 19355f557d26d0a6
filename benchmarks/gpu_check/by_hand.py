# SPDX-License-Identifier: Apache-2.0
"""A backward pass node by node: autograd's own engine asks the driver for devices."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

Output: TypeAlias = Tensor | GradientEdge


def backward(
    outputs: Sequence[Output] | Output, grads: Sequence[Tensor | None] | Tensor | None = None
) -> None:
    """Call every node behind `outputs` once all nodes after it were called, as the engine does.

    Takes the place of `torch.autograd.backward` in the backward of a recomputed layer too. An
    output without a gradient begins with one.
    """
    _run(outputs, grads, set())


def grad(
    outputs: Sequence[Output] | Output,
    inputs: Sequence[Tensor] | Tensor,
    grad_outputs: Sequence[Tensor | None] | Tensor | None = None,
    *,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of leaves, as `torch.autograd.grad` does, without accumulating them."""
    edges = [_edge(one) for one in _listed(inputs)]
    caught = _run(outputs, grad_outputs, {node for node, _ in edges})
    found = tuple(caught.get(node, {}).get(place) for node, place in edges)
    if not allow_unused and any(one is None for one in found):
        raise RuntimeError("an input was not used in the graph")
    return found


def _run(
    outputs: Sequence[Output] | Output,
    grads: Sequence[Tensor | None] | Tensor | None,
    ends: set[Any],
) -> dict[Any, dict[int, Tensor]]:
    """Run a backward pass; return what arrived at the nodes `ends`, which are not called."""
    given = _listed(outputs)
    pairs = zip(given, [None] * len(given) if grads is None else _listed(grads), strict=True)
    arrived: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    caught: dict[Any, dict[int, Tensor]] = {}
    for output, value in pairs:
        node, place = _edge(output)
        if node is not None:
            _add(arrived[node], place, torch.ones_like(output) if value is None else value)
    waits = _uses(list(arrived))
    ready = [node for node in arrived if not waits[node]]
    while ready:
        node = ready.pop()
        here = arrived.pop(node, {})
        if node in ends:
            caught[node] = here
            continue
        found = _called(node, here)
        for (after, place), value in zip(node.next_functions, found, strict=True):
            if after is None:
                continue
            if value is not None:
                _add(arrived[after], place, _as_input(value, after._input_metadata[place]))
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    return caught


def _edge(output: Output) -> tuple[Any, int]:
    """Return the node that made an output, and which of its outputs that is."""
    if isinstance(output, Tensor):
        if not output.requires_grad:
            return None, 0
        output = get_gradient_edge(output)
    return output.node, output.output_nr


def _listed(given: Any) -> Sequence[Any]:
    return [given] if isinstance(given, (Tensor, GradientEdge)) else given


def _add(there: dict[int, Tensor], place: int, value: Tensor) -> None:
    there[place] = there[place] + value if place in there else value


def _uses(roots: Sequence[Any]) -> dict[Any, int]:
    """Return how many edges lead to each node."""
    uses: dict[Any, int] = defaultdict(int)
    seen, stack = set(roots), list(dict.fromkeys(roots))
    while stack:
        for after, _ in stack.pop().next_functions:
            if after is None:
                continue
            uses[after] += 1
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return uses


def _as_input(value: Tensor, wanted: Any) -> Tensor:
    """Return a gradient as the engine does: summed where the input was broadcast, in its dtype."""
    if value.shape != wanted.shape:
        value = value.sum_to_size(wanted.shape)
    return value if value.dtype == wanted.dtype else value.to(wanted.dtype)


def _called(node: Any, grads: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Return a node's gradients for the nodes after it; none if none has arrived."""
    nothing = (None,) * len(node.next_functions)
    if not grads:
        return nothing
    given = [grads.get(place) for place in range(len(node._input_metadata))]
    with torch.no_grad():
        if isinstance(node, BackwardCFunction):
            return _of_function(node, given)
        found = node(*given)
    return (found if isinstance(found, tuple) else (found,)) or nothing


def _of_function(node: Any, given: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Call the backward of a `torch.autograd.Function`, which has an output for each argument."""
    filled = [
        torch.zeros(wanted.shape, dtype=wanted.dtype, device=wanted.device)
        if value is None  # also where a function would take None: it does not say
        else value
        for value, wanted in zip(given, node._input_metadata, strict=True)
    ]
    found = node.apply(*filled)
    found = found if isinstance(found, tuple) else (found,)
    wanted = [value for value, needed in zip(found, node.needs_input_grad, strict=True) if needed]
    rest = iter(wanted)
    return tuple(None if after is None else next(rest) for after, _ in node.next_functions)
