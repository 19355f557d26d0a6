# SPDX-License-Identifier: Apache-2.0
"""A batch's part on a context rank, by the function that each release of Megatron-Core has."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from custom_modules.gpt.megatron_releases import parameters_of


def on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Return this context rank's two chunks of tensors [b, s, ...]."""
    later: dict[str, Any] = {}
    if "is_hybrid_cp" in parameters_of(get_batch_on_this_cp_rank):  # then no group means all ranks
        later = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    return get_batch_on_this_cp_rank(batch, **later)
