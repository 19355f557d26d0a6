# SPDX-License-Identifier: Apache-2.0
"""Documents in the model on one rank: each gives what it gives alone."""

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from custom_modules.attention.documents import Documents
from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.gpt.model import long_context_spec
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.custom_modules.support.zigzag import made_up

pytestmark = pytest.mark.usefixtures("megatron_rank")

LENGTHS = [[1, 13, 29, 18], [61], [30, 30, 1]]
DOCUMENTS = Documents.of(LENGTHS)
ROPE = RopeScaling.base_change(1000)
KINDS = {
    "ring": ContextParallelKind(kind="ring"),
    "ulysses": ContextParallelKind(kind="ulysses"),
    "head-chunked by 1": ContextParallelKind(kind="head_chunked"),
    "head-chunked by 8": ContextParallelKind(kind="head_chunked", heads_per_stage=8),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
EXACT = 1e-10  # float64, in another order of sums
# Megatron's own rotary embedding has fp32 angles, good to 2^-24 of 61 radians, in every layer.
FP32_ANGLES = 1e-4


def tokens() -> Tensor:
    return torch.randint(
        0, llamas.VOCAB, (len(LENGTHS), 61), generator=torch.Generator().manual_seed(4)
    )


def grad_out() -> Tensor:
    return made_up((len(LENGTHS), 61, llamas.VOCAB), seed=5)[0]


def weights() -> llamas.Weights:
    return llamas.with_norms_and_bias(llamas.megatron_weights(llamas.made_up_weights()))


def model(kind: ContextParallelKind, **config: object) -> nn.Module:
    return llamas.ours(
        ROPE, weights(), torch.float64, cp=kind, qk_layernorm=True, add_qkv_bias=True, **config
    )


def plain_model(kind: ContextParallelKind) -> nn.Module:
    """Return Megatron's own model over our layers."""
    config = llamas.configuration(torch.float64, qk_layernorm=True, add_qkv_bias=True)
    made = GPTModel(
        config,
        transformer_layer_spec=long_context_spec(config, cp=kind),
        vocab_size=llamas.VOCAB,
        max_sequence_length=61,
        position_embedding_type="rope",
        rotary_base=1000,
    )
    llamas.load(made, weights())
    return made


def results(made: nn.Module, documents: Documents | None = DOCUMENTS) -> dict[str, Tensor]:
    """Return logits and gradients of the packed sequences."""
    positions = torch.arange(61).repeat(3, 1) if documents is None else documents.position_ids()
    logits = made(tokens(), positions, None, packed_seq_params=documents)
    logits.backward(grad_out())
    return {"logits": logits.detach()} | {n: p.grad for n, p in made.named_parameters()}


@pytest.fixture
def alone() -> dict[str, Tensor]:
    """Return logits and gradients of documents that a model sees one at a time."""
    made, logits = model(KINDS["ring"]), torch.empty_like(grad_out())
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            here = (slice(row, row + 1), slice(start, start + length))
            out = made(tokens()[here], torch.arange(length)[None], None)
            out.backward(grad_out()[here])
            logits[here] = out.detach()
            start += length
    return {"logits": logits} | {n: p.grad for n, p in made.named_parameters()}


def assert_close(ours: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    """Compare by the largest value of each."""
    assert ours.keys() == right.keys()
    for name, expected in right.items():
        error = (ours[name] - expected).abs().max() / expected.abs().max()
        assert error < tolerance, f"{name} differs by {error:.1e} of its largest value"


@EACH_KIND
@pytest.mark.parametrize("config", [{}, RECOMPUTED], ids=["kept", "recomputed"])
def test_packed_documents_give_what_each_gives_alone(alone, kind, config):
    assert_close(results(model(kind, **config)), alone, EXACT)


@EACH_KIND
def test_a_plain_gpt_model_over_our_layers_gives_the_same(kind):
    for documents in (None, DOCUMENTS):
        ours, theirs = results(model(kind), documents), results(plain_model(kind), documents)
        assert_close(theirs, ours, FP32_ANGLES)


def test_recomputed_layers_run_once_more(monkeypatch):
    made, calls = model(KINDS["ring"], **RECOMPUTED), []
    layer = made.decoder.layers[0].self_attention
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    results(made)
    assert calls == ["forward"] * 2


@pytest.mark.parametrize("kind", ["ring", "head-chunked by 1"])
@pytest.mark.parametrize("lengths", [[[60]] * 3, [[61]] * 2], ids=str)
def test_a_table_of_other_sequences_is_refused(kind, lengths):
    with pytest.raises(ValueError, match="the document table covers"):
        model(KINDS[kind])(
            tokens(),
            torch.arange(61).repeat(3, 1),
            None,
            packed_seq_params=Documents.of(lengths),
        )
