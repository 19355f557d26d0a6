# SPDX-License-Identifier: Apache-2.0
"""What our layers refuse on one rank, and that a user reads why."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from custom_modules.context_parallel.config import TRANSFORMER_ENGINE_KINDS, ContextParallelKind
from custom_modules.gpt.core_attention import ContextParallelAttention
from custom_modules.gpt.model import LongContextGPT, long_context_spec
from custom_modules.memory.config import Tiling
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas

pytestmark = pytest.mark.usefixtures("megatron_rank")

KINDS = {
    "ring": ContextParallelKind(kind="ring"),
    "head-chunked": ContextParallelKind(kind="head_chunked"),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def model(kind: ContextParallelKind, **given: object) -> LongContextGPT:
    return LongContextGPT(
        llamas.configuration(torch.float32),
        rope=RopeScaling.base_change(1000),
        vocab_size=llamas.VOCAB,
        max_sequence_length=8,
        cp=kind,
        **given,
    )


def run(made: LongContextGPT, **given: object) -> torch.Tensor:
    return made(torch.zeros(1, 8, dtype=torch.long), torch.arange(8)[None], None, **given)


@pytest.mark.parametrize("kind", TRANSFORMER_ENGINE_KINDS)
def test_transformer_engines_kinds_are_refused_without_it(kind):
    ulysses = 1 if kind == "a2a+p2p" else None
    cp = ContextParallelKind(kind=kind, ulysses=ulysses)
    with pytest.raises(ValueError, match="is Transformer Engine's, which this model does not use"):
        long_context_spec(llamas.configuration(torch.float32), cp=cp)


@EACH_KIND
def test_megatrons_own_packing_is_refused(kind):
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    with pytest.raises(ValueError, match=r"is a PackedSeqParams; .*from_cu_seqlens"):
        run(model(kind), packed_seq_params=packed)


@EACH_KIND
def test_a_kernel_that_cannot_serve_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=r"attention kernel cudnn .* there is cpu_flash"):
        run(model(kind, kernel="cudnn"))


def test_a_kind_that_the_heads_do_not_fit_is_refused():
    kind = ContextParallelKind(kind="head_chunked", heads_per_stage=3)
    with pytest.raises(ValueError, match=r"heads_per_stage 3 .* it may be 1, 2, 4 or 8"):
        model(kind)


def test_weights_stored_in_fp8_are_refused_by_head_chunked_attention():
    attention = model(KINDS["head-chunked"]).decoder.layers[0].self_attention
    attention.config.fp8_param = True
    with pytest.raises(ValueError, match=r"fp8_param is True: .* leave fp8_param out"):
        attention(torch.zeros(8, 1, llamas.HIDDEN), None)


def test_head_chunked_attention_in_an_fp8_layer_never_calls_its_projection():
    """What Transformer Engine would compute in FP8 is a call of a module: `linear_proj` alone."""
    attention, called = model(KINDS["head-chunked"]).decoder.layers[0].self_attention, []
    attention.config.fp8 = "hybrid"
    for name in ("linear_qkv", "linear_proj"):
        module = getattr(attention, name)
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    x = torch.zeros(8, 1, llamas.HIDDEN, requires_grad=True)
    attention(x, None)[0].sum().backward()
    assert called == ["linear_proj"]
    assert attention.linear_qkv.weight.grad is not None


def test_a_norm_inside_the_projection_is_refused_by_head_chunked_attention():
    attention = model(KINDS["head-chunked"]).decoder.layers[0].self_attention
    attention.linear_qkv.layer_norm_weight = torch.ones(llamas.HIDDEN)
    with pytest.raises(ValueError, match="needs the norm apart from linear_qkv"):
        attention(torch.zeros(8, 1, llamas.HIDDEN), None)


@EACH_KIND
def test_what_has_no_effect_is_refused(kind):
    attention = model(kind).decoder.layers[0].self_attention
    with pytest.raises(ValueError, match="does not take attention_bias, sequence_len_offset"):
        attention(
            torch.zeros(8, 1, llamas.HIDDEN),
            None,
            attention_bias=torch.zeros(1),
            sequence_len_offset=3,
            inference_params=None,
        )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"attention_dropout": 0.1}, r"attention_dropout is 0\.1; long-context attention has none"),
        ({"softmax_scale": 0.5}, r"softmax_scale is 0\.5; only 1/sqrt\(head size\) is known"),
        ({"attn_mask_type": AttnMaskType.padding}, "mask .*padding is not known; only causal"),
    ],
    ids=["dropout", "scale", "mask"],
)
def test_what_the_kernels_do_not_compute_is_refused(changed, words):
    groups = model(KINDS["ring"]).decoder.layers[0].self_attention.pg_collection
    given = {
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "pg_collection": groups,
    }
    config = llamas.configuration(torch.float32)
    assert ContextParallelAttention(config, **given).causal
    with pytest.raises(ValueError, match=words):
        ContextParallelAttention(config, **(given | changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"window_size": (4, 0)}, r"window_size is \(4, 0\)"),
        ({"softmax_type": "learnable"}, "softmax_type is 'learnable'"),
        ({"no_rope_freq": [1, 0]}, "no_rope_freq is"),
        ({"normalization": "L2Norm"}, "normalization is 'L2Norm'; .* RMSNorm or LayerNorm"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_of_the_config_that_attention_would_leave_undone_are_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        LongContextGPT(
            llamas.configuration(torch.float32, **changed),
            rope=RopeScaling.base_change(1000),
            vocab_size=llamas.VOCAB,
            max_sequence_length=8,
        )


EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": llamas.FFN}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"moe_expert_capacity_factor": 1.0}, r"capacity_factor is 1\.0; .* train with None"),
        ({"moe_input_jitter_eps": 0.1}, r"moe_input_jitter_eps is 0\.1"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; .* train with 1"),
        ({"moe_z_loss_coeff": 1e-3}, r"moe_z_loss_coeff is 0\.001"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "is 'sinkhorn'; .* 'aux_loss' or 'none'"),
        ({"moe_shared_expert_intermediate_size": 8}, "moe_shared_expert_intermediate_size is 8"),
        ({"moe_grouped_gemm": True}, "moe_grouped_gemm is Transformer Engine's"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            "recompute_modules with mlp and num_moe_experts 4",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_layers_with_experts_do_not_do_is_refused(changed, words):
    config = llamas.configuration(torch.float32, **EXPERTS, **changed)
    with pytest.raises(ValueError, match=words):
        long_context_spec(config, cp=KINDS["ring"])


def test_a_tiled_mlp_is_refused_where_there_are_experts():
    config = llamas.configuration(torch.float32, **EXPERTS)
    with pytest.raises(ValueError, match=r"tiling mlp with num_moe_experts 4: .* auxiliary loss"):
        long_context_spec(config, cp=KINDS["ring"], tiling=Tiling(mlp=True))


def test_auto_without_a_length_is_refused():
    with pytest.raises(ValueError, match="auto chooses by length; give seq_length"):
        long_context_spec(llamas.configuration(torch.float32))


def test_a_projection_without_a_weight_of_its_own_is_refused():
    attention = model(KINDS["head-chunked"]).decoder.layers[0].self_attention
    attention.linear_qkv = torch.nn.Sequential(attention.linear_qkv)
    with pytest.raises(ValueError, match="linear_qkv is a Sequential"):
        attention(torch.zeros(8, 1, llamas.HIDDEN), None)


def test_a_layer_without_a_causal_mask_sees_what_follows():
    groups = model(KINDS["ring"]).decoder.layers[0].self_attention.pg_collection
    full = ContextParallelAttention(
        llamas.configuration(torch.float32), 1, AttnMaskType.no_mask, "self", groups
    )
    q, k, v = (torch.randn(4, 1, 8, llamas.HEAD_DIM) for _ in "qkv")
    changed = torch.cat((v[:3], v[3:] + 1))
    assert not torch.equal(full(q, k, v)[0], full(q, k, changed)[0])
