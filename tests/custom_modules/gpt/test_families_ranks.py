# SPDX-License-Identifier: Apache-2.0
"""Each family's small model over tensor and context ranks against one rank, every gradient too."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from torch import Tensor

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.cpu.backend import cpu_backend
from tests.custom_modules.support import families
from tests.custom_modules.support.families import VOCAB, WITH_EXPERTS
from tests.custom_modules.support.shards import on_this_cp_rank
from tests.custom_modules.support.summed import summed_gradients
from tests.custom_modules.support.zigzag import made_up
from tests.ranks import megatron_backend, run_ranks

pytestmark = pytest.mark.slow

LENGTH, BATCH = 32, 3
RING = ContextParallelKind(kind="ring")
ULYSSES = ContextParallelKind(kind="ulysses")
CHUNKED = ContextParallelKind(kind="head_chunked", heads_per_stage=2)
LAYOUTS = {
    2: {
        (1, 1): {"alone": ULYSSES},
        (2, 1): {"plain": ULYSSES, "head-chunked": CHUNKED},
        (1, 2): {"ring": RING, "ulysses": ULYSSES, "head-chunked": CHUNKED},
    },
    4: {(1, 1): {"alone": ULYSSES}, (2, 2): {"ring": RING, "head-chunked": CHUNKED}},
}
"""Kinds by TP and CP, by the ranks there are."""
TOLERANCE = 1e-10
DISPATCHERS = {"mixtral": ("alltoall", "allgather"), "qwen3_moe": ("alltoall",)}


class Answer(NamedTuple):
    """What one rank computed."""

    tokens: Tensor
    """[s]: where they stand in the sequence."""
    logits: Tensor
    """[b, s, vocabulary of this tensor rank]."""
    gradients: dict[str, Tensor]
    """Summed over the ranks that Megatron sums over."""


def answer(family: str, kind: ContextParallelKind, dispatcher: str) -> Answer:
    """Return logits and gradients in Megatron's groups as they are now."""
    weights = families.megatron_weights(families.hugging_face(family, torch.float64).state_dict())
    experts = {"moe_aux_loss_coeff": 0.3, "moe_token_dispatcher_type": dispatcher}
    model = families.ours(
        family, weights, torch.float64, cp=kind, **(experts if family in WITH_EXPERTS else {})
    )
    (grad_out,) = made_up((BATCH, LENGTH, VOCAB), seed=3)
    run_on = torch.arange(LENGTH).repeat(BATCH, 1)
    shard = on_this_cp_rank(
        {
            "tokens": grad_out[:, :, 0].mul(1e6).long() % VOCAB,
            "position_ids": run_on,
            "grad_out": grad_out,
        }
    )
    logits = model(shard["tokens"], shard["position_ids"], None)
    tp = parallel_state.get_tensor_model_parallel_group()
    logits.backward(shard["grad_out"].chunk(tp.size(), dim=2)[tp.rank()])
    return Answer(shard["position_ids"][0], logits.detach(), summed_gradients(model))


def answers(ranks: int, names: list[str]) -> dict[tuple[str, str, int, int, str], Answer]:
    """Run every layout in one set of ranks, since a rank takes seconds to start."""
    found = {}
    with megatron_backend():
        for (tp, cp), kinds in LAYOUTS[ranks].items():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp, context_parallel_size=cp
            )
            for family in names:
                for dispatcher in DISPATCHERS.get(family, ("none",)):
                    for name, kind in kinds.items():
                        if kind is CHUNKED and family in families.UNCHUNKED:
                            continue
                        found[family, dispatcher, tp, cp, name] = answer(family, kind, dispatcher)
            parallel_state.destroy_model_parallel()
    return found


def differences(ranks: int, names: list[str]) -> dict[tuple[str, str, str], float]:
    """Return the largest relative difference from one rank, by family, layout and tensor."""
    ran = run_ranks(answers, ranks, ranks, names)
    found: dict[tuple[str, str, str], float] = {}
    for rank, of_rank in enumerate(ran):
        for (family, dispatcher, tp, cp, kind), mine in of_rank.items():
            whole, share = of_rank[family, dispatcher, 1, 1, "alone"], rank % tp
            pairs = {
                name: (gradient, families.part(family, name, whole.gradients[name], share, tp))
                for name, gradient in mine.gradients.items()
            }
            logits = whole.logits[:, mine.tokens].chunk(tp, dim=2)[share]
            for name, (ours, right) in {"logits": (mine.logits, logits), **pairs}.items():
                assert ours.shape == right.shape
                key = (family, f"TP={tp} CP={cp} {kind} {dispatcher}", name)
                error = ((ours - right).abs().max() / right.abs().max()).item()
                found[key] = max(found.get(key, 0.0), error)
    return found


def too_large(found: dict[tuple[str, str, str], float]) -> dict[tuple[str, str, str], float]:
    return {key: error for key, error in found.items() if not error < TOLERANCE}


def test_logits_and_every_gradient_on_two_ranks_are_those_of_one():
    found = differences(2, list(families.FAMILIES))
    every = 6 * (len(families.FAMILIES) + 1) - 2 * len(families.UNCHUNKED)
    assert len({key[:2] for key in found}) == every
    assert too_large(found) == {}


@pytest.mark.parity
def test_tensor_and_context_ranks_together_give_those_of_one():
    assert too_large(differences(4, ["mixtral", "nemotron", "olmo3", "gemma3"])) == {}


def resharded(folder: str) -> list[str]:
    """Save each family on two tensor ranks and load it on one; return what did not come back."""
    wrong = []
    with cpu_backend(force=True):
        for family in ("olmo3", "gemma3"):
            theirs = families.hugging_face(family, torch.float64)
            weights = families.megatron_weights(theirs.state_dict())
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
            saved = families.ours(family, weights, torch.float64)
            path = Path(folder) / family
            if torch.distributed.get_rank() == 0:
                path.mkdir()
            torch.distributed.barrier()
            dist_checkpointing.save(saved.sharded_state_dict(), str(path))
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel()
            zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            loaded = families.ours(family, zeros, torch.float64)
            state = dist_checkpointing.load(loaded.sharded_state_dict(), str(path))
            loaded.load_state_dict(state)
            parameters = loaded.named_parameters()
            wrong += [name for name, one in parameters if not torch.equal(one, weights[name])]
            parallel_state.destroy_model_parallel()
    return wrong


def test_norms_over_all_heads_and_after_projections_are_resharded(tmp_path):
    assert run_ranks(resharded, 2, str(tmp_path)) == [[], []]
