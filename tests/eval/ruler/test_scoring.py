# SPDX-License-Identifier: Apache-2.0
"""Scores of written-out predictions, their errors, and the effective length."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from eval.ruler.length import RulerError
from eval.ruler.samples import Sample, make, read_samples
from eval.ruler.scoring import (
    Average,
    average,
    effective_length,
    sample_score,
    score,
    task_score,
)
from eval.ruler.sources import Sources
from eval.ruler.tasks import TASKS
from eval.ruler.tokens import Tokens
from tests.eval.ruler import support


@pytest.mark.parametrize(
    ("metric", "prediction", "outputs", "expected"),
    [
        ("all", " 4921573.", ["4921573"], 1),
        ("all", " 4921574.", ["4921573"], 0),
        ("all", "It is 12 and 34", ["12", "34", "56", "78"], 0.5),
        ("all", "kqxwa\x00BJTRE", ["KQXWA", "BJTRE"], 1),
        ("part", "the Normans", ["Denmark", "NORMANS"], 1),
        ("part", "the Danes", ["Denmark", "Normans"], 0),
        ("all", "", ["12"], 0),
    ],
)
def test_a_prediction_is_scored_by_what_it_contains(metric, prediction, outputs, expected):
    assert sample_score(metric, prediction, outputs) == expected


def test_scores_of_0_and_1_have_a_binomial_error_and_wilsons_interval():
    row = task_score("vt", 4096, [1, 1, 1, 0])
    assert row.score == 75
    assert row.standard_error == pytest.approx(100 * (0.75 * 0.25 / 4) ** 0.5)
    # Wilson's interval of 3 of 4 as tables print it.
    assert (row.low, row.high) == pytest.approx((30.06, 95.44), abs=0.01)


def test_a_few_equal_samples_do_not_make_the_error_zero():
    of_one, of_nine = (task_score("vt", 4096, [1.0] * count) for count in (1, 9))
    assert of_one.standard_error > of_nine.standard_error > 3


def test_a_file_that_is_not_what_its_manifest_says_is_not_scored(tmp_path):
    folder, tokens = tmp_path / "s", Tokens(support.byte_level())
    row, _ = make(
        folder, TASKS["vt"], length=1500, samples=2, seed=0, tokens=tokens, sources=Sources()
    )
    file = folder / row.file
    texts = {sample.id: sample.expected for sample in read_samples(file)}
    found, _ = score([file], [predictions(tmp_path, texts)])
    assert (found.scores[0].score, found.own_words) == (100, row.own_words)
    file.write_text(file.read_text().splitlines()[0] + "\n")
    with pytest.raises(RulerError, match="has changed since it was made"):
        score([file], [predictions(tmp_path, texts)])
    file.write_text('{"outputs": "yes"}\n')
    (folder / "manifest.json").unlink()
    with pytest.raises(RulerError, match="is not a file of samples"):
        score([file], [predictions(tmp_path, texts)])


def test_other_scores_have_the_error_of_their_mean():
    row = task_score("vt", 4096, [0.2, 0.4, 0.6])
    assert row.score == pytest.approx(40)
    assert row.standard_error == pytest.approx(100 * 0.2 / 3**0.5)
    # Student's t of 3 values is 4.303, and the interval is cut at 0.
    assert (row.low, row.high) == pytest.approx((0, 40 + 4.303 * row.standard_error), rel=1e-3)
    assert task_score("vt", 4096, [0.2]).standard_error is None


def test_the_average_has_the_error_of_independent_tasks():
    rows = [task_score("vt", 4096, [0.2, 0.4, 0.6]), task_score("cwe", 4096, [1, 0])]
    found = average(4096, rows)
    assert found.score == pytest.approx(45)
    first, second = (row.standard_error for row in rows)
    assert found.standard_error == pytest.approx((first**2 + second**2) ** 0.5 / 2)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({4096: 95.5, 8192: 90, 16_384: 85.6}, 8192),
        ({4096: 95.5, 8192: 80, 16_384: 90}, 4096),
        ({16_384: 86, 4096: 87}, 16_384),
        ({4096: 60.6}, 0),
    ],
)
def test_the_effective_length_is_the_last_before_an_average_at_or_below_the_threshold(
    scores, expected
):
    averages = [
        Average(length=length, tasks=13, score=value, standard_error=None)
        for length, value in scores.items()
    ]
    assert effective_length(averages) == expected


def samples(folder: Path, length: int, *, tasks=tuple(TASKS), suite="ruler-offline") -> Path:
    """Write a file with one sample of each task."""
    path = folder / f"{suite}-{length}-seed0.jsonl"
    rows = [
        Sample(
            id=f"{task}-{length}-seed0-0", suite=suite, task=task, index=0, max_length=length,
            length=length, prompt_tokens=length - 8, max_new_tokens=8, input="", answer_prefix="",
            outputs=("yes", "also"), expected=" yes also",
        )
        for task in tasks
    ]  # fmt: skip
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return path


def predictions(folder: Path, texts: dict[str, str], key: str = "prediction") -> Path:
    path = folder / "predictions.jsonl"
    path.write_text("".join(json.dumps({"id": i, key: t}) + "\n" for i, t in texts.items()))
    return path


def test_a_suite_is_scored_by_task_and_length(tmp_path):
    files = [samples(tmp_path, 8192), samples(tmp_path, 4096)]
    texts = {f"{task}-4096-seed0-0": "yes, also" for task in TASKS}
    texts |= {f"{task}-8192-seed0-0": "yes" for task in TASKS} | {"another": "no"}
    found, unknown = score(files, [predictions(tmp_path, texts, "pred")])
    assert unknown == 1
    assert [(one.length, one.tasks) for one in found.averages] == [(4096, 13), (8192, 13)]
    assert [one.score for one in found.averages] == pytest.approx([100, (11 * 50 + 200) / 13])
    assert found.effective_length == 4096
    by_task = {row.task: row.score for row in found.scores if row.length == 8192}
    assert (by_task["qa_1"], by_task["vt"]) == (100, 50)


def test_without_all_tasks_not_stated_because_is_stated(tmp_path):
    file = samples(tmp_path, 4096, tasks=("vt", "cwe"))
    texts = {"vt-4096-seed0-0": "yes also", "cwe-4096-seed0-0": "yes also"}
    found, _ = score([file], [predictions(tmp_path, texts)])
    assert found.effective_length is None
    assert found.not_stated_because == "4,096 tokens has 2 of the 13 tasks"


def test_mistakes_in_the_files_are_named(tmp_path):
    file = samples(tmp_path, 4096, tasks=("vt", "cwe"))
    one = predictions(tmp_path, {"vt-4096-seed0-0": "yes"})
    with pytest.raises(RulerError, match=r"1 samples have no prediction \(cwe-4096-seed0-0\)"):
        score([file], [one])
    with pytest.raises(RulerError, match="is in two of the files"):
        score(
            [file, file], [predictions(tmp_path, {"vt-4096-seed0-0": "", "cwe-4096-seed0-0": ""})]
        )
    official = samples(tmp_path, 8192, suite="ruler")
    with pytest.raises(RulerError, match="ruler and ruler-offline; score one suite alone"):
        score([file, official], [one])
    with pytest.raises(RulerError, match="is not a file of samples"):
        score([one], [one])
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "vt-4096-seed0-0", "prediction": "no"}\n')
    with pytest.raises(RulerError, match="a second, different prediction of vt-4096-seed0-0"):
        score([file], [one, other])
    other.write_text('{"id": "vt-4096-seed0-0"}\n')
    with pytest.raises(RulerError, match="line 1 is not a prediction"):
        score([file], [other])
    other.write_text("no JSON\n")
    with pytest.raises(RulerError, match="line 1 is not JSON"):
        score([file], [other])
