# SPDX-License-Identifier: Apache-2.0
"""Contexts of Transformer Engine for an FP8 layer, or a part of it, that runs twice.

Inside `fp8_autocast` its modules quantise; a backward runs outside of it. So a forward that is run
again in a backward must enter it again, and a checkpointed run must be marked as first or second,
since delayed scaling must use the scales of the first run in the second. These are the contexts
that Transformer Engine's own `checkpoint` enters (transformer_engine/pytorch/distributed.py). Not
tested yet: CPUs do not compute in FP8.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer.transformer_config import TransformerConfig


def first_run(config: TransformerConfig) -> AbstractContextManager[object]:
    """Return the context of the first run of a recomputed layer."""
    return _marked(second=False) if config.fp8 else nullcontext()


@contextmanager
def second_run(config: TransformerConfig, layer_number: int) -> Iterator[None]:
    """Enter the context of the second run of a recomputed layer, by its number from 1."""
    if not config.fp8:
        yield
        return
    with _marked(second=True), again(config, layer_number):
        yield


def again(config: TransformerConfig, layer_number: int) -> AbstractContextManager[object]:
    """Return the context of a part of a layer that a backward runs again."""
    if not config.fp8:
        return nullcontext()
    delayed = config.fp8_recipe == "delayed"  # then one context is for all layers
    context: AbstractContextManager[object] = get_fp8_context(
        config, -1 if delayed else layer_number - 1
    )
    return context


def _marked(*, second: bool) -> AbstractContextManager[object]:
    from transformer_engine.pytorch.distributed import activation_recompute_forward

    marked: AbstractContextManager[object] = activation_recompute_forward(
        activation_recompute=True, recompute_phase=second
    )
    return marked
