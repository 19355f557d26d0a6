# SPDX-License-Identifier: Apache-2.0
"""Every module of the memory stack, alone and with every other, against the plain model in float64.

One process a layout builds the plain model and each variant from the same weights, and compares
the loss of every token and the gradient of every parameter.
"""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.cpu.backend import cpu_backend
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.custom_modules.support.shards import on_this_cp_rank
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

BATCH = 3
FULL, KEPT = Recompute(kind="full"), Recompute(kind="kept_attention")
LOSS, MLP = Tiling(loss=True, loss_tile=7), Tiling(mlp=True, mlp_tile=13)
BOTH = Tiling(loss=True, loss_tile=10**6, mlp=True, mlp_tile=10**6)
INPUTS = Offload(tensors="inputs", cap_gib=1)
ATTENTION = Offload(tensors="attention", cap_gib=1)
ALL = Offload(tensors="both", cap_gib=1)
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"recompute": FULL},
    "kept": {"recompute": KEPT},
    "mlp": {"tiling": MLP},
    "loss": {"tiling": LOSS},
    "mlp + loss, each in one tile": {"tiling": BOTH},
    "mlp + full": {"tiling": MLP, "recompute": FULL},
    "mlp + kept": {"tiling": MLP, "recompute": KEPT},
    "loss + full": {"tiling": LOSS, "recompute": FULL},
    "loss + kept": {"tiling": LOSS, "recompute": KEPT},
    "full + inputs": {"recompute": FULL, "offload": INPUTS},
    "kept + inputs": {"recompute": KEPT, "offload": INPUTS},
    "kept + attention": {"recompute": KEPT, "offload": ATTENTION},
    "kept + offload of both": {"recompute": KEPT, "offload": ALL},
    "mlp + full + inputs": {"tiling": MLP, "recompute": FULL, "offload": INPUTS},
    "loss + full + inputs": {"tiling": LOSS, "recompute": FULL, "offload": INPUTS},
    "everything": {"tiling": BOTH, "recompute": KEPT, "offload": ALL},
    "kept every 2nd": {"tiling": MLP, "recompute": Recompute(kind="kept_attention", every=2)},
    "kept every 2nd, others full": {
        "recompute": Recompute(kind="kept_attention", every=2, others="full"),
        "offload": ALL,
    },
    "offload of every 2nd": {
        "recompute": KEPT,
        "offload": Offload(tensors="both", cap_gib=1, every=2),
    },
}
MEGATRON: dict[str, Recompute] = {
    "uniform": Recompute(kind="uniform", layers=2),
    "block": Recompute(kind="block", layers=1),
    "selective": Recompute(kind="selective", modules=["core_attn"]),
}
KINDS = [
    ContextParallelKind(kind="ring"),
    ContextParallelKind(kind="ulysses"),
    ContextParallelKind(kind="head_chunked", heads_per_stage=2),
]


def masks(length: int) -> dict[str, torch.Tensor]:
    """Return masks [b, s] by name."""
    some = torch.rand(BATCH, length, generator=torch.Generator().manual_seed(3)) < 0.6
    one = torch.zeros(BATCH, length)
    one[1, length // 2] = 1
    return {
        "some": some.double(),
        "all": torch.ones(BATCH, length).double(),
        "none": torch.zeros(BATCH, length).double(),
        "one": one.double(),
    }


def whole_loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return losses [b, s] of logits [s, b, V/TP] in their dtype; Megatron's own are fp32."""
    whole = gather_from_tensor_model_parallel_region(logits)
    return torch.nn.functional.cross_entropy(whole.permute(1, 2, 0), labels, reduction="none")


def losses_and_gradients(
    length: int, mask: torch.Tensor, how: ContextParallelKind, tied: bool, memory: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the loss of each token of this rank and the gradient of each parameter."""
    weights = llamas.megatron_weights(llamas.made_up_weights())
    if tied:
        weights.pop("output_layer.weight")
    recompute = memory.get("recompute", Recompute())
    model = llamas.ours(
        RopeScaling.base_change(10_000),
        weights,
        torch.float64,
        cp=how,
        memory=memory,
        tied=tied,
        **recompute.megatron_settings(),
    )
    model.train()
    model.compute_language_model_loss = whole_loss
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, llamas.VOCAB, (BATCH, length + 1), generator=draw)
    batch = on_this_cp_rank(
        {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": mask,
            "position_ids": torch.arange(length).repeat(BATCH, 1),
        }
    )
    loss = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    loss = loss * batch["loss_mask"]
    (1.7 * loss).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def deviations(
    length: int, how: ContextParallelKind, names: list[str], variants: dict[str, dict[str, Any]]
) -> dict[str, float]:
    """Return the largest deviation of each variant from the plain model, over masks."""
    found: dict[str, float] = {}
    for mask_name in names:
        mask = masks(length)[mask_name]
        for tied in (False, True):
            plain = losses_and_gradients(length, mask, how, tied, {})
            for name, memory in variants.items():
                ours = losses_and_gradients(length, mask, how, tied, memory)
                assert ours.keys() == plain.keys()
                worst = max(float((ours[key] - plain[key]).abs().max()) for key in plain)
                found[name] = max(found.get(name, 0.0), worst)
    return found


def with_megatrons() -> dict[str, dict[str, Any]]:
    """Return Megatron's own modes, alone and around a tiled MLP."""
    return {
        f"{name} of Megatron, {tiling}": {"recompute": recompute, "tiling": tiling}
        for name, recompute in MEGATRON.items()
        for tiling in (Tiling(), MLP)
    }


def on_ranks(tp: int, cp: int, length: int) -> dict[str, dict[str, float]]:
    """Return the deviations of every variant by kind of context parallelism."""
    with cpu_backend(force=True):
        parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
        kinds = KINDS if cp > 1 else KINDS[1:]
        return {how.kind: deviations(length, how, ["some"], VARIANTS) for how in kinds}


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.kind)
def test_every_module_and_pair_equals_the_plain_model(kind):
    found = deviations(13, kind, list(masks(13)), VARIANTS)
    assert max(found.values()) < 1e-10, found


@pytest.mark.usefixtures("megatron_rank")
def test_megatrons_own_modes_equal_the_plain_model_with_and_without_tiles():
    found = deviations(13, KINDS[1], ["some"], with_megatrons())
    assert len(found) == 6
    assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize(
    ("tp", "cp", "length"),
    [pytest.param(2, 1, 26, marks=pytest.mark.nightly, id="TP"), pytest.param(1, 2, 28, id="CP")],
)
def test_every_module_and_pair_equals_the_plain_model_on_two_ranks(tp, cp, length):
    for found in run_ranks(on_ranks, 2, tp, cp, length):
        for kind, by_variant in found.items():
            assert max(by_variant.values()) < 1e-10, (kind, by_variant)
