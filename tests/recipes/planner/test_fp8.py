# SPDX-License-Identifier: Apache-2.0
"""Bytes and seconds of layers in FP8, added up by hand and compared with measured steps."""

from dataclasses import replace

import pytest

from recipes.models import CARDS, LLAMA31_8B
from recipes.notation.layout import layout_from
from recipes.planner.memory import memory
from recipes.planner.plan import plan
from recipes.planner.time import time
from recipes.planner.workload import Workload
from recipes.spec import cluster
from recipes.spec.efficiency import HOPPER
from recipes.spec.layout import ContextParallel, Fp8, Layout
from recipes.spec.units import GiB, K, M

H100 = cluster.load("dgx_h100")
BF16, TENSORWISE = Fp8(), Fp8(recipe="tensorwise")
LLAMA32_1B, OF_4_LAYERS = CARDS["llama32_1b"], replace(LLAMA31_8B, layers=4)


def workload(card=LLAMA31_8B, *, seq=128 * K, sequences=8, **layout) -> Workload:
    return Workload(
        card=card, seq_length=seq, tokens_per_batch=sequences * seq, layout=Layout(**layout),
        gpus_per_node=8,
    )  # fmt: skip


def test_each_weight_of_a_layer_in_fp8_is_held_twice_more():
    def weights(fp8=BF16, **layout):
        return memory(workload(dp=8, fp8=fp8, **layout)).categories["weights"]

    of_a_layer = workload().layer_weights
    assert weights(TENSORWISE) - weights() == 2 * 32 * of_a_layer
    ends = replace(TENSORWISE, bf16_first=1, bf16_last=2)
    of_a_layer -= 4096 * (4096 + 2 * 1024)  # head-chunked attention projects in bf16
    chunked = ContextParallel.head_chunked(1)
    assert weights(ends, cp=chunked) - weights(cp=chunked) == 2 * 29 * of_a_layer


@pytest.mark.parametrize(
    ("recipe", "how", "kept"),
    [
        ("tensorwise", "ulysses", {"attention": -1 / 2, "mlp": -(1 + 3.5) / 2}),
        ("delayed", "ulysses", {"attention": -1 / 2 + 1 / 2, "mlp": -(1 + 3.5) / 2}),
        ("mxfp8", "ulysses", {"attention": -31 / 64, "mlp": -(1 + 3.5) * 31 / 64}),
        ("blockwise", "head_chunked", {"attention": 0, "mlp": -(1 + 3.5) * 31 / 64}),
    ],
)
def test_a_layer_in_fp8_keeps_the_inputs_of_its_products_in_a_byte_and_their_scales(
    recipe, how, kept
):
    """In inputs of a layer of Llama 3.1 8B, whose MLP is 3.5 times as wide."""
    cp = getattr(ContextParallel, how)(1)

    def of_a_ninth_layer(fp8=BF16):
        few, many = (
            memory(workload(replace(LLAMA31_8B, layers=layers), cp=cp, fp8=fp8))
            for layers in (8, 9)
        )
        assert few.peak_in == many.peak_in == "loss"
        return {name: many.categories[name] - few.categories[name] for name in kept}

    x, bf16 = 128 * K * 4096 * 2, of_a_ninth_layer()
    in_fp8 = of_a_ninth_layer(Fp8(recipe=recipe, bf16_last=4))
    assert {name: (in_fp8[name] - bf16[name]) / x for name in kept} == pytest.approx(kept)
    assert of_a_ninth_layer(Fp8(recipe=recipe, bf16_first=9)) == bf16


@pytest.mark.parametrize(
    ("card", "seq", "words", "gib", "ratio"),
    [
        (LLAMA32_1B, 32 * K, "tile-loss", 62.752, 1.006),
        (LLAMA32_1B, 32 * K, "tile-loss fp8:tensorwise", 58.564, 1.007),
        (OF_4_LAYERS, 128 * K, "tile-loss tile-mlp fp8:tensorwise", 65.604, 1.006),
        (LLAMA32_1B, 128 * K, "kept_attention tile-loss tile-mlp fp8:tensorwise", 44.789, 0.987),
    ],
)
def test_the_bytes_of_steps_in_fp8_are_predicted_as_well_as_in_bf16(card, seq, words, gib, ratio):
    """GiB as measured on an H100 (benchmarks/results/gpu_h100_2026-11-26.md)."""
    of_step = replace(workload(card, seq=seq, sequences=1), layout=layout_from(words))
    found = memory(of_step)
    held = found.total - found.categories["reserve"]
    assert held / GiB / gib == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize(
    ("card", "words", "sequences", "lacks"),
    [
        ("llama3_70b", "tp4 pp8 dp2 fp8:tensorwise", 128, 0),
        ("llama31_405b", "tp8 ring2 pp8 dp8 fp8:tensorwise", 1536, 5.6),
    ],
)
def test_a_published_fp8_layout_lacks_no_more_than_the_bf16_weights_that_its_authors_do_not_hold(
    card, words, sequences, lacks
):
    """On 64 and 1,024 H100, of Megatron-Bridge's summary: its weights are gathered in FP8."""
    published = replace(
        workload(CARDS[card], seq=8 * K, sequences=sequences), layout=layout_from(words)
    )
    in_bf16 = 2 * published.weights(0)
    assert max(0, plan(published, H100).short) / GiB == pytest.approx(lacks, abs=0.05)
    assert lacks * GiB < in_bf16


def test_fp8_pays_less_the_longer_the_sequence():
    gains = []
    for seq in (16 * K, 128 * K, M):
        bf16, fp8 = (time(workload(seq=seq, fp8=fp8), H100).step for fp8 in (BF16, TENSORWISE))
        gains.append(bf16 / fp8)
    assert gains == sorted(gains, reverse=True)
    assert 1 < gains[-1] < gains[0]


@pytest.mark.parametrize(
    ("seq", "words", "gain", "of_qkv"),
    [
        (16 * K, "head_chunked1 dp8", 0.19, 0.024),
        (128 * K, "head_chunked1 dp8 offload-both:64.6", 0.064, 0.008),
        (M, "head_chunked8 offload-both:64.6", 0.010, 0.001),
    ],
)
def test_what_fp8_gains_with_head_chunked_attention_is_as_the_page_says(seq, words, gain, of_qkv):
    """The table of docs/memory.md; its products run four times, once of them for the recompute."""
    chosen = layout_from(f"{words} kept_attention tile-loss tile-mlp")
    bf16 = replace(workload(seq=seq, sequences=chosen.dp), layout=chosen)
    fp8 = replace(bf16, layout=replace(chosen, fp8=TENSORWISE))
    step = time(fp8, H100).step
    assert time(bf16, H100).step / step - 1 == pytest.approx(gain, rel=0.05)
    saved = 1 / (989e12 * HOPPER.matmul) - 1 / (1979e12 * HOPPER.matmul_fp8)
    qkv = 4 * 2 * fp8.tokens * fp8.qkv_weights * 32 * saved / step
    assert qkv == pytest.approx(of_qkv, abs=0.0005)


@pytest.mark.parametrize(("how", "rows_in_bf16"), [("ulysses", 0), ("head_chunked", 6144)])
def test_products_run_at_the_rate_of_fp8_but_those_of_head_chunked_attention(how, rows_in_bf16):
    """Counted by hand: rows of q, k and v, of the output and of the MLP of Llama 3.1 8B."""
    cp = getattr(ContextParallel, how)(1)
    found = time(workload(sequences=1, cp=cp, fp8=TENSORWISE), H100).categories["matmul"]
    bf16, fp8 = 989e12 * HOPPER.matmul, 1979e12 * HOPPER.matmul_fp8
    rows = 6144 + 4096 + 3 * 14_336 - rows_in_bf16
    of_token = 32 * (rows / fp8 + rows_in_bf16 / bf16) + 128_256 / bf16
    assert found == pytest.approx(6 * 128 * K * 4096 * of_token)


def test_layers_in_bf16_slow_down_their_own_pipeline_stage():
    def matmul(**ends):
        fp8 = replace(TENSORWISE, **ends)
        return time(workload(pp=2, fp8=fp8), H100).categories["matmul"]

    assert matmul(bf16_first=1) == matmul()  # the last stage has the LM head and sets the pace
    assert matmul(bf16_last=1) > matmul()
