# SPDX-License-Identifier: Apache-2.0
"""Experts divided over ranks (EP), and split otherwise than the other layers (ETP), against one."""

from typing import NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.memory.config import Recompute
from tests.custom_modules.support import families
from tests.custom_modules.support.families import VOCAB
from tests.custom_modules.support.shards import on_this_cp_rank
from tests.custom_modules.support.summed import summed_gradients
from tests.custom_modules.support.zigzag import made_up
from tests.ranks import megatron_backend, run_ranks

pytestmark = pytest.mark.slow

LENGTH, BATCH, TOLERANCE = 32, 3, 1e-10
RING = ContextParallelKind(kind="ring")


class Sizes(NamedTuple):
    """Ranks of each kind."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1


ALONE = Sizes()
LAYOUTS = {
    2: (Sizes(cp=2, ep=2), Sizes(tp=2, ep=2), Sizes(tp=2), Sizes(cp=2, etp=2)),
    4: (
        Sizes(tp=2, cp=2, ep=4), Sizes(tp=2, cp=2, ep=2), Sizes(tp=2, cp=2, ep=2, etp=2),
        Sizes(cp=4, ep=2), Sizes(tp=4, ep=2, etp=2),
    ),
}  # fmt: skip
"""By the ranks there are; an expert is whole where ETP is not said."""
DISPATCHERS = ("alltoall", "allgather")


def answer(dispatcher: str, whole: dict[str, Tensor] | None) -> dict[str, Tensor | float]:
    """Return logits and gradients alone, or their largest relative differences from these."""
    theirs = families.hugging_face("qwen3_moe", torch.float64)
    model = families.ours(
        "qwen3_moe", families.megatron_weights(theirs.state_dict()), torch.float64, cp=RING,
        memory={"recompute": Recompute(kind="kept_attention")},
        moe_aux_loss_coeff=0.3, moe_token_dispatcher_type=dispatcher,
    ).train()  # fmt: skip
    (grad_out,) = made_up((BATCH, LENGTH, VOCAB), seed=3)
    shard = on_this_cp_rank(
        {
            "tokens": grad_out[:, :, 0].mul(1e6).long() % VOCAB,
            "position_ids": torch.arange(LENGTH).repeat(BATCH, 1),
            "grad_out": grad_out,
        }
    )
    logits = model(shard["tokens"], shard["position_ids"], None)
    tp = parallel_state.get_tensor_model_parallel_group()
    logits.backward(shard["grad_out"].chunk(tp.size(), dim=2)[tp.rank()])
    found = {"logits": logits.detach(), **summed_gradients(model)}
    if whole is None:
        return found
    tokens = shard["position_ids"][0]
    right = {"logits": whole["logits"][:, tokens].chunk(tp.size(), dim=2)[tp.rank()]}
    for name in found.keys() - right.keys():
        right[name] = families.of_this_rank("qwen3_moe", name, whole)
    return {
        name: ((ours - right[name]).abs().max() / right[name].abs().max()).item()
        for name, ours in found.items()
    }


def differences(ranks: int) -> dict[tuple[Sizes, str], dict[str, float]]:
    """Run every layout in one set of ranks."""
    found = {}
    with megatron_backend():
        for dispatcher in DISPATCHERS:
            whole = None
            for sizes in (ALONE, *LAYOUTS[ranks]):
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=sizes.tp,
                    context_parallel_size=sizes.cp,
                    expert_model_parallel_size=sizes.ep,
                    expert_tensor_parallel_size=sizes.etp,
                )
                found[sizes, dispatcher] = answer(dispatcher, whole)
                parallel_state.destroy_model_parallel()
                if whole is None:
                    whole = found.pop((sizes, dispatcher))
    return found


@pytest.mark.parity
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_logits_and_every_gradient_are_those_of_one_rank(ranks: int):
    for of_rank in run_ranks(differences, ranks, ranks):
        assert len(of_rank) == len(DISPATCHERS) * len(LAYOUTS[ranks])
        for layout, errors in of_rank.items():
            assert sum("local_experts" in name for name in errors) in (4, 8, 16), layout
            large = {name: error for name, error in errors.items() if not error < TOLERANCE}
            assert large == {}, layout
