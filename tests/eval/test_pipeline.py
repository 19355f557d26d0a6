# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages, with data, context and tensor ranks, measure a model as one rank does."""

from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from custom_modules.cpu.backend import cpu_backend
from custom_modules.gpt.model import LongContextGPT
from custom_modules.rope.config import RopeScaling
from eval.answers.generation import recomputing
from eval.answers.passkey import Prompt
from eval.answers.passkey_grid import passkey_row
from eval.loss.context_gain import context_gain
from eval.loss.loss_by_position import loss_by_position
from eval.loss.short_loss import short_loss
from eval.model_facts import parameters_of
from tests.custom_modules.support import llamas
from tests.ranks import one_rank, run_ranks

WINDOW, NEW_TOKENS, ANSWER = 128, 3, 5
LAYOUTS = {
    "PP=2 DP=2": {},
    "PP=2 CP=2": {"context_parallel_size": 2},
    "PP=2 TP=2": {"tensor_model_parallel_size": 2},
}
MODELS = {"untied": False, "tied": True}
CASES = list(product(LAYOUTS, MODELS))


class Scores(NamedTuple):
    """What a rank measured."""

    by_position: list[list[float]]
    gain: list[list[float]]
    short: list[float]
    passkeys: list[list[float]]
    generated: list[int]
    parameters: int
    """Of this model over all ranks."""
    own: int
    """Parameters that are on this rank."""


def documents(*lengths: int) -> list[np.ndarray]:
    draws = np.random.default_rng(9)
    return [draws.integers(0, llamas.VOCAB, length) for length in lengths]


def cells(generated: list[int]) -> list[list[Prompt]]:
    """Return prompts of two depths: one of random answers, and one of which the model says one."""
    made = [Prompt(each, ANSWER) for each in documents(30, 32, 29)]
    said = np.concatenate((made[0].tokens, generated))
    return [made, [Prompt(said, NEW_TOKENS)]]


def scores(model: LongContextGPT) -> Scores:
    generated = recomputing(model)(documents(30)[0].tolist(), NEW_TOKENS)
    return Scores(
        loss_by_position(model, documents(WINDOW + 1, WINDOW + 9, WINDOW + 30), WINDOW).tolist(),
        np.array(
            context_gain(model, documents(WINDOW + 3, WINDOW + 4), WINDOW).by_document
        ).tolist(),
        list(short_loss(model, documents(18, 33, 64), WINDOW).by_document),
        passkey_row(model, cells(generated)),
        generated,
        parameters_of(model),
        sum(each.numel() for each in model.parameters()),
    )


def measured(tied: bool, **sizes: int) -> Scores:
    with cpu_backend(force=True):
        parallel_state.initialize_model_parallel(**sizes)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        weights = llamas.megatron_weights(llamas.made_up_weights())
        model = llamas.ours(
            RopeScaling.base_change(10_000),
            llamas.of_stage(weights, stage, stages, tied=tied),
            torch.float32,
            tied=tied,
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            pipeline_model_parallel_size=stages,
        )
        found = scores(model.eval())
        parallel_state.destroy_model_parallel()
    return found


def in_every_layout() -> dict[tuple[str, str], Scores]:
    """Measure in each layout in one set of ranks, since a rank takes seconds."""
    return {
        (layout, model): measured(MODELS[model], pipeline_model_parallel_size=2, **LAYOUTS[layout])
        for layout, model in CASES
    }


@pytest.fixture(scope="module")
def found() -> list[dict[tuple[str, str], Scores]]:
    return run_ranks(in_every_layout, 4)


@pytest.fixture(scope="module")
def alone() -> dict[str, Scores]:
    with one_rank():
        return {model: measured(tied) for model, tied in MODELS.items()}


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_every_stage_has_the_scores_of_one_rank(found, alone, layout, model):
    expected = alone[model]
    assert expected.passkeys[0][0] < 3
    assert expected.passkeys[1][0] == 1  # the answer that the model generates is a hit
    for of_rank in found:
        scores = of_rank[layout, model]
        for name in ("by_position", "gain", "short", "passkeys"):
            whole = np.array(getattr(expected, name))
            assert np.isfinite(whole).all()
            assert np.array(getattr(scores, name)) == pytest.approx(whole, rel=1e-5), name
        assert scores.generated == expected.generated


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_the_size_of_a_model_is_counted_once_over_its_stages(found, alone, layout, model):
    assert {of_rank[layout, model].parameters for of_rank in found} == {alone[model].own}
    assert all(of_rank[layout, model].own < alone[model].own for of_rank in found)
