# SPDX-License-Identifier: Apache-2.0
"""Categories of memory, declared where it is allocated.

    with category("host"):
        buffer = torch.empty(size, pin_memory=True)
    retag(attention_out, "saved inputs")

Storages allocated inside `category` are counted under that name, the innermost one if nested.
`retag` moves the whole storage of a tensor to another name, if it is allocated as one thing and
kept as another. Both cost one check of an empty list unless a counter is active
(`custom_modules.profiling.memory_by_category`), so modules may call them in every step.

| category | content |
| --- | --- |
| weights | parameters, in the model's dtype |
| gradients | the buffers that a step's gradients are summed in |
| optimizer | Adam's moments, and fp32 weights where the model's are bf16 |
| saved inputs | inputs of layers, and other tensors that recompute keeps on the device |
| attention | norm, projections, kernel and residual of attention, forward and backward |
| mlp | the same of the MLP |
| loss | final norm, LM head and cross-entropy |
| communication | receive buffers of collectives and messages, while the calling module runs |
| host | pinned buffers, and everything else that is not on the device |
| other | the unclaimed rest: embedding, tokens, positions, temporaries of the step itself |

The name is process-wide on purpose: autograd's threads run backward on behalf of the one that waits
for them. Categories have no effect on what is computed.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol, get_args

from torch import Tensor

Category = Literal[
    "weights", "gradients", "optimizer", "saved inputs", "attention", "mlp", "loss",
    "communication", "host", "other",
]  # fmt: skip
CATEGORIES: tuple[Category, ...] = get_args(Category)


class Counter(Protocol):
    """Counter of bytes by category."""

    def category(self, name: Category) -> AbstractContextManager[None]:
        """Count the allocations inside the context under a name."""

    def retag(self, tensor: Tensor, name: Category) -> None:
        """Count the storage of a tensor under another name from now on."""


_counters: list[Counter] = []
_UNCOUNTED = nullcontext()


def category(name: Category) -> AbstractContextManager[None]:
    """Return a context in which storages are allocated for `name`."""
    return _counters[-1].category(name) if _counters else _UNCOUNTED


def retag(tensor: Tensor, name: Category) -> None:
    """Count the storage of `tensor` as one for `name` from now on."""
    if _counters:
        _counters[-1].retag(tensor, name)


@contextmanager
def counting_with(counter: Counter) -> Iterator[None]:
    """Pass every `category` and `retag` inside to `counter`; if nested, the innermost gets it."""
    _counters.append(counter)
    try:
        yield
    finally:
        _counters.remove(counter)
