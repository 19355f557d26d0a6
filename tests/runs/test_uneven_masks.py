# SPDX-License-Identifier: Apache-2.0
"""A context rank with one valid token weighs as one token, in training and in validation."""

import json

import pytest
import torch

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one rank": {"cp": 1},
    "two": {"cp": 2},
    "two, by tiles": {
        "cp": 2,
        "recompute": {"kind": "kept_attention"},
        "tiling": {"loss": True, "loss_tile": 100, "mlp": True, "mlp_tile": 100},
        "offload": {"tensors": "both", "cap_gib": 1.0},
    },
}


def test_one_valid_token_on_a_context_rank_gives_the_gradients_of_one_rank(training_run):
    runs = {
        name: training_run(
            f"uneven{number}", ranks=layout["cp"], layout=layout, uneven=True, steps=5
        )
        for number, (name, layout) in enumerate(LAYOUTS.items())
    }
    steps = {name: [step["loss"] for step in run.finish()] for name, run in runs.items()}
    gradients = {
        name: torch.load(run.folder / "gradients.pt", weights_only=True)
        for name, run in runs.items()
    }
    validation = {
        name: [
            json.loads(line) for line in (run.folder / "validation.jsonl").read_text().splitlines()
        ]
        for name, run in runs.items()
    }
    for name in ("two", "two, by tiles"):
        assert gradients[name].keys() == gradients["one rank"].keys()
        for parameter, reference in gradients["one rank"].items():
            error = (gradients[name][parameter] - reference).norm() / reference.norm()
            assert error < 1e-6, (name, parameter)
        assert validation[name] == pytest.approx(validation["one rank"], rel=1e-6)
        assert steps[name] == pytest.approx(steps["one rank"], rel=1e-6)
