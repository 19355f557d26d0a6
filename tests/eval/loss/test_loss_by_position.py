# SPDX-License-Identifier: Apache-2.0
"""Ranks that read a stage's checkpoint in parts score as transformers does from its export."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.eval.stage_and_export import Models
from tests.ranks import Ranks
from tests.recipes.hugging_face.support.stages import LENGTH
from tests.runs.conftest import NEMO

pytestmark = pytest.mark.slow

BIN = 64
DOCUMENTS = 2
LAYOUTS = {
    "CP=2 TP=2": {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
}


def documents(store: Path) -> list[NDArray[np.int64]]:
    """Return the first held-out documents that are longer than the context."""
    from data.token_files.held_out import long_documents

    return list(islice(long_documents(store, min_tokens=LENGTH + 1), DOCUMENTS))


def scores_of_rank(stage: str, store: str) -> dict[str, NDArray[np.float64]]:
    """Return the loss by position of each layout."""
    from megatron.core import parallel_state

    from custom_modules.cpu.backend import cpu_backend
    from eval.load_model import load
    from eval.loss.loss_by_position import loss_by_position

    scores = {}
    with cpu_backend(force=True):
        for name, sizes in LAYOUTS.items():
            parallel_state.initialize_model_parallel(**sizes)
            model = load(Path(stage), seq_length=LENGTH)
            scores[name] = loss_by_position(model, documents(Path(store)), LENGTH)
            parallel_state.destroy_model_parallel()
    return scores


@pytest.fixture(scope="module")
def models(tmp_path_factory, small_store) -> Models:
    return Models(tmp_path_factory.mktemp("models"), small_store)


@pytest.fixture(scope="module")
def scores(models) -> list[dict[str, NDArray[np.float64]]]:
    """Return what each of four ranks computed."""
    with Ranks(scores_of_rank, 4, str(models.stage), str(models.store), server=NEMO) as started:
        return started.results(300)


@pytest.fixture(scope="module")
def of_transformers(models) -> NDArray[np.float64]:
    """Return the loss of each document, a row, in bins of positions, from the export's logits."""
    import transformers

    from eval.loss.loss_by_position import windows

    model = transformers.AutoModelForCausalLM.from_pretrained(models.export, dtype=torch.float32)
    rows = []
    for window in windows(documents(models.store), LENGTH):
        tokens = torch.from_numpy(window)
        with torch.no_grad():
            told = model(tokens[None, :-1]).logits[0].double().log_softmax(-1)
        losses = [-float(told[at, tokens[at + 1]]) for at in range(LENGTH)]
        rows.append([sum(losses[at : at + BIN]) / BIN for at in range(0, LENGTH, BIN)])
    return np.array(rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_has_the_loss_by_position_of_its_export(scores, of_transformers, layout):
    assert of_transformers.shape == (DOCUMENTS, LENGTH // BIN)
    assert of_transformers.std() > 0.01  # bins differ by much more than the bound
    for of_rank in scores:
        assert of_rank[layout] == pytest.approx(of_transformers, rel=0, abs=1e-4)
