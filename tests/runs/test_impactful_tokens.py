# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints of a run say which tokens are impactful; a stage trains on their sentences."""

import json
import shutil
from pathlib import Path

import pytest

from tests.runs.conftest import TrainingRun, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LENGTH, DOCUMENTS, SHARE = 512, 4, 0.1


def trained(folder: Path, store: Path, **options) -> Path:
    """Train a few steps and return the folder of the stage with its recipe."""
    from recipes.resolved import yaml_file
    from tests.runs.train import recipe

    run = TrainingRun(folder, store, ranks=1, layout={}, **options)
    run.finish()
    stage = run.metrics.parent
    yaml_file.write(recipe(run.options), stage / "config.yaml")
    return stage


def analysis(store: Path, before: Path, after: Path, *, ranks: int, cp: int) -> dict:
    """Run the command on a store and return what it left there."""
    torchrun(
        ranks, "eval.loss.impactful_tokens", store, before, after, "--length", LENGTH,
        "--documents", DOCUMENTS, "--share", SHARE, "--context-parallel", cp,
    )  # fmt: skip
    return json.loads((store / "impactful_tokens.json").read_text())


def test_two_ranks_find_the_tokens_of_one_and_a_stage_keeps_their_sentences(tmp_path, small_store):
    store = shutil.copytree(small_store, tmp_path / "store")
    before = trained(tmp_path / "before", store, steps=2)
    after = trained(tmp_path / "after", store, steps=6)
    alone = analysis(store, before, after, ranks=1, cp=1)
    assert alone["places"] == LENGTH * DOCUMENTS
    assert (alone["before"], alone["after"]) == ("tiny_512 step=2", "tiny_512 step=6")
    assert 1 < len(alone["tokens"]) <= SHARE * 512 + 1
    shared = analysis(store, before, after, ranks=2, cp=2)
    assert set(shared["tokens"]) == set(alone["tokens"])
    positions = {"kind": "longrecipe", "target_length": 2048, "sentences": "impactful"}
    run = TrainingRun(
        tmp_path / "stage", store, ranks=1, layout={}, positions=positions, steps=2,
        start=str(after / "checkpoints"),
    )  # fmt: skip
    assert [step["samples"] for step in run.finish()] == [[0, 1], [2, 3]]
