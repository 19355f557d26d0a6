# SPDX-License-Identifier: Apache-2.0
import importlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from eval.measurements import ShortLoss
from eval.report import page as report
from eval.report import palette
from eval.report.run_labels import RunsError, common_folder, labels
from eval.report.several_runs import (
    build_several,
    read_runs,
    short_of_runs,
    side_by_side,
)
from eval.report.suite_scores import read_suites, suite_table
from eval.run_folder import Evaluation, evaluation_path, read_evaluation, write_json
from eval.suite_results import Metric, SuiteResult, SuiteSettings, write_result
from tests.eval.report.test_base_model import BASE, TRAINED
from tests.eval.report.test_page import NAMES, Page, make_run, words

SETTINGS = SuiteSettings(
    "hellaswag", "a" * 64, None, 100, 8192, "w", "t", "megatron", "fp32", "0.4.9"
)


def measured(run: Path, name: str, losses: list[float], store: str = "held_out") -> None:
    """Give the last range of an evaluation the losses of its documents."""
    found = read_evaluation(run, name)
    assert found is not None
    mean = sum(losses) / len(losses)
    last = replace(found.ranges[-1], loss=mean, by_document=tuple(losses))
    changed: Evaluation = replace(found, store=store, ranges=(*found.ranges[:-1], last))
    write_json(evaluation_path(run, name), changed)


def scored(run: Path, model: str, value: float, settings: SuiteSettings = SETTINGS) -> None:
    metrics = (Metric("acc", "none", value, 0.01),)
    write_result(run, SuiteResult(model, "w", 60, settings, "1.0", 0, 100, 100, 10, metrics))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, Path]:
    """Return two runs whose last stages were measured on the same documents."""
    folder = tmp_path_factory.mktemp("several")
    first, second = make_run(folder / "yarn"), make_run(folder / "abf")
    measured(first, NAMES[-1], [5.0, 4.0, 4.5])
    measured(second, NAMES[-1], [4.9, 3.8, 4.4])
    scored(first, NAMES[-1], 0.25)
    scored(second, NAMES[-1], 0.5)
    return first, second


def test_documents_that_a_file_lacks_are_not_compared(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    measured(runs[0], NAMES[-1], [5.0, 4.0])
    measured(runs[1], NAMES[-1], [4.9, 3.8, 4.4])
    beside = side_by_side(read_runs(runs))
    assert beside.rows == []
    assert "no losses of single documents in a common range" in beside.sentences[0]


def test_a_label_is_the_last_part_in_which_the_paths_differ(tmp_path):
    assert labels([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a", "b"]
    assert labels([tmp_path / "x" / "one", tmp_path / "x" / "two"]) == ["one", "two"]
    three = [tmp_path / "a" / "x", tmp_path / "b" / "x", tmp_path / "a" / "y"]
    assert labels(three) == ["a/x", "b/x", "a/y"]


def test_a_run_given_twice_is_refused_by_whatever_path(tmp_path):
    (tmp_path / "again").symlink_to(tmp_path / "run")
    with pytest.raises(RunsError, match="is given twice; give each run folder once"):
        labels([tmp_path / "run", tmp_path / "again"])


def test_the_page_goes_beside_the_runs_but_not_into_one_of_them(tmp_path):
    assert common_folder([tmp_path / "a" / "x", tmp_path / "b"]) == tmp_path.resolve()
    with pytest.raises(RunsError, match="name a file with --out"):
        common_folder([tmp_path / "a", tmp_path / "a" / "b"])


def test_one_page_has_the_stages_of_both_runs(two, tmp_path):
    runs = read_runs(two)
    path = build_several(runs, side_by_side(runs), tmp_path / "page.html")
    text = path.read_text("utf-8")
    page = Page(text)
    assert (page.open, page.loads) == ([], [])
    said = words(text)
    for label in ("yarn", "abf"):
        for name in NAMES:
            assert f"{label}: {name}" in said
    assert "hellaswag, first 100: acc" in said
    assert (tmp_path / "page_by_position.png").is_file()
    assert "script" not in page.tags


def test_the_last_stages_are_compared_document_by_document(two):
    runs = read_runs(two)
    beside = side_by_side(runs)
    (row,) = beside.rows
    assert row.name == "abf: tiny_8k minus yarn: tiny_8k"
    gain = row.gains[-1]
    assert gain is not None
    assert gain.difference == pytest.approx(-0.4 / 3)
    assert gain.standard_error == pytest.approx(0.1 / 3)
    assert row.gains[:-1] == [None, None]


@pytest.mark.parametrize(
    ("store", "why"),
    [("other_store", "measured with different settings"), ("", "does not state the store")],
)
def test_other_documents_are_not_compared_and_the_page_says_why(tmp_path, store, why):
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    measured(runs[0], NAMES[-1], [5.0, 4.0])
    measured(runs[1], NAMES[-1], [4.9, 3.8], store)
    beside = side_by_side(read_runs(runs))
    assert beside.rows == []
    (sentence,) = beside.sentences
    assert sentence.startswith("two: tiny_8k is not compared with one: tiny_8k: ")
    assert why in sentence


def test_short_documents_are_compared_within_runs_and_between_their_last_stages(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    for at, run in enumerate(runs):
        for stage in NAMES:
            measured(run, stage, [5.0, 4.0])
            found = read_evaluation(run, stage)
            losses = (2.0 + at, 3.1 + at)
            short = ShortLoss(256, 2.5 + at, 0.5, 2.5 + at, losses, (40, 60))
            write_json(evaluation_path(run, stage), replace(found, short=short))
    said = short_of_runs(read_runs(runs))
    last = NAMES[-1]
    assert said[0] == (
        f"two: {last}: the loss of short documents is +1.000 +- 0.000 nats from one: {last}, "
        "document by document."
    )
    assert said[1:] == [
        f"{name}: {after}: the loss of short documents is +0.000 +- 0.000 nats from "
        f"{name}: {before}, document by document: within two standard errors, so no change is "
        "shown."
        for name in ("one", "two")
        for before, after in pairwise(NAMES)
    ]


def test_each_run_is_compared_with_its_base_model_in_curves_that_differ(tmp_path):
    folders = [make_run(tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        for each in (replace(TRAINED, stage=NAMES[1]), BASE):
            write_json(evaluation_path(folder, each.stage), each)
    runs = read_runs(folders)
    text = build_several(runs, side_by_side(runs), tmp_path / "page.html").read_text("utf-8")
    for number, run in enumerate(runs, 1):
        assert f'aria-label="Stages of {run.label} next to the base model: ' in text
        assert (tmp_path / f"page_against_base_{number}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{run.label}: base: the weights of models/tiny" in words(text)
    assert "round-1" in text  # the seventh and eighth curve have colours of the first two
    styles = {(palette.color(index), str(palette.line(index))) for index in range(18)}
    assert len(styles) == 18


def test_the_name_of_a_folder_is_text_on_the_page(two, tmp_path):
    odd = make_run(tmp_path / 'a"b<i>')
    runs = read_runs([odd, two[0]])
    page = build_several(runs, side_by_side(runs), tmp_path / "page.html").read_text()
    assert "<i>" not in page
    assert "a&quot;b&lt;i&gt;" in page


def test_models_share_a_row_only_for_the_same_task(two):
    rows = suite_table([each for run in two for each in read_suites(run, run.name)])
    assert rows.heads == ["yarn: tiny_8k, step 60", "abf: tiny_8k, step 60", "samples"]
    in_order = suite_table(
        [each for run in two for each in read_suites(run, run.name)], ["abf: tiny_8k"]
    )
    assert in_order.heads == ["abf: tiny_8k, step 60", "yarn: tiny_8k, step 60", "samples"]
    (row,) = rows.rows
    assert [cell.text for cell in row.cells] == [
        "0.2500 \N{PLUS-MINUS SIGN} 0.0100",
        "0.5000 \N{PLUS-MINUS SIGN} 0.0100",
        "100",
    ]
    other = replace(read_suites(two[0])[0], settings=replace(SETTINGS, task_sha256="b" * 64))
    apart = suite_table([*read_suites(two[0]), other])
    assert [row.name.rpartition(", ")[2] for row in apart.rows] == [
        "task aaaaaaaa",
        "task bbbbbbbb",
    ]
    first = read_suites(two[0])[0]
    in_chat = replace(first, settings=replace(SETTINGS, chat_template="c" * 64))
    assert [row.name for row in suite_table([first, in_chat]).rows] == [
        "hellaswag, first 100: acc",
        "hellaswag, chat template, first 100: acc",
    ]
    by = [
        replace(first, step=None, settings=replace(SETTINGS, backend=name))
        for name in ("hf", "vllm")
    ]
    assert suite_table(by).heads == ["tiny_8k", "tiny_8k, vLLM", "samples"]


def test_the_page_of_one_run_has_the_scores_too(two, tmp_path):
    text = words(report.build(two[0], tmp_path).read_text("utf-8"))
    assert "Scores of lm-evaluation-harness" in text
    assert "0.2500 \N{PLUS-MINUS SIGN} 0.0100" in text


def test_command_takes_several_runs_and_prints_their_page(two):
    app = typer.Typer()
    app.command()(importlib.import_module("longhaul.commands.report").report)
    done = CliRunner().invoke(app, [*map(str, two), "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["report"] == str(two[0].resolve().parent / "report.html")
    assert [each["run"] for each in found["runs"]] == ["yarn", "abf"]
    assert found["differences"][0]["ranges"][0]["difference"] == pytest.approx(-0.4 / 3)
    assert found["runs"][1]["suites"][0]["metrics"][0]["value"] == 0.5
