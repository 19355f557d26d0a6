# SPDX-License-Identifier: Apache-2.0
"""`longhaul evaluate`: the ranges of positions that it takes where none are named."""

from pathlib import Path

import pytest

from custom_modules.rope.config import RopeScaling
from eval.base_model import BASE, BaseModel
from eval.run_folder import BUCKET, evaluation_path, write_json
from longhaul.commands.evaluate import latest_ends, with_context_of
from longhaul.run_folder.stage_named import require_any_checkpoint


@pytest.mark.parametrize(
    ("context", "ends"),
    [
        (4 * BUCKET, [2 * BUCKET, 4 * BUCKET, 8 * BUCKET]),
        (2 * BUCKET, [2 * BUCKET, 8 * BUCKET]),
        (16 * BUCKET, [2 * BUCKET, 8 * BUCKET]),
        (BUCKET + 1, [2 * BUCKET, 8 * BUCKET]),
    ],
    ids=["between", "the same", "beyond", "no whole bucket"],
)
def test_a_range_ends_where_the_context_of_the_base_model_does(context, ends):
    base = BaseModel(BASE, Path("x"), Path("x"), RopeScaling.base_change(10_000), context)
    assert with_context_of(base, [2 * BUCKET, 8 * BUCKET]) == ends


def test_what_is_missing_keeps_the_ranges_of_what_is_there(tmp_path):
    assert latest_ends(tmp_path, ["one", "two"], 512) == []
    ranges = [
        {"start": 0, "stop": 128, "loss": 2.5, "tokens": 128},
        {"start": 128, "stop": 512, "loss": 2.5, "tokens": 384},
    ]
    made = {
        "stage": "two", "seq_length": 512, "eval_length": 512, "documents": 1, "tokens": 512,
        "ranges": ranges,
    }  # fmt: skip
    write_json(evaluation_path(tmp_path, "two"), made)
    assert latest_ends(tmp_path, ["one", "two"], 512) == [128, 512]
    assert latest_ends(tmp_path, ["one", "two"], 1024) == []


def test_pipeline_stages_are_refused_for_tasks(answer):
    said = answer("evaluate", "--run", "runs/tiny", "--suite", "hellaswag", "--pp", 2).error()
    assert "--pp cannot go with --suite; leave one of them out" in said


def test_lengths_of_positions_are_told_from_those_of_tasks(answer):
    said = answer("evaluate", "--run", "x", "--suite", "hellaswag", "--lengths", "512").error()
    assert "--lengths cannot go with --suite; leave one of them out, or name --suite-len" in said


def test_a_stage_without_a_checkpoint_is_named(tmp_path):
    (tmp_path / "stages" / "one" / "checkpoints" / "step=5").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"one has no complete checkpoint in {tmp_path}; train"):
        require_any_checkpoint(tmp_path, ["one"])
