# SPDX-License-Identifier: Apache-2.0
"""Differences between Megatron-Core 0.15.3 and 0.17 to 0.19 for the modules of this folder.

Each difference is read from what Megatron-Core passes or defines, never from its version number:
docs/megatron_versions.md lists them.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from megatron.core.utils import WrappedTensor
from torch import Tensor


def require_unset(later: Mapping[str, Any], *, but: str | None = None) -> None:
    """Raise ValueError for an argument of a later Megatron-Core that is set; `but` may be.

    Megatron-Core 0.17 and later pass a `padding_mask` to every layer, for the router of experts.
    """
    if given := [name for name, value in later.items() if value is not None and name != but]:
        raise ValueError(
            f"long-context models do not take {', '.join(given)}; leave tokens out of the loss "
            "with loss_mask, and padding out of the batch"
        )


def preprocessed(
    decoder_input: WrappedTensor | None, table: Tensor, later: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return what `GPTModel.forward` takes from `_preprocess`, which `later` was passed to.

    Five values, of which the last three are for inference; then the padding mask, from the release
    on that passes one.
    """
    five = (decoder_input, table, None, None, None)
    return (*five, later["padding_mask"]) if "padding_mask" in later else five


def submodules_of(mlp: Any) -> Any:
    """Return the submodules in the spec of an MLP or of experts, to be changed in place.

    From 0.18 on the spec is a `functools.partial` of the function that builds the module.
    """
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


@cache
def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters, by which releases are told apart."""
    return frozenset(inspect.signature(function).parameters)
