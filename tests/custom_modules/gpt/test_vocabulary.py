# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that tensor ranks do not divide: the model is that of one rank without padding."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from custom_modules.cpu.backend import cpu_backend
from custom_modules.gpt.model import LongContextGPT
from custom_modules.gpt.vocabulary import padded_vocabulary
from custom_modules.memory.config import Recompute, Tiling
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.custom_modules.support.summed import summed_gradients
from tests.ranks import run_ranks

VOCAB, LENGTH, BATCH = 301, 12, 2
WIDTHS = {"hidden_size": 24, "num_attention_heads": 12, "num_query_groups": 12}
CASES = [(tied, tiled) for tied in (False, True) for tiled in (False, True)]
LAYOUTS = {"first": 1, "two": 2, "four": 4, "three": 3, "last": 1}
"""Tensor ranks of models that each start from the checkpoint of the one before."""
# Megatron's cross-entropy is fp32, of values around 7; all else is float64.
TOLERANCES = {False: 1e-5, True: 1e-10}
LARGE = 9.0
"""In the padding of a foreign checkpoint, whose padding has been trained."""


class Answer(NamedTuple):
    """What one rank computed."""

    losses: Tensor
    logits: Tensor
    """[b, s, rows of this tensor rank]."""
    gradients: dict[str, Tensor]
    """Of the sum of the losses."""


def built(*, tied: bool, tiled: bool) -> LongContextGPT:
    """Return the model in Megatron's groups as they are now, its weights drawn."""
    model_parallel_cuda_manual_seed(1)
    return LongContextGPT(
        llamas.configuration(torch.float64, **WIDTHS),
        rope=RopeScaling.base_change(1000),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
        recompute=Recompute(kind="kept_attention" if tiled else "none"),
        tiling=Tiling(loss=True, loss_tile=7) if tiled else Tiling(),
    )


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and labels [b, s]; the last tokens of the vocabulary are among both."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=draw)
    tokens[:, 3:6] = torch.tensor([VOCAB - 1, VOCAB - 2, VOCAB - 1])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def answer(model: LongContextGPT) -> Answer:
    tokens, labels = batch()
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    with torch.no_grad():
        logits = model(tokens, positions, None)
    losses = model(tokens, positions, None, labels=labels)
    losses.sum().backward()
    return Answer(losses.detach(), logits, summed_gradients(model))


def by_formula(model: LongContextGPT) -> Answer:
    """Return the same of a model without padding, by PyTorch's cross-entropy."""
    tokens, labels = batch()
    logits = model(tokens, torch.arange(LENGTH).repeat(BATCH, 1), None)
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    losses.sum().backward()
    return Answer(losses.detach(), logits.detach(), summed_gradients(model))


def load(model: LongContextGPT, folder: Path) -> None:
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(folder)))


def save(model: LongContextGPT, folder: Path) -> None:
    """Write a checkpoint as one that has trained its padding."""
    first = parallel_state.get_tensor_model_parallel_rank() * model.vocab_size
    first //= parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            parameter.data[max(VOCAB - first, 0) :] = LARGE
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), str(folder))


def answers(folder: Path, name: str, start: str | None) -> dict[object, Answer | dict[str, Tensor]]:
    """Run all models of a layout in one set of ranks, since a rank takes seconds to start."""
    found: dict[object, Answer | dict[str, Tensor]] = {}
    with cpu_backend(force=True):
        size = torch.distributed.get_world_size()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        for tied, tiled in CASES:
            model = built(tied=tied, tiled=tiled)
            found[tied, "drawn"] = model.embedding.word_embeddings.weight.detach().clone()
            if start is not None:
                load(model, folder / start / str(tied))
            weights = {key: value.detach().clone() for key, value in model.named_parameters()}
            found[tied, "weights"] = weights
            found[tied, tiled] = answer(model) if start is not None else by_formula(model)
            if not tiled:
                save(model, folder / name / str(tied))
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return the answers of each rank of each layout."""
    folder, starts = tmp_path_factory.mktemp("padded"), [None, *LAYOUTS]
    return {
        name: run_ranks(answers, size, folder, name, start)
        for (name, size), start in zip(LAYOUTS.items(), starts[:-1], strict=True)
    }


def of_rank(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return a tensor rank's part of a weight or its gradient, 0 for the padding."""
    if "word_embeddings" in name or "output_layer" in name:
        rows = padded_vocabulary(VOCAB, size)
        return pad(whole, (0, 0, 0, rows - VOCAB)).chunk(size)[rank]
    return llamas.tensor_parallel_part(name, whole, rank, size)


EACH = pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
KINDS = pytest.mark.parametrize(
    ("tied", "tiled"),
    CASES,
    ids=["untied, whole", "untied, tiled", "tied, whole", "tied, tiled"],
)


@EACH
@KINDS
def test_losses_and_gradients_are_those_of_the_formula_without_padding(ran, layout, tied, tiled):
    right = ran["first"][0][tied, tiled]
    for rank, found in enumerate(ran[layout]):
        ours = found[tied, tiled]
        assert (ours.losses - right.losses).abs().max() < TOLERANCES[tiled]
        assert ours.gradients.keys() == right.gradients.keys()
        for name, gradient in ours.gradients.items():
            part = of_rank(name, right.gradients[name], rank, len(ran[layout]))
            assert gradient.shape == part.shape
            scale = right.gradients[name].abs().max()
            assert (gradient - part).abs().max() < TOLERANCES[tiled] * scale, name
            assert not gradient[(part == 0).all(-1)].any(), "the gradient of padding is exactly 0"


@EACH
@KINDS
def test_no_logit_of_the_padding_is_ever_the_largest(ran, layout, tied, tiled):
    right = ran["first"][0][tied, tiled].logits
    logits = torch.cat([found[tied, tiled].logits for found in ran[layout]], dim=2)
    assert logits.shape[2] == padded_vocabulary(VOCAB, len(ran[layout]))
    torch.testing.assert_close(logits[:, :, :VOCAB], right, rtol=0, atol=1e-10)
    assert (logits[:, :, VOCAB:] == torch.finfo(logits.dtype).min).all()
    assert torch.equal(logits.argmax(2), right.argmax(2))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@EACH
def test_a_checkpoint_loads_bit_for_bit_whatever_padding_it_was_written_with(ran, layout, tied):
    size = len(ran[layout])
    for name, whole in ran["first"][0][tied, "weights"].items():
        parts = [found[tied, "weights"][name] for found in ran[layout]]
        if "word_embeddings" in name or "output_layer" in name:
            assert torch.equal(torch.cat(parts)[:VOCAB], whole)
        else:
            for rank, part in enumerate(parts):
                assert torch.equal(part, llamas.tensor_parallel_part(name, whole, rank, size))


def test_padding_is_zero_in_drawn_weights_and_where_the_checkpoint_has_none(ran):
    drawn = torch.cat([found[False, "drawn"] for found in ran["two"]])
    assert drawn[:VOCAB].all()
    assert not drawn[VOCAB:].any()
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        parts = [found[False, "weights"][key] for found in ran["two"]]
        assert not torch.cat(parts)[VOCAB:].any()


def test_a_vocabulary_that_ranks_divide_is_not_padded_and_another_to_nemos_divisor():
    assert [padded_vocabulary(49_152, tp) for tp in (1, 2, 3, 8)] == [49_152] * 4
    assert padded_vocabulary(49_153, 1) == 49_153
    assert padded_vocabulary(49_153, 2) == 49_408
    assert padded_vocabulary(49_153, 4) == 49_664
    assert padded_vocabulary(32_000, 3) == 32_256
