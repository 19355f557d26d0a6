# SPDX-License-Identifier: Apache-2.0
"""Questions to the planner."""

from dataclasses import replace

from recipes.models import CARDS
from recipes.planner.search.request import SearchRequest
from recipes.spec import cluster
from recipes.spec.units import M

H100 = cluster.load("dgx_h100")


def question(**changed) -> SearchRequest:
    """Return a question: 1M tokens of an 8B model on 32 GPUs, but for what is changed."""
    asked = SearchRequest(
        card=CARDS["llama31_8b"], seq_length=M, tokens_per_batch=4 * M, cluster=H100, gpus=32
    )
    return replace(asked, **changed)
