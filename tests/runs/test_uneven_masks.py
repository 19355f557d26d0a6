# SPDX-License-Identifier: Apache-2.0
"""A context rank with one valid token weighs as one token, in training and in validation."""

import json

import pytest
import torch

pytestmark = pytest.mark.slow


def test_one_valid_token_on_a_context_rank_gives_the_gradients_of_one_rank(training_run):
    runs = {
        size: training_run(f"cp{size}", ranks=size, layout={"cp": size}, uneven=True, steps=5)
        for size in (1, 2)
    }
    steps = {size: run.finish() for size, run in runs.items()}
    gradients = {
        size: torch.load(run.folder / "gradients.pt", weights_only=True)
        for size, run in runs.items()
    }
    assert gradients[1].keys() == gradients[2].keys()
    for name, reference in gradients[1].items():
        error = (gradients[2][name] - reference).norm() / reference.norm()
        assert error < 1e-6, name
    validation = {
        size: [
            json.loads(line) for line in (run.folder / "validation.jsonl").read_text().splitlines()
        ]
        for size, run in runs.items()
    }
    assert validation[2] == pytest.approx(validation[1], rel=1e-6)
    assert [step["loss"] for step in steps[2]] == pytest.approx(
        [step["loss"] for step in steps[1]], rel=1e-6
    )
