# SPDX-License-Identifier: Apache-2.0
"""Megatron's dispatcher of tokens to experts, answered as if each expert got as many.

How many tokens an expert gets is data, which fake tensors do not have. Megatron-Core copies the
counts to the host in each layer and waits for them, and picks the tokens of an expert by a mask.
Here the counts are even and tokens are picked by indices; everything else is Megatron's: router,
gather and scatter of tensor ranks, experts, the sum of their outputs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.engine_in_python import gemm

WAIT = "tokens of the experts"


@contextmanager
def even_experts() -> Iterator[list[str]]:
    """Answer with even counts in this context; give the waits in their order."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    waits: list[str] = []

    def counted(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point != self.cuda_dtoh_point:
            return tokens_per_expert
        waits.append(WAIT)
        held = self.num_out_tokens * self.tp_size
        if self.input_splits is not None:  # experts are divided over ranks
            self.input_splits = self.output_splits = _even(self.num_out_tokens, self.ep_size)
        if self.output_splits_tp is not None:
            self.output_splits_tp = _even(held, self.tp_size)
        self.num_global_tokens_per_local_expert = _even(
            held, self.tp_size * self.ep_size * self.num_local_experts
        ).reshape(-1, self.num_local_experts)
        return self.num_global_tokens_per_local_expert.sum(0)

    replaced = {"permute": _picked, "sort_chunks_by_idxs": _sorted}
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(token_dispatcher, name, function))
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
        stack.enter_context(mock.patch.object(dispatcher, "_maybe_dtoh_and_synchronize", counted))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", _of_the_router))
        yield waits


def _even(whole: int, parts: int) -> Any:
    """Return counts that differ by at most one; what asks for a list takes an array's too."""
    each, rest = divmod(whole, parts)
    return np.array([each + (part < rest) for part in range(parts)])


def _picked(
    tokens: Tensor, routing_map: Tensor, probs: Tensor, num_out_tokens: int, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [n, h], their probabilities [n] and indices, as many as are sent."""
    places = torch.zeros(num_out_tokens, dtype=torch.int64, device=tokens.device)
    return tokens.index_select(0, places), probs.T.flatten().index_select(0, places), places


def _sorted(
    input: Tensor, split_sizes: Any, sorted_idxs: Tensor, probs: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the chunks in reversed order: which one comes first is of no matter here."""
    sizes = split_sizes.tolist()

    def turned(whole: Tensor) -> Tensor:
        return torch.cat(torch.split(whole, sizes)[::-1])

    return turned(input), None if probs is None else turned(probs)


def _of_the_router(
    first: Tensor, second: Tensor, out_dtype: torch.dtype, layout: str = "TN", **given: Any
) -> tuple[Tensor | None, ...]:
    """Return a product of operands that may differ in dtype, as cuBLAS does."""
    return gemm(first.to(out_dtype), second.to(out_dtype), None, out_dtype, layout=layout, **given)
