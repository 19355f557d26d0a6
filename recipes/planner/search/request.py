# SPDX-License-Identifier: Apache-2.0
"""The question that a search answers."""

from dataclasses import dataclass, replace

from recipes.planner.batch_size import even_batch
from recipes.planner.documents import DocumentLengths
from recipes.planner.plan import HEADROOM, Plan, capped
from recipes.planner.workload import Workload
from recipes.spec.cluster import Cluster
from recipes.spec.layout import Fp8, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.stage import Stage
from recipes.spec.units import GiB


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """A stage and the GPUs to lay it out on."""

    card: ModelCard
    seq_length: int
    tokens_per_batch: int
    cluster: Cluster
    gpus: int
    fp8: Fp8 = Fp8()
    documents: DocumentLengths | None = None

    def workload(self, layout: Layout) -> Workload:
        """Return the workload of a layout."""
        return Workload(
            card=self.card,
            seq_length=self.seq_length,
            tokens_per_batch=self.tokens_per_batch,
            layout=layout,
            gpus_per_node=self.cluster.gpus_per_node,
            documents=self.documents,
        )

    def plan(self, layout: Layout) -> Plan:
        """Return the plan of a layout, its host cap set to what it needs."""
        return capped(self.workload(layout), self.cluster)

    def at_length(self, length: int) -> "SearchRequest":
        """Return the question at another length, with about as many tokens per batch."""
        batch = even_batch(self.tokens_per_batch, length, self.gpus)
        return replace(self, seq_length=length, tokens_per_batch=batch)

    def with_less_memory(self, size: float) -> "SearchRequest":
        """Return the question on GPUs with `size` bytes less, of which the plan counts a share."""
        gpu = self.cluster.gpu
        left = replace(gpu, memory_gib=gpu.memory_gib - size / (1 - HEADROOM) / GiB)
        return replace(self, cluster=replace(self.cluster, gpu=left))


def of_stage(
    card: ModelCard,
    stage: Stage,
    cluster: Cluster,
    *,
    gpus: int,
    fp8: Fp8,
    documents: DocumentLengths | None = None,
) -> SearchRequest:
    """Return the question for a stage of a ladder.

    The lengths of `documents` count if the stage's attention stays within them.
    """
    return SearchRequest(
        card=card,
        seq_length=stage.seq_length,
        tokens_per_batch=stage.tokens_per_batch,
        cluster=cluster,
        gpus=gpus,
        fp8=fp8,
        documents=documents if stage.documents == "within" else None,
    )
