# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step: published points, sums written out, and what physics demands."""

from dataclasses import replace

import pytest

from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.models import CARDS
from recipes.models.llama import LLAMA2_7B, LLAMA3_8B, LLAMA31_8B
from recipes.models.mistral import MIXTRAL_8X7B
from recipes.notation.layout import layout_from
from recipes.planner.time import time
from recipes.planner.workload import FULLEST_EXPERTS, Workload
from recipes.spec import cluster
from recipes.spec.efficiency import HOPPER, NEMO_2024, Efficiency
from recipes.spec.layout import ContextParallel, Fp8, Layout
from recipes.spec.units import K, M

H100 = cluster.load("dgx_h100")
FULL, KEPT = Recompute(kind="full"), Recompute(kind="kept_attention")
PEAK = Efficiency(matmul=1, attention_forward=1, attention_backward=1, memory=1, nvlink=1)


def workload(card=LLAMA31_8B, *, seq=128 * K, batch=4 * M, **layout) -> Workload:
    given = Layout(**layout)
    return Workload(
        card=card, seq_length=seq, tokens_per_batch=batch, layout=given, gpus_per_node=8
    )


def test_an_interleaved_pipeline_fills_sooner_and_sends_more():
    given = {"tp": 4, "dp": 2, "batch": 32 * 8 * K, "seq": 8 * K}
    plain, two, four = (time(workload(**given, pp=8, vpp=vpp), H100) for vpp in (1, 2, 4))
    saved = plain.categories["PP"] - two.categories["PP"]
    bubble = 7 * plain.micro_batch  # a little less: the last stage alone has the LM head
    assert 0.6 * bubble / 2 < saved < bubble / 2
    assert two.categories["PP"] - four.categories["PP"] < 0.6 * saved
    for name in ("matmul", "attention", "TP", "DP", "optimizer"):
        assert two.categories[name] == plain.categories[name]


@pytest.mark.parametrize(
    ("seq", "tp", "cp", "dp", "tokens_per_gpu_second"),
    [
        (16 * K, 2, 1, 8, 10_090),
        (64 * K, 4, 2, 8, 4_022),
        (128 * K, 4, 4, 8, 2_258),
        (256 * K, 4, 8, 8, 1_215),
        (1024 * K, 8, 32, 4, 317),
    ],
)
def test_nemo_s_published_rates_of_llama_2(seq, tp, cp, dp, tokens_per_gpu_second):
    given = {"tp": tp, "cp": ContextParallel.ring(cp), "dp": dp, "fp8": Fp8(recipe="delayed")}
    found = time(workload(LLAMA2_7B, seq=seq, **given), replace(H100, efficiency=NEMO_2024))
    assert found.tokens_per_gpu_second == pytest.approx(tokens_per_gpu_second, rel=0.25)


def test_the_published_rate_of_llama_3_at_8k():
    given = {"dp": 8, "sharding": "parameters", "fp8": Fp8(recipe="tensorwise")}
    found = time(workload(LLAMA3_8B, seq=8 * K, batch=128 * 8 * K, **given), H100)
    assert found.tokens_per_gpu_second == pytest.approx(14_451, rel=0.25)


@pytest.mark.parametrize(
    ("card", "seq", "sequences", "words", "tokens_per_gpu_second"),
    [
        ("llama3_70b", 8 * K, 256, "tp4 pp8 dp2 fp8:tensorwise", 1_664),
        ("llama31_405b", 8 * K, 1536, "tp8 ring2 pp8 dp8 fp8:tensorwise", 328),
    ],
)
def test_published_rates_that_nothing_was_fitted_to(
    card, seq, sequences, words, tokens_per_gpu_second
):
    asked = Workload(
        card=CARDS[card], seq_length=seq, tokens_per_batch=sequences * seq,
        layout=layout_from(words), gpus_per_node=8,
    )  # fmt: skip
    found = time(asked, H100).tokens_per_gpu_second
    # Pipelines are interleaved in the published runs, and not here.
    assert found == pytest.approx(tokens_per_gpu_second, rel=0.26)


def test_products_and_attention_at_peak_rates_added_up_by_hand():
    found = time(workload(seq=128 * K, batch=128 * K), replace(H100, efficiency=PEAK)).categories
    matrices = LLAMA31_8B.matmul_parameters  # no embedding, the LM head with it
    assert found["matmul"] == pytest.approx(6 * matrices * 128 * K / 989e12)
    # causal: 2 A S of a forward, 5/2 of that backward, where the model has 4 A S
    assert found["attention"] == pytest.approx(7 * 32 * 4096 * (128 * K) ** 2 / 989e12)
    assert found["recompute"] == found["TP"] == found["CP"] == found["PP"] == found["DP"] == 0


def test_mfu_is_causal_and_counts_no_recompute():
    plain, full = (time(workload(recompute=one), H100) for one in (Recompute(), FULL))
    flops = LLAMA31_8B.flops_per_token(128 * K)
    assert plain.mfu == pytest.approx(plain.tokens_per_gpu_second * flops / 989e12)
    assert full.mfu / plain.mfu == pytest.approx(plain.step / full.step)
    assert full.step > plain.step


def test_heads_of_64_take_longer_by_the_share_of_their_rate():
    small = replace(LLAMA31_8B, heads=64, kv_heads=16, head_dim=64)
    of = [time(workload(card=card), H100).categories["attention"] for card in (LLAMA31_8B, small)]
    assert of[0] / of[1] == pytest.approx(HOPPER.attention_small_heads)


def test_causes_add_up_and_no_cause_is_negative():
    found = time(workload(tp=2, cp=ContextParallel.hybrid(ulysses=4, ring=2), pp=2, dp=4), H100)
    assert sum(found.categories.values()) == found.step
    assert min(found.categories.values()) >= 0
    assert found.tokens_per_gpu_second == pytest.approx(4 * M / found.step / 128)


def test_kept_attention_spares_what_full_recompute_runs_again():
    full, kept = (time(workload(recompute=one), H100).categories for one in (FULL, KEPT))
    forward = 2 * 32 * 4096 * 128 * K * 4 * M / (989e12 * HOPPER.attention_forward)
    assert full["recompute"] - kept["recompute"] == pytest.approx(forward)


def test_a_tiled_mlp_costs_nothing_where_its_layer_is_rebuilt_and_a_forward_where_not():
    tiles = Tiling(mlp=True)
    again = [
        time(workload(recompute=one, tiling=tiling), H100).categories["recompute"]
        for one in (FULL, Recompute())
        for tiling in (Tiling(), tiles)
    ]
    assert again[0] == again[1]
    assert 0 == again[2] < again[3]


def test_the_bubble_shrinks_with_micro_batches():
    few, many = (time(workload(pp=4, batch=n * 128 * K), H100) for n in (4, 32))
    assert few.categories["PP"] / few.step > many.categories["PP"] / many.step


def test_the_last_stage_of_a_pipeline_has_the_whole_head_and_sets_the_pace():
    card, tokens = LLAMA31_8B, 128 * K
    at_peak = replace(H100, efficiency=PEAK)
    found = time(workload(pp=4, batch=32 * tokens), at_peak).categories
    head = card.vocab * card.hidden
    stage = (card.matmul_parameters - head) / 4 + head
    assert found["matmul"] == pytest.approx(32 * 6 * stage * tokens / 989e12)
    fill = 3 * (6 * (stage - head) * tokens + 7 * 8 * 4096 * tokens**2) / 989e12
    sent = 32 * 2 * tokens * card.hidden * 2 / 450e9
    through_memory = found["PP"] - fill - sent
    assert 0 < through_memory < 0.05 * found["PP"]


def test_a_stage_of_heads_is_never_free():
    for recompute in (Recompute(), KEPT, FULL):
        for seq in (8 * K, 128 * K, M):
            plain, chunked = (
                time(workload(seq=seq, cp=cp, recompute=recompute), H100).step
                for cp in (ContextParallel.ulysses(8), ContextParallel.head_chunked(8))
            )
            assert plain < chunked


def test_head_chunked_attention_rebuilds_its_projection_once_beside_what_recompute_does():
    rebuilt = {}
    for name, recompute in {"none": Recompute(), "kept": KEPT, "full": FULL}.items():
        for cp in (ContextParallel.ulysses(1), ContextParallel.head_chunked(1)):
            found = time(workload(cp=cp, batch=128 * K, recompute=recompute), H100).categories
            rebuilt[name, cp.how.kind] = found["recompute"]
    card = LLAMA31_8B
    rows = (card.heads + 2 * card.kv_heads) * card.head_dim
    product = 2 * 128 * K * card.hidden * rows * card.layers / (989e12 * HOPPER.matmul)
    assert rebuilt["none", "head_chunked"] == pytest.approx(product)
    assert rebuilt["kept", "head_chunked"] == pytest.approx(rebuilt["kept", "ulysses"])
    more = rebuilt["full", "head_chunked"] - rebuilt["full", "ulysses"]
    assert more == pytest.approx(product)


def test_experts_gather_each_token_as_often_as_it_goes_to_one():
    dense, experts = (
        time(workload(card, seq=16 * K, batch=16 * K, tp=4), H100).categories["TP"]
        for card in (LLAMA3_8B, MIXTRAL_8X7B)
    )
    message = 16 * K * 4096 * 2 * 3 / 4 / (450e9 * HOPPER.nvlink)
    assert dense == pytest.approx(message * (10 * 32 + 3))
    assert experts == pytest.approx(message * ((5 + 4 * 2) * 32 + 3))


def test_tokens_go_to_divided_experts_and_back_and_are_gathered_only_over_the_tp_of_experts():
    def of(**layout):
        return time(
            workload(MIXTRAL_8X7B, seq=16 * K, batch=32 * K, tp=4, dp=2, **layout), H100
        ).categories

    link = 450e9 * HOPPER.nvlink
    shard = 16 * K / 4 * 4096 * 2
    sent = shard * FULLEST_EXPERTS
    assert of(ep=8, etp=1)["EP"] == pytest.approx(4 * 2 * sent * 32 * 7 / 8 / link)
    assert of(ep=2)["EP"] == pytest.approx(4 * 2 * sent * 32 / 2 / link)
    assert "EP" not in of()
    assert of(ep=8, etp=1)["TP"] == pytest.approx(shard * 3 * (5 * 32 + 3) / link)
    of_experts = shard * 3 * 4 * 2 * 32 / link
    assert of(ep=2)["TP"] - of()["TP"] == pytest.approx(of_experts * (FULLEST_EXPERTS - 1))
    assert 1.2 < of(ep=2)["matmul"] / of()["matmul"] < 1.25  # of attention and LM head not
    full = of(ep=2, recompute=Recompute(kind="full"))
    assert full["EP"] == pytest.approx(6 / 4 * of(ep=2)["EP"])


def test_gradients_go_over_every_port_of_a_node():
    one, two = (
        time(workload(LLAMA3_8B, seq=8 * K, batch=dp * 8 * K, dp=dp, sharding="parameters"), H100)
        for dp in (8, 16)
    )
    assert two.categories["DP"] < 0.2 * two.step
    assert two.tokens_per_gpu_second > 0.8 * one.tokens_per_gpu_second


def test_an_all_to_all_beyond_the_fast_link_is_waited_for_longer():
    inside, across = (
        time(workload(cp=ContextParallel.ulysses(8), tp=tp), H100).categories["CP"] for tp in (1, 2)
    )
    assert across > inside


def test_a_ring_hides_under_attention_at_a_long_sequence_and_not_at_a_short_one():
    short, long = (
        time(workload(seq=seq, batch=M, cp=ContextParallel.ring(16)), H100).categories["CP"]
        for seq in (16 * K, M)
    )
    assert long == 0 < short


def test_offload_is_hidden_by_attention_at_a_million_tokens_and_not_over_a_slow_link():
    away = {"recompute": FULL, "offload": Offload(tensors="inputs", cap_gib=1e6)}
    million = workload(seq=M, **away)
    slow = replace(H100, host_link_gbps=0.05)
    assert time(million, H100).categories["copies"] == 0
    assert time(million, slow).categories["copies"] > 0


def test_adam_on_the_host_takes_longer_than_on_the_gpu():
    device, host = (
        time(workload(dp=8, optimizer_offload=share), H100).categories["optimizer"]
        for share in (0, 1)
    )
    assert host > 10 * device


def test_slow_links_between_blocks_cost_all_to_alls_and_pipelines_beyond_a_block():
    blocks = replace(H100, nodes_per_block=2, block_gbps=10)
    even = replace(H100, nodes_per_block=2, block_gbps=H100.network_gbps)

    def slower(name, machine=blocks, **layout):
        of_step = workload(seq=512 * K, **layout)
        of = time(of_step, machine).categories[name], time(of_step, H100).categories[name]
        return of[0] / of[1]

    ulysses = ContextParallel.ulysses
    assert slower("CP", cp=ulysses(32)) == pytest.approx(50 / 10 * (32 - 16) / (32 - 8))
    assert slower("CP", cp=ulysses(16)) == 1
    assert slower("PP", tp=8, pp=4) > slower("PP", tp=8, pp=2) == 1
    for rings in ({"dp": 32, "sharding": "parameters"}, {"cp": ContextParallel.ring(32)}):
        assert time(workload(**rings), blocks) == time(workload(**rings), H100)
    for layout in ({"cp": ulysses(32)}, {"tp": 8, "pp": 4}):
        assert slower("CP" if "cp" in layout else "PP", even, **layout) == 1
