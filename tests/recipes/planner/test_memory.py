# SPDX-License-Identifier: Apache-2.0
"""Bytes of one rank: sums written out, what physics demands, and what others have published."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import fast_gelu

from benchmarks.planner_cases import BOTH, LOSS
from benchmarks.planner_cases import CARDS as SMALL
from benchmarks.planner_memory import of_left_out
from benchmarks.planner_published import BOUND
from benchmarks.published_points import bytes_of_peers, lengths_of_peers
from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.models import CARDS, LLAMA31_8B, TINY
from recipes.models.llama import LLAMA2_7B
from recipes.models.mistral import MIXTRAL_8X7B
from recipes.planner.kernels import (
    FLASH_2,
    FLASH_3,
    FUSED,
    PLAIN,
    Kernels,
    Scratch,
)
from recipes.planner.memory import memory
from recipes.planner.plan import capped, plan
from recipes.planner.workload import FULLEST_EXPERTS, Workload
from recipes.spec import cluster
from recipes.spec.layout import ContextParallel, Fp8, Layout
from recipes.spec.units import GiB, K, M

H100 = cluster.load("dgx_h100")
FULL, KEPT = Recompute(kind="full"), Recompute(kind="kept_attention")
TILES = Tiling(loss=True, mlp=True)
FAST_GELU = getattr(fast_gelu, "_torchdynamo_orig_callable", fast_gelu)
"""Megatron-Core's, before it is compiled."""


def workload(card=LLAMA31_8B, *, seq=128 * K, **layout) -> Workload:
    given = Layout(**layout)
    batch = seq * given.dp * given.micro_batch
    return Workload(
        card=card, seq_length=seq, tokens_per_batch=batch, layout=given, gpus_per_node=8
    )


def test_an_mlp_s_backward_of_the_tiny_model_added_up_by_hand():
    tokens = 1024
    tiny = workload(TINY, seq=tokens, precision="fp32", device="cpu", recompute=FULL)
    found = memory(tiny, PLAIN)
    x = 128 * 4 * tokens  # a layer input: width 128, fp32
    ends = 2 * x  # norm and middle
    attention = ends + 3 * x + 3 * x // 2 + 4 * 4 * tokens
    # q before and after rotation, output; k, v and rotated k of half the heads; log-sum-exp
    mlp = (5 + 2) * 384 * 4 * tokens + x  # kept and its gradients, and the norm's output
    head = 512 * 128 * 4  # its gradient, before that of the embedding is added to it
    rest = (56 + 4 * 32) * tokens  # what comes with a token; cos and sin
    assert found.peak_in == "mlp"
    assert found.activations == 2 * x + attention + mlp + head + x + rest
    assert found.categories["weights"] == 4 * TINY.parameters
    assert found.categories["gradients"] == 4 * TINY.parameters
    assert found.categories["optimizer"] == 8 * TINY.parameters


@pytest.mark.parametrize(
    ("tp", "tiling", "mib"),
    [(1, LOSS, 18.812), (1, BOTH, 8.643), (2, BOTH, 5.540)],
    ids=["whole", "in tiles", "one tile"],
)
def test_a_norm_after_an_mlp_holds_nothing_in_its_backward(tp, tiling, mib):
    """The bytes are those that `benchmarks.planner_memory` counted; on two ranks of 512 tokens."""
    given = {"precision": "fp32", "device": "cpu", "recompute": FULL, "tiling": tiling}
    found = memory(workload(SMALL["olmo3_7b_sixteenth"], seq=1024 // tp, tp=tp, **given), PLAIN)
    assert found.peak_in == "mlp"
    assert found.categories["mlp"] / 2**20 == pytest.approx(mib, rel=1e-3)


def test_the_page_of_measured_steps_says_which_were_left_out_and_why():
    assert of_left_out([]) == ""
    *_, most, least = of_left_out(["no", "yes", "no"]).splitlines()
    assert (most, least) == ("* 2: no", "* 1: yes")


def test_the_state_of_a_bf16_model_by_what_is_sharded():
    parameters, ranks = LLAMA31_8B.parameters, 8

    def state(sharding, **layout):
        categories = memory(workload(dp=ranks, sharding=sharding, **layout)).categories
        return tuple(categories[name] / parameters for name in ("gradients", "optimizer"))

    waiting = 4 * 2 * workload().layer_weights / parameters  # of two layers, not reduced yet
    assert state("none") == (4, 12)
    assert state("optimizer") == (4, 12 / ranks)
    assert state("gradients") == (4 / ranks + waiting, 12 / ranks)
    assert state("parameters") == (4 / ranks + waiting, 12 / ranks)
    assert state("optimizer", optimizer_offload=1.0) == (4, 0)


def test_experts_hold_the_tokens_gathered_over_tp():
    def kept(tp):
        layer = Workload(
            card=MIXTRAL_8X7B, seq_length=16 * K, tokens_per_batch=16 * K, layout=Layout(tp=tp),
            gpus_per_node=8,
        )  # fmt: skip
        return memory(layer).categories["mlp"]

    tokens, k, hidden, ffn = 16 * K, 2, 4096, 14336
    of_one = k * tokens * (3 * ffn + 2 * hidden) * 2
    of_four = k * tokens * (3 * ffn / 4 + hidden + hidden / 4) * 2
    norms = tokens * hidden * 2
    assert kept(1) == pytest.approx(32 * (of_one + norms), rel=0.05)
    assert kept(4) == pytest.approx(32 * (of_four + norms / 4), rel=0.05)


def test_divided_experts_hold_the_tokens_of_the_fullest_rank():
    def kept(**layout):
        layer = Workload(
            card=MIXTRAL_8X7B, seq_length=16 * K, tokens_per_batch=32 * K, gpus_per_node=8,
            layout=Layout(tp=2, dp=2, **layout),
        )  # fmt: skip
        return memory(layer).categories["mlp"]

    tokens, k, hidden, ffn = 16 * K / 2, 2, 4096, 14336
    here = k * tokens * (FULLEST_EXPERTS * (3 * ffn + hidden) + hidden) * 2
    norms = tokens * hidden * 2
    assert kept(ep=4, etp=1) == pytest.approx(32 * (here + norms), rel=0.05)
    assert kept(ep=2) > kept(ep=4, etp=1) > kept()


def test_context_ranks_share_the_state_as_data_ranks_do():
    by_cp = memory(workload(cp=ContextParallel.ulysses(8))).categories
    by_dp = memory(workload(dp=8)).categories
    for category in ("weights", "gradients", "optimizer"):
        assert by_cp[category] == by_dp[category]


@pytest.mark.parametrize("recompute", [Recompute(), FULL, KEPT], ids=lambda one: one.kind)
def test_more_tensor_parallelism_takes_fewer_bytes(recompute):
    totals = [memory(workload(tp=tp, recompute=recompute)).total for tp in (1, 2, 4, 8)]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("kind", ["ring", "ulysses", "head_chunked"])
def test_more_context_parallelism_takes_fewer_bytes(kind):
    layouts = [getattr(ContextParallel, kind)(size) for size in (2, 4, 8)]
    totals = [memory(workload(cp=cp, recompute=FULL, tiling=TILES)).total for cp in layouts]
    assert totals == sorted(totals, reverse=True)


def test_each_choice_for_memory_takes_fewer_bytes_than_the_one_before():
    away = Offload(tensors="inputs", cap_gib=1e6)
    both = Offload(tensors="both", cap_gib=1e6)
    chunked = ContextParallel.head_chunked(1)
    steps = [
        {},
        {"recompute": KEPT},
        {"recompute": KEPT, "tiling": Tiling(loss=True)},
        {"recompute": KEPT, "tiling": TILES},
        {"recompute": KEPT, "tiling": TILES, "offload": away},
        {"recompute": KEPT, "tiling": TILES, "offload": both},
        {"recompute": KEPT, "tiling": TILES, "offload": both, "cp": chunked},
    ]
    totals = [memory(workload(**step)).total for step in steps]
    assert all(less < more for more, less in itertools.pairwise(totals))


def test_bytes_grow_with_length_and_micro_batch():
    lengths = [memory(workload(seq=n * K, recompute=FULL)).total for n in (8, 16, 32, 64)]
    assert lengths == sorted(lengths)
    assert memory(workload(micro_batch=2)).activations > memory(workload()).activations


def test_what_offload_takes_from_the_device_is_on_the_host():
    stay = memory(workload(recompute=KEPT, tiling=TILES))
    tensors = Offload(tensors="both", cap_gib=1e6)
    gone = memory(workload(recompute=KEPT, tiling=TILES, offload=tensors))
    x = 128 * K * 4096 * 2
    lse = 128 * K * 32 * 4
    assert stay.host == 0
    assert gone.host == 32 * (2 * x + lse)
    freed = stay.total - gone.total
    assert gone.host * 30 / 32 <= freed <= gone.host  # all but the layer at work and the next


def test_every_other_layer_offloaded_is_half_of_the_host():
    whole = Offload(tensors="inputs", cap_gib=1e6)
    half = Offload(tensors="inputs", cap_gib=1e6, every=2)
    on_host = [memory(workload(recompute=FULL, offload=one)).host for one in (whole, half)]
    assert on_host[1] == on_host[0] / 2


def test_the_optimizer_on_the_host_takes_sixteen_bytes_a_parameter_over_its_ranks():
    away = memory(workload(dp=4, optimizer_offload=1.0))
    assert away.host == 16 * LLAMA31_8B.parameters / 4


@pytest.mark.parametrize(("sharding", "ranks"), [("optimizer", 1), ("parameters", 0)])
def test_a_save_gathers_twelve_bytes_a_parameter_on_each_rank_of_the_optimizer(sharding, ranks):
    saved = plan(workload(dp=4, sharding=sharding), H100)
    assert saved.gathered_to_save == 12 * LLAMA31_8B.parameters * ranks


def test_the_cap_of_an_offload_limits_activations_and_not_the_optimizer():
    offload = Offload(tensors="inputs", cap_gib=1e6)
    with_adam = workload(recompute=FULL, offload=offload, optimizer_offload=0.5)
    found = memory(with_adam)
    assert found.offloaded == memory(workload(recompute=FULL, offload=offload)).host
    assert found.host - found.offloaded == 8 * LLAMA31_8B.parameters
    cap = capped(with_adam, H100).workload.layout.offload.cap_gib
    assert 0 < cap * GiB - found.offloaded < 0.2 * GiB


def test_the_first_of_two_stages_holds_two_forwards_and_the_last_the_loss():
    accumulated = Workload(
        card=LLAMA31_8B,
        seq_length=32 * K,
        tokens_per_batch=256 * K,
        layout=Layout(pp=2),
        gpus_per_node=8,
    )
    one = memory(workload(seq=32 * K)).categories["saved inputs"]
    first = memory(accumulated)
    assert first.stage == 0
    assert first.categories["saved inputs"] == pytest.approx(one)  # half the layers, twice


def test_an_unfused_mlp_keeps_more_than_a_fused_one():
    fused = Kernels(mlp_kept=3, gelu_kept=5, logit_bytes=6, reserve_gib=0)
    plain = replace(fused, mlp_kept=5)
    more = memory(workload(), plain).activations - memory(workload(), fused).activations
    assert more == 32 * 2 * 14336 * 2 * 128 * K


def test_gelu_is_not_fused_with_the_product_of_the_mlp():
    gemma = CARDS["gemma3_1b"]
    as_silu = replace(FUSED, gelu_kept=FUSED.mlp_kept)
    more, layers, tokens, ffn = FUSED.gelu_kept - FUSED.mlp_kept, 26, 32 * K, 6912
    for tiling, kept in ((Tiling(), layers * tokens), (TILES, 0)):
        at = workload(gemma, seq=tokens, tiling=tiling)
        found = memory(at, FUSED).activations - memory(at, as_silu).activations
        assert found == more * kept * ffn * 2
    llama = workload(tiling=TILES, recompute=FULL)
    assert memory(llama, FUSED) == memory(llama, replace(FUSED, gelu_kept=50))


@pytest.mark.parametrize(
    ("activation", "compiled", "kept"),
    [
        (F.silu, False, PLAIN.mlp_kept),
        (FAST_GELU, False, PLAIN.gelu_kept),
        (FAST_GELU, True, FUSED.gelu_kept),
    ],
)
def test_what_an_unfused_mlp_keeps_is_what_autograd_saves(activation, compiled, kept):
    """The formula of `megatron.core.transformer.mlp.MLP`; compiled as Inductor divides it."""
    tokens, ffn = 64, 32
    if compiled:
        torch._dynamo.reset()  # other tests compile it for more shapes than are kept
        activation = torch.compile(activation, backend="aot_eager_decomp_partition")
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (
            storage.nbytes(),
            tensor,
        )  # held, so that no pointer is reused
        return tensor

    gate_and_up = 1.0 * torch.randn(tokens, 2 * ffn, requires_grad=True)
    down = torch.randn(ffn, 16, requires_grad=True)
    with (
        torch.compiler.set_stance("default"),  # whatever was entered before in this process
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        gate, up = torch.chunk(gate_and_up, 2, dim=-1)
        (activation(gate) * (up + 0.0)) @ down
    del storages[down.untyped_storage().data_ptr()]
    assert sum(size for size, _ in storages.values()) == kept * tokens * ffn * 4


@pytest.mark.parametrize(
    ("seq", "tp", "cp", "dp"),
    [
        (16 * K, 2, 1, 8),
        (64 * K, 4, 2, 8),
        (128 * K, 4, 4, 8),
        (256 * K, 4, 8, 8),
        (512 * K, 8, 16, 4),
        (1024 * K, 8, 32, 4),
    ],
)
def test_nemo_s_published_layouts_of_llama_2_fit_their_gpus(seq, tp, cp, dp):
    assert nemo(seq, tp, cp, dp).fits


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_million_tokens_without_context_parallelism_do_not_fit(tp):
    assert not nemo(M, tp, 1, 4).fits


def nemo(seq, tp, cp, dp):
    layout = Layout(tp=tp, cp=ContextParallel.ring(cp), dp=dp, fp8=Fp8(recipe="delayed"))
    of_step = Workload(
        card=LLAMA2_7B, seq_length=seq, tokens_per_batch=4 * M, layout=layout, gpus_per_node=8
    )
    return plan(of_step, H100)


@pytest.mark.parametrize("point", bytes_of_peers(), ids=lambda point: point.name)
def test_published_bytes_of_a_peer_are_predicted_within_an_eighth(point):
    assert point.ratio == pytest.approx(1, abs=BOUND)


@pytest.mark.parametrize("point", lengths_of_peers(), ids=lambda point: point.name)
def test_a_length_that_was_published_for_eight_gpus_fits_them(point):
    """They ran; a formula that would promise much longer ones is noticed, too."""
    assert 0.75 < point.ratio < 1


@pytest.mark.parametrize(
    ("cp", "heads"),
    [(ContextParallel.ulysses(8), 32), (ContextParallel.head_chunked(8), 8)],
    ids=["all heads", "a stage of heads"],
)
def test_what_an_attention_kernel_holds_is_of_the_heads_of_a_call(cp, heads):
    of_step = workload(seq=M, cp=cp, recompute=FULL, tiling=TILES)
    few, many = (
        memory(of_step, replace(FUSED, attention=Scratch(queries=size))) for size in (8, 12)
    )
    assert few.peak_in == many.peak_in == "attention"
    assert many.total - few.total == 4 * heads * LLAMA31_8B.head_dim * M // 8


def test_an_attention_kernel_expands_keys_only_where_heads_share_them():
    assert FLASH_2.bytes_of(8, 8) == 4 * 8
    assert FLASH_2.bytes_of(8, 2) == 4 * 8 + 4 * 8
    assert FLASH_3.bytes_of(8, 2) == 4 * 8 + 8 * 2


def test_the_reserve_is_a_cause_of_its_own():
    assert memory(workload()).categories["reserve"] == FUSED.reserve_gib * GiB
    assert memory(workload(), PLAIN).categories["reserve"] == 0


def test_an_interleaved_pipeline_holds_more_chunks_on_its_first_rank():
    def inputs(vpp, batches):
        of_step = replace(workload(seq=32 * K, pp=4, vpp=vpp, recompute=FULL, tiling=TILES),
                          tokens_per_batch=batches * 32 * K)  # fmt: skip
        return memory(of_step).categories["saved inputs"]

    one = inputs(1, 1)  # a micro-batch in flight
    assert inputs(1, 64) == pytest.approx(4 * one, rel=0.1)
    for vpp in (2, 4):
        more = 1 + 3 / (4 * vpp)
        assert inputs(vpp, 64) / inputs(1, 64) == pytest.approx(more, rel=0.03)
    assert inputs(2, 4) == pytest.approx(inputs(1, 4), rel=0.03)
