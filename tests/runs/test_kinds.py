# SPDX-License-Identifier: Apache-2.0
"""The same model trained under every kind of context parallelism, with real Megatron training.

Ranks that a layout does not use are data ranks with the same sequences. Layouts of the same sizes
share their groups, since each initialisation leaves gloo's threads behind.
"""

from itertools import groupby

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_batch_on_this_cp_rank

from custom_modules.attention.documents import Documents
from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.cpu.backend import cpu_backend
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS, LENGTH, BATCH = 5, 64, 2
DOCUMENTS = Documents.of([[1, 13, 29, 1, 17, 3], [31, 33]])
RING = ContextParallelKind(kind="ring")
ULYSSES = ContextParallelKind(kind="ulysses")
HEAD_CHUNKED = ContextParallelKind(kind="head_chunked", heads_per_stage=2)
HYBRID = ContextParallelKind(kind="hybrid", ulysses=2)
HYBRID_CHUNKED = ContextParallelKind(kind="hybrid", ulysses=2, heads_per_stage=2)
CP_2, CP_4 = (RING, ULYSSES, HEAD_CHUNKED), (HYBRID, HYBRID_CHUNKED, ContextParallelKind())
POLICIES = ("across", "within")

Layout = tuple[int, int, ContextParallelKind, str]
"""TP, CP, kind, documents."""
ON_4_RANKS: list[Layout] = [
    (tp, cp, kind, documents)
    for tp, cp, kinds in ((1, 1, (ULYSSES,)), (1, 2, CP_2), (2, 2, CP_2), (1, 4, CP_4))
    for kind in kinds
    for documents in POLICIES
]
ON_8_RANKS: list[Layout] = [(2, 4, HYBRID, "across"), (2, 4, HYBRID_CHUNKED, "within")]


def losses(how: ContextParallelKind, documents: str) -> list[float]:
    """Train in Megatron's groups as they are now and return the loss of each."""
    trained = llamas.ours(
        RopeScaling.base_change(10_000),
        llamas.megatron_weights(llamas.made_up_weights()),
        torch.float32,
        cp=how,
        calculate_per_token_loss=True,
    )
    ddp = DistributedDataParallel(
        trained.config, DistributedDataParallelConfig(use_distributed_optimizer=False), trained
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [ddp]
    )
    draw = torch.Generator().manual_seed(5)
    within = documents == "within"
    positions = DOCUMENTS.position_ids() if within else torch.arange(LENGTH).repeat(BATCH, 1)
    mask = torch.ones(BATCH, LENGTH)
    mask[0, : LENGTH // 3] = 0
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(0, llamas.VOCAB, (BATCH, LENGTH + 1), generator=draw)
        shard = get_batch_on_this_cp_rank(
            {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": mask,
                "position_ids": positions,
            }
        )
        ddp.zero_grad_buffer()
        of_tokens = ddp(
            shard["tokens"],
            shard["position_ids"],
            None,
            labels=shard["labels"],
            packed_seq_params=DOCUMENTS if within else None,
        )
        total = (of_tokens * shard["loss_mask"]).sum()
        total.backward()
        counted = torch.stack((total.detach(), shard["loss_mask"].sum()))
        finalize_model_grads([ddp], counted[1].clone())
        optimizer.step()
        dist.all_reduce(
            counted, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        found.append(float(counted[0] / counted[1]))
    return found


def train(layouts: list[Layout]) -> dict[Layout, list[float]]:
    """Train under each layout; those of the same sizes are neighbours."""
    found = {}
    with cpu_backend(force=True):
        for (tp, cp), alike in groupby(layouts, key=lambda layout: layout[:2]):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp, context_parallel_size=cp
            )
            for layout in alike:
                found[layout] = losses(*layout[2:])
            parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def on_4_ranks():
    """Return the losses by layout, as the first rank has them."""
    return run_ranks(train, 4, ON_4_RANKS)[0]


@pytest.fixture(scope="module")
def on_8_ranks():
    return run_ranks(train, 8, ON_8_RANKS)[0]


@pytest.fixture(scope="module")
def one_rank(on_4_ranks):
    """Return the losses without context or tensor parallelism, by document policy."""
    return {documents: on_4_ranks[1, 1, ULYSSES, documents] for documents in POLICIES}


def described(layout: Layout) -> str:
    tp, cp, how, documents = layout
    chunked = " head-chunked" if how.heads_per_stage and how.kind == "hybrid" else ""
    return f"tp {tp} cp {cp} {how.kind}{chunked} {documents}"


def test_training_moves_the_losses(one_rank):
    assert len(one_rank["across"]) == STEPS
    assert abs(one_rank["across"][-1] - one_rank["across"][0]) > 0.05


def test_documents_kept_apart_are_another_model(one_rank):
    assert abs(one_rank["within"][0] - one_rank["across"][0]) > 1e-3


@pytest.mark.parametrize("layout", ON_4_RANKS[2:], ids=described)
def test_a_kind_gives_the_losses_of_one_rank_at_each_step(on_4_ranks, one_rank, layout):
    assert on_4_ranks[layout] == pytest.approx(one_rank[layout[3]], rel=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ON_8_RANKS, ids=described)
def test_a_hybrid_over_tensor_ranks_gives_the_losses_of_one_rank(on_8_ranks, one_rank, layout):
    assert on_8_ranks[layout] == pytest.approx(one_rank[layout[3]], rel=1e-4)
