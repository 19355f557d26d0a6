# SPDX-License-Identifier: Apache-2.0
"""The printed rank map against the groups that Megatron-Core builds, by NeMo, as a recipe does."""

import re
from collections.abc import Iterator

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from custom_modules.context_parallel.attend import split_group
from custom_modules.cpu.backend import cpu_backend
from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.planner.rank_groups import rank_map
from recipes.planner.workload import Workload
from recipes.spec import cluster as clusters
from recipes.spec.units import K, M
from tests.ranks import Ranks, Server

SIZE = 8
LAYOUTS = (
    "tp8",
    "tp2 dp4",
    "tp4 pp2",
    "dp8",
    "pp2 dp4",
    "pp4 dp2",
    "tp2 pp2 dp2",
    "ring8",
    "ring2 dp4",
    "tp2 ring4",
    "ring2 pp2 dp2",
    "ulysses8",
    "ulysses4 dp2",
    "tp2 ulysses2 dp2",
    "head_chunked4 pp2",
    "tp2 head_chunked4",
    "hybrid4x2",
    "hybrid2x4",
    "hybrid2x2 dp2",
    "tp2 hybrid2x2",
)
OF_EXPERTS = (
    "dp8 ep4",
    "tp2 ulysses2 dp2 ep4",
    "tp2 ulysses2 dp2 ep8 etp1",
    "tp2 pp2 dp2 ep4 etp1",
)
KINDS = ("TP", "CP all-to-all", "CP ring", "DP", "PP", "EP")
SERVER = Server(
    "recipes.nemo2.strategy", "nemo.lightning._strategy_lib", "custom_modules.context_parallel.ring"
)
SECONDS = 100

Groups = dict[str, list[int]]
"""The ranks of the group that a rank is in, by kind."""

pytestmark = pytest.mark.slow


def workload(words: str) -> Workload:
    return Workload(
        card=CARDS["mixtral_8x7b" if "ep" in words else "llama31_8b"],
        seq_length=128 * K,
        tokens_per_batch=4 * M,
        layout=layout_from(words),
        gpus_per_node=SIZE,
    )


def built(sizes: list[tuple[int, int, int, int, int, int]]) -> list[Groups]:
    """Return this rank's groups for each (TP, CP, PP, inner degree, EP, ETP), as NeMo's."""
    from megatron.core import parallel_state
    from nemo.lightning import _strategy_lib

    from recipes.nemo2.strategy import LongContextStrategy

    found = []
    rank, size, store = dist.get_rank(), dist.get_world_size(), c10d._get_default_store()
    for number, (tp, cp, pp, ulysses, ep, etp) in enumerate(sizes):
        dist.barrier()  # a group that closes while another rank still connects breaks there
        dist.destroy_process_group()  # each layout begins as a job does: without any group
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"layout{number}", store), rank=rank, world_size=size
        )
        strategy = LongContextStrategy(
            process_group_backend="gloo",
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            context_parallel_size=cp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            use_gloo_process_groups=False,  # in a job they are beside those of NCCL, the same ranks
        )
        with cpu_backend(force=True):
            _strategy_lib.init_parallel_ranks(size, rank, rank, strategy.parallelism)
            _strategy_lib.init_model_parallel()
            inner = split_group(parallel_state.get_context_parallel_group(), ulysses)
            groups = (
                parallel_state.get_tensor_model_parallel_group(),
                inner.ulysses,
                inner.ring,
                parallel_state.get_data_parallel_group(),
                parallel_state.get_pipeline_model_parallel_group(),
                parallel_state.get_expert_model_parallel_group(),
            )
            found.append(
                {
                    kind: [rank] if group is None else dist.get_process_group_ranks(group)
                    for kind, group in zip(KINDS, groups, strict=True)
                }
            )
            parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def megatron() -> Iterator[dict[str, list[Groups]]]:
    """Return, by layout, the groups of each rank."""
    jobs = [workload(words) for words in LAYOUTS + OF_EXPERTS]
    sizes = [
        (
            job.layout.tp, job.layout.cp.size, job.layout.pp, job.degrees.ulysses,
            job.layout.ep, job.layout.expert_tp,
        )
        for job in jobs
    ]  # fmt: skip
    with Ranks(built, SIZE, sizes, server=SERVER) as ranks:
        by_rank = ranks.results(SECONDS)
    return {words: [found[i] for found in by_rank] for i, words in enumerate(LAYOUTS + OF_EXPERTS)}


def test_there_are_twenty_layouts_of_eight_ranks():
    assert len(set(LAYOUTS)) == 20
    assert {layout_from(words).world_size for words in LAYOUTS} == {SIZE}


@pytest.mark.parametrize("words", LAYOUTS + OF_EXPERTS)
def test_the_rank_map_has_the_groups_that_megatron_builds(megatron, words):
    mapped = {group.kind: group for group in rank_map(workload(words), clusters.load("dgx_h100"))}
    for rank, groups in enumerate(megatron[words]):
        for kind in KINDS:
            expected = [rank]
            if kind in mapped:
                size, stride = mapped[kind].size, mapped[kind].stride
                first = rank - rank // stride % size * stride
                expected = [first + place * stride for place in range(size)]
            assert groups[kind] == expected, f"{kind} of rank {rank}"


@pytest.mark.parametrize("words", LAYOUTS + OF_EXPERTS)
def test_the_line_that_is_printed_names_the_groups_of_rank_0(megatron, words):
    groups = megatron[words][0]
    printed = {}
    for line in map(str, rank_map(workload(words), clusters.load("dgx_h100"))):
        kind, size, listed = re.fullmatch(r"(.+) (\d+): ranks ([\d, .]+) \(.+\)", line).groups()
        printed[kind] = int(size), [int(number) for number in re.findall(r"\d+", listed)]
    assert set(printed) == {kind for kind, ranks in groups.items() if len(ranks) > 1}
    for kind, (size, shown) in printed.items():
        ranks = groups[kind]
        assert size == len(ranks)
        assert shown == (ranks if size <= 4 else [*ranks[:4], ranks[-1]])
