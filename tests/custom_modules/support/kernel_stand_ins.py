# SPDX-License-Identifier: Apache-2.0
"""The functions of CUDA packages, with their arguments and layouts and none of their kernels.

Arguments stand in the order of flash-attn 2.8.3, of flash_attn_interface beside it and at 3.0.0,
and of Transformer Engine 2.9, under the same names where the kernels use names. All compute the
formula with every score in memory, from the `out` and `lse` given, so that a kernel pair over them
can be compared with the reference on CPU.
"""

import math
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

from tests.reference.attention import attention


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return out [b, s, h, D] and lse [b, h, s] for q [b, s, h, D], k and v [b, t, g, D]."""
    out, lse = attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return out.transpose(1, 2), lse


def formula_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the layouts of `formula`, head by head."""
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale = 1 / math.sqrt(q.shape[3])
    for row in range(q.shape[0]):
        for head in range(q.shape[2]):
            kv = head // (q.shape[2] // k.shape[2])
            scores = scale * q[row, :, head] @ k[row, :, kv].T
            weights = torch.exp(scores - lse[row, head, :, None])
            weights = weights.tril() if causal else weights
            delta = (grad_out[row, :, head] * out[row, :, head]).sum(1, keepdim=True)
            grad_scores = weights * (grad_out[row, :, head] @ v[row, :, kv].T - delta)
            dq[row, :, head] += scale * grad_scores @ k[row, :, kv]
            dk[row, :, kv] += scale * grad_scores.T @ q[row, :, head]
            dv[row, :, kv] += weights.T @ grad_out[row, :, head]
    return dq, dk, dv


def spans(bounds: Tensor, longest: int) -> Iterator[slice]:
    """Yield the documents of tokens laid end to end."""
    assert bounds.dtype == torch.int32
    assert int(bounds.diff().max()) == longest
    for start, stop in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        yield slice(start, stop)


def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, causal: bool):
    """Return out [T, h, D] and lse [h, T]."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for span in spans(bounds, longest):
        out_1, lse_1 = formula(q[None, span], k[None, span], v[None, span], causal)
        out[span], lse[:, span] = out_1[0], lse_1[0]
    return out, lse


def varlen_backward(grad_out, q, k, v, out, lse, bounds: Tensor, longest: int, causal: bool):
    """Return dq, dk and dv, all [T, h or g, D]."""
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[1], q.shape[0])
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    for span in spans(bounds, longest):
        rows = (x[None, span] for x in (grad_out, q, k, v, out))
        found = formula_backward(*rows, lse[None, :, span].contiguous(), causal)
        for gradient, part in zip(gradients, found, strict=True):
            gradient[span] = part[0]
    return gradients


def written(targets: tuple[Tensor, ...], gradients) -> None:
    for target, gradient in zip(targets, gradients, strict=True):
        target.copy_(gradient)


def with_functions(name: str, *functions: Callable[..., object]) -> ModuleType:
    module = ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, function)
    return module


def flash_attn_2() -> ModuleType:
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    ):  # fmt: skip
        return *formula(q, k, v, causal), None, None

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        return *varlen(q, k, v, cu_seqlens_q, max_seqlen_q, causal), None, None

    def _flash_attn_backward(
        grad_out, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        written((dq, dk, dv), formula_backward(grad_out, q, k, v, out, softmax_lse, causal))

    def _flash_attn_varlen_backward(
        grad_out, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        written(
            (dq, dk, dv),
            varlen_backward(
                grad_out, q, k, v, out, softmax_lse, cu_seqlens_q, max_seqlen_q, causal
            ),
        )  # fmt: skip

    return with_functions(
        "flash_attn.flash_attn_interface",
        _flash_attn_forward,
        _flash_attn_varlen_forward,
        _flash_attn_backward,
        _flash_attn_varlen_backward,
    )


def flash_attn_3_of_2_8_3() -> ModuleType:
    def _flash_attn_forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
        seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
        rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        assert softmax_scale == q.shape[-1] ** -0.5
        if cu_seqlens_q is None:
            return formula(q, k, v, causal)
        return varlen(q, k, v, cu_seqlens_q, max_seqlen_q, causal)

    def _flash_attn_backward(
        grad_out, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
        max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1),
        softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert softmax_scale == q.shape[-1] ** -0.5
        given = (grad_out, q, k, v, out, softmax_lse)
        if cu_seqlens_q is None:
            gradients = formula_backward(*given, causal)
        else:
            gradients = varlen_backward(*given, cu_seqlens_q, max_seqlen_q, causal)
        written((dq, dk, dv), gradients)

    return with_functions("flash_attn_interface", _flash_attn_forward, _flash_attn_backward)


def flash_attn_3_of_3_0_0() -> ModuleType:
    older = flash_attn_3_of_2_8_3()

    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None,
        rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
        num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        result = older._flash_attn_forward(
            q, k, v, k_new, v_new, qv, out_, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new,
            seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k,
            rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale,
            softmax_scale, causal,
        )  # fmt: skip
        return *result, torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        grad_out, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
        sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
        softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        older._flash_attn_backward(
            grad_out, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
            max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, is_causal,
        )  # fmt: skip
        return torch.empty(0)

    return with_functions("flash_attn_interface", _flash_attn_forward, _flash_attn_backward)


def transformer_engine() -> dict[str, ModuleType]:
    """Return the modules of Transformer Engine that are imported, by name."""
    backend = {"F16_arbitrary_seqlen": object()}
    masks = {"causal": True, "no_mask": False}

    def check(s, t, cu_seqlens_q, cu_seqlens_kv, q, k, chosen, layout) -> None:
        assert (chosen, layout) == (backend["F16_arbitrary_seqlen"], "bshd_bshd_bshd")
        assert (q.shape[1], k.shape[1]) == (s, t)
        assert cu_seqlens_q.tolist() == [row * s for row in range(q.shape[0] + 1)]
        assert cu_seqlens_kv.tolist() == [row * t for row in range(q.shape[0] + 1)]
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert q.is_contiguous()
        assert k.is_contiguous()

    def fused_attn_fwd(
        is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v,
        fake_dtype, fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None, page_table_k=None, page_table_v=None, s_quantizer=None,
        o_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d",
        attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla",
        window_size=(-1, -1), rng_gen=None, softmax_offset=None, return_max_logit=False,
    ):  # fmt: skip
        lengths = (max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv)
        check(*lengths, q, k, fused_attention_backend, qkv_layout)
        assert is_training
        assert fake_dtype == q.dtype
        out, lse = formula(q, k, v, masks[attn_mask_type])
        return out, [lse.unsqueeze(-1), torch.zeros(2, dtype=torch.int64)]

    def fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype,
        dqkv_dtype, aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None, s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None,
        attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d",
        attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla",
        window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        lengths = (max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv)
        check(*lengths, q, k, fused_attention_backend, qkv_layout)
        assert (fake_dtype, dqkv_dtype) == (q.dtype, "kFloat64")
        lse, rng_state = aux_ctx_tensors
        assert (rng_state.dtype, rng_state.shape) == (torch.int64, (2,))
        gradients = formula_backward(d_o, q, k, v, o, lse.squeeze(-1), masks[attn_mask_type])
        return *gradients, None, None

    package = "transformer_engine.pytorch"
    functions = with_functions(
        f"{package}.cpp_extensions.fused_attn", fused_attn_fwd, fused_attn_bwd
    )
    functions.FusedAttnBackend = backend
    constants = ModuleType(f"{package}.constants")
    constants.TE_DType = {torch.float64: "kFloat64"}
    parents = ("transformer_engine", package, f"{package}.cpp_extensions")
    modules = [functions, constants, *(ModuleType(name) for name in parents)]
    return {module.__name__: module for module in modules}


class Aten:
    """PyTorch's CUDA operators, over the formula."""

    @staticmethod
    def _flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask,
    ):  # fmt: skip
        if cum_seq_q is None:
            assert (max_q, max_k) == (query.shape[1], key.shape[1])
            return *formula(query, key, value, is_causal), None, None, None
        return *varlen(query, key, value, cum_seq_q, max_q, is_causal), None, None, None

    @staticmethod
    def _flash_attention_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
        dropout_p, is_causal, rng_state, unused,
    ):  # fmt: skip
        given = (grad_out, query, key, value, out, logsumexp)
        if cum_seq_q is None:
            return formula_backward(*given, is_causal)
        return varlen_backward(*given, cum_seq_q, max_q, is_causal)

    @staticmethod
    def _scaled_dot_product_cudnn_attention(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask
    ):
        assert compute_log_sumexp
        assert 1 not in (query.shape[2], key.shape[2])
        out, lse = formula(*(x.transpose(1, 2) for x in (query, key, value)), is_causal)
        laid_out = torch.empty_like(query).copy_(out.transpose(1, 2))
        return laid_out, lse.unsqueeze(-1), None, None, 0, 0, None, None, None

    @staticmethod
    def _scaled_dot_product_cudnn_attention_backward(
        grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    ):  # fmt: skip
        assert out.stride() == grad_out.stride() == torch.empty_like(query).stride()
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        tensors = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        gradients = formula_backward(*tensors, logsumexp.squeeze(-1), is_causal)
        return [gradient.transpose(1, 2) for gradient in gradients]
