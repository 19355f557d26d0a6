# SPDX-License-Identifier: Apache-2.0
"""The model over 4 ranks, by context and tensor parallelism of every kind, against one rank."""

from typing import NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from custom_modules.attention.documents import Documents
from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.gpt.model import long_context_spec
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.custom_modules.support.shards import on_this_cp_rank
from tests.custom_modules.support.summed import summed_gradients
from tests.custom_modules.support.zigzag import made_up
from tests.ranks import megatron_backend, run_ranks

LENGTH, BATCH = 32, 3
DOCUMENTS = {"one": None, "many": Documents.of([[1, 7, 13, 8, 3], [32], [5, 26, 1]])}
RING = ContextParallelKind(kind="ring")
ULYSSES = ContextParallelKind(kind="ulysses")
LAYOUTS = {
    (1, 1): {"alone": ULYSSES},
    (2, 2): {
        "ring": RING,
        "ulysses": ULYSSES,
        "head-chunked by 2": ContextParallelKind(kind="head_chunked"),
        "head-chunked by 4": ContextParallelKind(kind="head_chunked", heads_per_stage=4),
        "auto": ContextParallelKind(),
    },
    (1, 4): {
        "ring": RING,
        "ulysses": ULYSSES,
        "head-chunked by 4": ContextParallelKind(kind="head_chunked"),
        "ring by 1": ContextParallelKind(kind="hybrid", ulysses=1, heads_per_stage=1),
        "hybrid 2x2": ContextParallelKind(kind="hybrid", ulysses=2),
        "hybrid 2x2 by 2": ContextParallelKind(kind="hybrid", ulysses=2, heads_per_stage=2),
        "hybrid 2x2 by 8": ContextParallelKind(kind="hybrid", ulysses=2, heads_per_stage=8),
    },
}
"""Kinds by TP and CP."""
PLAIN = ("plain GPTModel", RING)
# Everything is float64 but cos and sin, which are the same on every rank.
TOLERANCE = 1e-10
# Megatron's own rotary embedding has fp32 angles, good to 2^-24 of 32 radians, in every layer.
PLAIN_TOLERANCE = 1e-4


class Answer(NamedTuple):
    """What one rank computed."""

    tokens: Tensor
    """[s]: where they stand in the sequence."""
    logits: Tensor
    """[b, s, vocabulary of this tensor rank]."""
    gradients: dict[str, Tensor]
    """Summed over the ranks that Megatron sums over."""


def answer(kind: ContextParallelKind, documents: Documents | None, *, plain: bool) -> Answer:
    """Return logits and gradients in Megatron's groups as they are now."""
    weights = llamas.with_norms_and_bias(llamas.megatron_weights(llamas.made_up_weights()))
    fields = {"qk_layernorm": True, "add_qkv_bias": True}
    if plain:
        config = llamas.configuration(torch.float64, **fields)
        model = GPTModel(
            config,
            transformer_layer_spec=long_context_spec(config, cp=kind),
            vocab_size=llamas.VOCAB,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
            rotary_base=1000,
        )
        llamas.load(model, weights)
    else:
        rope = RopeScaling.base_change(1000)
        model = llamas.ours(rope, weights, torch.float64, cp=kind, **fields)
    (grad_out,) = made_up((BATCH, LENGTH, llamas.VOCAB), seed=3)
    run_on = torch.arange(LENGTH).repeat(BATCH, 1)
    shard = on_this_cp_rank(
        {
            "tokens": grad_out[:, :, 0].mul(1e6).long() % llamas.VOCAB,
            "position_ids": run_on if documents is None else documents.position_ids(),
            "stands_at": run_on,
            "grad_out": grad_out,
        }
    )
    logits = model(shard["tokens"], shard["position_ids"], None, packed_seq_params=documents)
    tp = parallel_state.get_tensor_model_parallel_group()
    logits.backward(shard["grad_out"].chunk(tp.size(), dim=2)[tp.rank()])
    return Answer(shard["stands_at"][0], logits.detach(), summed_gradients(model))


def answers() -> dict[tuple[int, int, str, str], Answer]:
    """Run every layout in one set of ranks, since a rank takes seconds to start."""
    found = {}
    with megatron_backend():
        for (tp, cp), kinds in LAYOUTS.items():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp, context_parallel_size=cp
            )
            for name, kind in [*kinds.items(), PLAIN]:
                for documents, table in DOCUMENTS.items():
                    plain = name == PLAIN[0]
                    found[tp, cp, name, documents] = answer(kind, table, plain=plain)
            parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def ran() -> list[dict[tuple[int, int, str, str], Answer]]:
    return run_ranks(answers, 4)


EACH = pytest.mark.parametrize(
    ("tp", "cp", "kind"),
    [(*sizes, kind) for sizes, kinds in LAYOUTS.items() for kind in [*kinds, PLAIN[0]]],
    ids=str,
)


@pytest.mark.parity
@EACH
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_logits_and_every_gradient_are_those_of_one_rank(ran, tp, cp, kind, documents):
    tolerance = PLAIN_TOLERANCE if kind == PLAIN[0] else TOLERANCE
    whole = ran[0][1, 1, "alone", documents]
    for rank, of_rank in enumerate(ran):
        mine, share = of_rank[tp, cp, kind, documents], rank % tp
        right = whole.logits[:, mine.tokens].chunk(tp, dim=2)[share]
        assert mine.logits.shape == right.shape
        assert relative(mine.logits, right) < tolerance
        assert mine.gradients.keys() == whole.gradients.keys()
        for name, gradient in mine.gradients.items():
            part = llamas.tensor_parallel_part(name, whole.gradients[name], share, tp)
            assert relative(gradient, part) < tolerance, name


def test_documents_change_the_logits(ran):
    one, many = (ran[0][1, 1, "alone", documents].logits for documents in DOCUMENTS)
    assert relative(many[0, 1:], one[0, 1:]) > 0.1
    assert torch.equal(many[1], one[1]), "a sequence of one document"


@pytest.mark.parity
def test_all_tokens_are_on_some_rank(ran):
    for tp, cp in LAYOUTS:
        places = [of_rank[tp, cp, PLAIN[0], "one"].tokens for of_rank in ran]
        assert sorted(torch.cat(places).tolist()) == sorted(list(range(LENGTH)) * (4 // cp))


def relative(ours: Tensor, right: Tensor) -> float:
    """Return the largest difference, over the largest value."""
    return ((ours - right).abs().max() / right.abs().max()).item()
