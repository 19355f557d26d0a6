# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest

from eval import run_folder
from eval.measurements import Passkey
from eval.report import evaluations


def write_run(run, stages=("a", "b")):
    run_folder.write_json(run / "run.json", {"ladder": "l", "card": "c", "stages": stages})


def write_ranges(run, stage, means):
    ranges = [{"start": a, "stop": b, "loss": loss} for (a, b), loss in means.items()]
    run_folder.write_json(
        run_folder.evaluation_path(run, stage),
        {
            "stage": stage,
            "seq_length": 8,
            "eval_length": 8,
            "documents": 1,
            "tokens": 8,
            "ranges": ranges,
        },
    )


def test_range_rows_follow_the_ladder_and_leave_nan_for_what_was_not_measured(tmp_path):
    write_run(tmp_path, ("b", "a", "never"))
    write_ranges(tmp_path, "a", {(0, 4): 2.0})
    write_ranges(tmp_path, "b", {(4, 8): 3.5, (0, 4): 1.0})
    rows = evaluations.range_rows(evaluations.read_evaluations(tmp_path))
    assert [row.stage for row in rows] == ["b", "a"]
    assert rows[0].means == [1.0, 3.5]
    assert rows[1].means[0] == 2.0
    assert math.isnan(rows[1].means[1])


def test_step_written_again_by_a_resumed_run_replaces_the_first(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5), (4, 4.5)):
        run_folder.append_step(path, {"step": step, "loss": loss})
    assert [step.loss for step in run_folder.read_steps(path)] == [1.0, 2.5, 3.5, 4.5]


def test_line_cut_short_by_a_kill_is_passed_over_at_the_end_and_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert [step.step for step in run_folder.read_steps(path)] == [1]
    for step in (2, 3):
        run_folder.append_step(path, {"step": step, "loss": 9.0})
    assert [step.loss for step in run_folder.read_steps(path)] == [1.0, 9.0, 9.0]


def test_line_that_lost_a_step_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.0}\n')
    with pytest.raises(
        run_folder.BrokenResultError, match=r"metrics.jsonl line 2 is not a JSON object"
    ):
        run_folder.read_steps(path)


def test_absent_and_null_figures_read_as_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1, "mfu": null, "not_in_the_schema": []}\n')
    (step,) = run_folder.read_steps(path)
    assert step.loss == 1.0
    assert math.isnan(step.mfu)
    assert math.isnan(step.seconds)


def test_not_a_number_is_written_as_null(tmp_path):
    path = tmp_path / "x.json"
    run_folder.write_json(path, {"a": [math.nan, 1.0], "step": run_folder.Step(1, math.inf)})
    found = json.loads(path.read_text())
    assert found["a"] == [None, 1.0]
    assert found["step"]["loss"] is None


def test_file_stays_whole_when_its_replacement_cannot_be_written(tmp_path):
    path = tmp_path / "x.json"
    run_folder.write_json(path, {"kept": 1})
    with pytest.raises(TypeError):
        run_folder.write_json(path, {"kept": object()})
    assert json.loads(path.read_text()) == {"kept": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "run.json is not JSON"),
        ("[]", "run.json is []; expected a mapping of fields"),
        ('{"ladder": "l", "stages": []}', "run.json lacks 'card'; add it"),
        ('{"ladder": 3, "card": "c", "stages": []}', "run.json: ladder is 3; expected text"),
        ('{"ladder": "l", "card": "c", "stages": "a"}', "stages is 'a'; expected a list"),
        (
            '{"ladder": "l", "card": "c", "stages": ["../a"]}',
            "'../a' must be the name of one folder",
        ),
        ('{"ladder": "l", "card": "c", "stages": ["a", "a"]}', "a stage is listed twice"),
    ],
)
def test_broken_run_record_is_one_sentence(tmp_path, content, said):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(run_folder.BrokenResultError) as caught:
        run_folder.read_run(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_run_is_named(tmp_path):
    with pytest.raises(run_folder.MissingResultError, match="no run folder at"):
        run_folder.read_run(tmp_path / "nowhere")
    with pytest.raises(run_folder.MissingResultError, match=r"it has no run.json"):
        run_folder.read_run(tmp_path)


@pytest.mark.parametrize(
    ("by_position", "said"),
    [
        ({"edges": [0, 4, 8], "loss": [1.0], "tokens": [4]}, "3 edges need 2 bins, found 1"),
        ({"edges": [0, 8, 4], "loss": [1.0, 1.0], "tokens": [4, 4]}, "edges must rise"),
        (
            {"edges": [0, 4], "loss": ["x"], "tokens": [4]},
            "loss[0] is 'x'; expected a number",
        ),
    ],
)
def test_bins_that_do_not_fit_are_refused(tmp_path, by_position, said):
    write_ranges(tmp_path, "a", {(0, 4): 2.0})
    path = run_folder.evaluation_path(tmp_path, "a")
    run_folder.write_json(path, {**json.loads(path.read_text()), "by_position": by_position})
    with pytest.raises(run_folder.BrokenResultError) as caught:
        run_folder.read_evaluation(tmp_path, "a")
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


GAIN = {
    "scored": 2, "contexts": [4, 8], "loss": [2.0, 1.0], "standard_error": [0.1, 0.1],
    "by_document": [[2.0, 1.0], [2.0, 1.0]],
}  # fmt: skip
GRID = {
    "lengths": [8], "depths": [0.5], "trials": 1, "digits": 5, "hits": [[1.0]], "nats": [[1.0]],
    "chance_nats": 2.3,
}  # fmt: skip
SHORT = {"length": 8, "loss": 2.0, "standard_error": 0.1, "token_loss": 2.0,
         "by_document": [2.0, 2.0], "tokens": [4, 4]}  # fmt: skip
RANGES = [{"start": at, "stop": at + 4, "loss": 2.0, "by_document": [2.0, 2.0]} for at in (0, 4)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"context_gain": GAIN | {"contexts": []}}, "context_gain: contexts is empty"),
        ({"context_gain": GAIN | {"by_document": []}}, "context_gain: by_document is empty"),
        ({"context_gain": GAIN | {"contexts": [8, 4]}}, "context_gain: contexts must rise"),
        (
            {"context_gain": GAIN | {"by_document": [[2.0, 1.0], [2.0]]}},
            "context_gain: 2 contexts have 1 numbers",
        ),
        (
            {"passkey": GRID | {"lengths": [], "hits": [], "nats": []}},
            "passkey: lengths, depths and trials are 0, 1 and 1; expected at least one of each",
        ),
        ({"passkey": GRID | {"trials": 0}}, "are 1, 1 and 0; expected at least one of each"),
        (
            {"short": SHORT | {"by_document": [2.0]}},
            "short: by_document has 1 numbers and tokens 2",
        ),
        (
            {"ranges": [RANGES[0], RANGES[1] | {"by_document": [2.0]}]},
            "ranges: by_document has 2 numbers at positions 0-4 and 1 at 4-8",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_told_by_file_and_field(tmp_path, changed, said):
    write_ranges(tmp_path, "a", {(0, 4): 2.0})
    path = run_folder.evaluation_path(tmp_path, "a")
    right = {"context_gain": GAIN, "passkey": GRID, "short": SHORT, "ranges": RANGES}
    content = json.loads(path.read_text()) | right
    run_folder.write_json(path, content)
    assert run_folder.read_evaluation(tmp_path, "a") is not None
    run_folder.write_json(path, content | changed)
    with pytest.raises(run_folder.BrokenResultError) as caught:
        run_folder.read_evaluation(tmp_path, "a")
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_passkey_grid_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="nats must have 1 rows of 2 numbers"):
        Passkey(
            lengths=(8,),
            depths=(0.0, 1.0),
            trials=1,
            digits=5,
            hits=((0.0, 1.0),),
            nats=((1.0,),),
            chance_nats=2.3,
        )


def test_stages_trained_apart_are_found_beside_those_of_the_run(tmp_path):
    for name, length in (("later", 4096), ("sooner", 512), ("listed", 1024)):
        folder = tmp_path / "stages" / name
        folder.mkdir(parents=True)
        (folder / "stage.json").write_text(json.dumps({"name": name, "seq_length": length}))
    assert run_folder.stage_names(tmp_path) == ["sooner", "listed", "later"]
    run = {"ladder": "l", "card": "c", "stages": ["listed"]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert run_folder.stage_names(tmp_path) == ["listed", "sooner", "later"]


def test_a_folder_without_stages_is_no_run(tmp_path):
    with pytest.raises(run_folder.MissingResultError, match=r"it has no run.json"):
        run_folder.stage_names(tmp_path)
