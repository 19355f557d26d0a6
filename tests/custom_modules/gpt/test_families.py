# SPDX-License-Identifier: Apache-2.0
"""Each family's small model on one rank: against transformers and itself with less kept."""

from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor, nn

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.memory.config import Offload, Recompute, Tiling
from tests.custom_modules.support import families
from tests.custom_modules.support.families import BEST, EXPERTS, VOCAB, WITH_EXPERTS

pytestmark = pytest.mark.usefixtures("megatron_rank")

BATCH, LENGTH = 2, 61
EACH = pytest.mark.parametrize("family", families.FAMILIES)
AUXILIARY = 0.3
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"recompute": Recompute(kind="full")},
    "kept": {"recompute": Recompute(kind="kept_attention")},
    "kept + offload": {
        "recompute": Recompute(kind="kept_attention"),
        "offload": Offload(tensors="both", cap_gib=1),
    },
    "uniform": {"recompute": Recompute(kind="uniform", layers=2)},
    "selective": {"recompute": Recompute(kind="selective", modules=["core_attn"])},
    "loss": {"tiling": Tiling(loss=True, loss_tile=7)},
    "mlp": {"tiling": Tiling(mlp=True, mlp_tile=13)},
    "kept + mlp": {
        "recompute": Recompute(kind="kept_attention"),
        "tiling": Tiling(mlp=True, mlp_tile=13),
    },
}
AFTER = ("olmo3", "gemma3")
"""Families with norms after attention and MLP."""
NORM_BEFORE_EXPERTS = "decoder.layers.pre_mlp_layernorm.weight"
"""Name in a checkpoint; a norm before one MLP is inside the MLP's first projection."""


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(4))


def positions() -> Tensor:
    return torch.arange(LENGTH).repeat(BATCH, 1)


def direction(dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(BATCH, LENGTH, VOCAB, generator=draw, dtype=torch.float64).to(dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def weights_of(family: str) -> dict[str, Tensor]:
    theirs = families.hugging_face(family, torch.float64).state_dict()
    return families.megatron_weights(theirs)


def assert_close(mine: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    """Compare by the largest value of each tensor."""
    assert mine.keys() == right.keys()
    for name, tensor in mine.items():
        error = (tensor - right[name]).abs().max() / right[name].abs().max()
        assert error < tolerance, f"{name} differs by {error:.1e} of its largest value"


@EACH
@pytest.mark.parametrize(
    "cp",
    [ContextParallelKind(kind="ulysses"), ContextParallelKind(kind="head_chunked")],
    ids=lambda cp: cp.kind,
)
def test_logits_and_gradients_are_those_of_transformers(family, cp):
    theirs = families.hugging_face(family, torch.float32)
    weights = families.megatron_weights(theirs.state_dict())
    if cp.kind == "head_chunked" and family in families.UNCHUNKED:
        with pytest.raises(ValueError, match="over all heads of a token; take ulysses, ring"):
            families.ours(family, weights, torch.float32, cp=cp)
        return
    ours = families.ours(family, weights, torch.float32, cp=cp)
    expected = theirs(tokens(), position_ids=positions()).logits
    logits = ours(tokens(), positions(), None)
    assert_close({"logits": logits}, {"logits": expected}, 2e-5)
    expected.backward(direction(torch.float32))
    logits.backward(direction(torch.float32))
    assert_close(gradients(ours), families.megatron_weights(gradients(theirs)), 1e-4)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_the_routers_auxiliary_loss_is_the_formula_times_the_tokens(family):
    theirs = families.hugging_face(family, torch.float32)
    weights = families.megatron_weights(theirs.state_dict())
    ours = families.ours(family, weights, torch.float32, moe_aux_loss_coeff=AUXILIARY)
    out = theirs(tokens(), position_ids=positions(), output_router_logits=True)
    auxiliary = torch.zeros(())
    for logits in out.router_logits:
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(BEST).indices, 1.0)
        share, probability = chosen.mean(0) / BEST, logits.softmax(1).mean(0)
        auxiliary = auxiliary + AUXILIARY * EXPERTS * (share * probability).sum()
    grad_out = 1e-2 * direction(torch.float32)  # so small that the auxiliary loss shows
    ((out.logits * grad_out).sum() + auxiliary * BATCH * LENGTH).backward()
    ours(tokens(), positions(), None).backward(grad_out)
    assert_close(gradients(ours), families.megatron_weights(gradients(theirs)), 1e-4)


def losses_and_gradients(family: str, memory: dict[str, Any]) -> dict[str, Tensor]:
    recompute = memory.get("recompute", Recompute())
    config = {"moe_aux_loss_coeff": AUXILIARY} if family in WITH_EXPERTS else {}
    model = families.ours(
        family,
        weights_of(family),
        torch.float64,
        memory=memory,
        **config,
        **recompute.megatron_settings(),
    )
    model.train()
    losses = model(tokens(), positions(), None, labels=tokens().roll(-1, 1))
    losses.sum().backward()
    return {"losses": losses.detach(), **gradients(model)}


@EACH
def test_what_is_kept_for_the_backward_changes_no_loss_and_no_gradient(family):
    plain = losses_and_gradients(family, {})
    known = [name for name in VARIANTS if family not in WITH_EXPERTS or "mlp" not in name]
    for name in known:
        # Megatron's own loss is fp32; ours in tiles is float64.
        tolerance = 1e-5 if name == "loss" else 1e-12
        assert_close(losses_and_gradients(family, VARIANTS[name]), plain, tolerance)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_an_expert_that_no_token_goes_to_has_gradients_of_zero(family):
    model = families.ours(family, weights_of(family), torch.float64)
    model(tokens()[:1, :1], positions()[:1, :1], None).sum().backward()
    of_experts = [grad for name, grad in gradients(model).items() if "local_experts" in name]
    # Data ranks wait for every one.
    idle = [bool((grad == 0).all()) for grad in of_experts]
    assert sum(idle) == 2 * families.LAYERS * (EXPERTS - BEST)


@EACH
def test_a_checkpoint_brings_every_parameter_back_under_transformer_engines_names(family, tmp_path):
    saved = families.ours(family, weights_of(family), torch.float64)
    names = {tensor.key for tensor in saved.sharded_state_dict().values() if hasattr(tensor, "key")}
    fused = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    before = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    if family in AFTER:
        assert "decoder.layers.mlp.linear_fc2.post_layernorm.weight" in names
    if family in AFTER and not families.ARCHITECTURE[family]["block"].pre_norm:
        assert not {fused, before} & names
    else:
        assert {NORM_BEFORE_EXPERTS if family in WITH_EXPERTS else fused, before} <= names
    dist_checkpointing.save(saved.sharded_state_dict(), str(tmp_path))
    zeros = {name: torch.zeros_like(weight) for name, weight in weights_of(family).items()}
    loaded = families.ours(family, zeros, torch.float64)
    loaded.load_state_dict(dist_checkpointing.load(loaded.sharded_state_dict(), str(tmp_path)))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights_of(family)[name]), name
