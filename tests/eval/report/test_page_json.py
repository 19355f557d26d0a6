# SPDX-License-Identifier: Apache-2.0
"""The numbers next to a page are those of its tables and curves; what a page lost is removed."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from eval.measurements import ContextGain, ShortLoss
from eval.position_bands import Bands
from eval.report import page as report
from eval.report import plots
from eval.report.context_tables import context_figure
from eval.report.page_files import FORMAT, PageError, json_of
from eval.report.several_runs import build_several, read_runs, side_by_side
from eval.ruler.results import write_result
from eval.run_folder import append_step, evaluation_path, load, read_evaluation, write_json
from recipes.spec.naming import stage_folder
from tests.eval.report.test_page import NAMES, built, cells, make_run, words
from tests.eval.report.test_ruler import scored
from tests.eval.report.test_several_runs import scored as suite_scored
from tests.longhaul.json_units import not_numbers

SIGN = "\N{PLUS-MINUS SIGN}"
GAIN = ContextGain(
    1024, (2048, 4096, 8192), (3.5, 3.25, 3.125), (0.5, 0.25, 0.125), ((3.5, 3.25, 3.125),) * 2
)
SHORT = ShortLoss(256, 2.75, 0.375, 2.625, (2.25, 3.25), (40, 60))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return a run with every part of a page but the base model."""
    run = make_run(tmp_path_factory.mktemp("numbers"))
    for name in NAMES[1:]:
        found = read_evaluation(run, name)
        bands = Bands((0, 512, 2048, 8192), (5.0, math.nan, 4.5), (0.25, math.nan, 0.125), ())
        by_position = replace(found.by_position, bands=bands)
        ranges = tuple(
            replace(each, by_document=(each.loss - 0.5, each.loss + 0.5), standard_error=0.5)
            for each in found.ranges
        )
        found = replace(
            found, by_position=by_position, ranges=ranges, context_gain=GAIN, short=SHORT, store="s"
        )
        write_json(evaluation_path(run, name), found)
    last = stage_folder(run, NAMES[2]) / "metrics.jsonl"
    step = {"step": 60, "loss": 4.75, "tokens": 8192, "seconds": 2.0, "mfu": 0.5,
            "peak_memory_bytes": 3 * 2**30, "device_memory_bytes": 5 * 2**30}  # fmt: skip
    append_step(last, step)
    suite_scored(run, NAMES[2], 0.5)
    write_result(run, scored(NAMES[2], {4096: 9, 8192: 4}))
    return run


@pytest.fixture(scope="module")
def page(run) -> str:
    """Return the text of its page."""
    return built(run)


@pytest.fixture(scope="module")
def numbers(run, page) -> dict:
    """Return the numbers of its page."""
    return json.loads(json_of(run / "report.html").read_text())


def test_every_number_of_the_tables_is_in_the_json(page, numbers):
    assert numbers["format"] == FORMAT
    assert [*not_numbers(numbers)] == []
    shown = cells(page)
    for model in numbers["models"]:
        found = model["evaluation"]
        for mean in found["ranges"]:
            error = mean["standard_error"]
            text = f"{mean['loss']:.2f}" + (f" {SIGN} {error:.2f}" if error else "")
            assert text in shown
        grid = found["passkey"]
        assert {f"{each:.2f}" for row in grid["nats"] for each in row} <= shown
        assert {f"{round(each * 4)}/4" for row in grid["hits"] for each in row} <= shown
        gain = found["context_gain"]
        for loss, error in zip(gain["loss"], gain["standard_error"], strict=True) if gain else ():
            assert f"{loss:.3f} {SIGN} {error:.3f}" in shown
        short = found["short"]
        assert not short or f"{short['loss']:.3f} {SIGN} {short['standard_error']:.3f}" in shown
    for row in numbers["differences"]:
        for gain in row["ranges"]:
            assert f"{gain['difference']:+.3f} {SIGN} {gain['standard_error']:.3f}" in shown
    for result in numbers["ruler"]:
        for each in (*result["scores"]["scores"], *result["scores"]["averages"]):
            assert f"{each['score']:.1f} {SIGN} {each['standard_error']:.1f}" in shown
    (metric,) = numbers["suites"][0]["metrics"]
    assert f"{metric['value']:.4f} {SIGN} {metric['standard_error']:.4f}" in shown
    for stage in numbers["training"]:
        cost = stage["cost"]
        assert f"{cost['tokens']:,.0f}" in shown
        assert f"{cost['tokens_per_second_per_rank']:,.0f}" in shown
        assert f"{cost['peak_memory_bytes'] / 2**30:.2f} GiB" in shown
        assert f"{stage['record']['seq_length']:,}" in shown
    assert {"3.00 GiB", "5.00 GiB", "50.0%"} <= shown
    said = words(page)
    for name, sentences in numbers["sentences"].items():
        for sentence in [sentences] if isinstance(sentences, str) else sentences:
            assert words(sentence.replace("+-", SIGN)) in said, name


def test_the_curves_of_the_json_are_those_of_the_figures(run, numbers):
    stages = load(run)[1]
    drawn = lines(plots.by_position(stages), 2.0)
    curves = [model["by_position_curve"] for model in numbers["models"]]
    assert drawn == [(curve["position"], curve["loss"]) for curve in curves]
    assert curves[1] == {
        "position": [256.0, 5120.0], "loss": [5.0, 4.5], "standard_error": [0.25, 0.125]
    }  # fmt: skip
    start, found = 0.0, []
    for stage in numbers["training"]:
        curve = stage["curve"]
        found.append(([start + seen for seen in curve["tokens"]], curve["median_loss"]))
        start += curve["tokens"][-1]
    assert lines(plots.training(stages), 1.8) == found
    gains = [model["evaluation"]["context_gain"] for model in numbers["models"]]
    assert lines(context_figure(stages), 2.0) == [
        (gain["contexts"], gain["loss"]) for gain in gains if gain
    ]


def lines(figure: Figure, width: float) -> list[tuple[list[float], list[float]]]:
    """Return the points of the lines of a width in the first axes of a figure."""
    return [
        (line.get_xdata().tolist(), line.get_ydata().tolist())
        for line in figure.axes[0].lines
        if line.get_linewidth() == width
    ]


def test_the_page_of_several_runs_has_its_numbers_too(run, tmp_path):
    other = make_run(tmp_path / "other")
    runs = read_runs([run, other])
    path = build_several(runs, side_by_side(runs), tmp_path / "page.html")
    found = json.loads((tmp_path / "page.json").read_text())
    assert [each["label"] for each in found["runs"]] == [runs[0].label, "other"]
    assert len(found["models"]) == len(found["training"]) == 6
    assert found["models"][3]["name"] == "other: tiny_512"
    assert words(found["sentences"]["verdict"]) in words(path.read_text())


def test_a_page_does_not_keep_the_figures_of_an_earlier_one(tmp_path):
    run = make_run(tmp_path / "run")
    write_result(run, scored(NAMES[2], {4096: 9, 8192: 4}))
    built(run)
    (run / "training_notes.png").touch()
    page = report.build(run, tmp_path / "page.html")
    drawn = {path.name for path in run.iterdir()} | {path.name for path in tmp_path.iterdir()}
    assert {"ruler.png", "training.svg", "page_ruler.png", "page_training.svg"} <= drawn
    (run / "eval" / "ruler" / "tiny_8k.json").unlink()
    json_of(run / "report.html").unlink()  # as next to a page of an earlier version
    for stage in NAMES:
        (stage_folder(run, stage) / "metrics.jsonl").unlink()
    built(run)
    report.build(run, page)
    for folder, before in ((run, ""), (tmp_path, "page_")):
        left = {path.name for path in folder.iterdir() if path.suffix in (".png", ".svg")}
        own = {f"{before}by_position.png", f"{before}by_position.svg"}
        assert left == own | ({"training_notes.png"} if folder == run else set())


def test_a_file_that_is_not_of_a_page_is_not_replaced(tmp_path):
    run = make_run(tmp_path)
    before = (run / "run.json").read_bytes()
    with pytest.raises(PageError, match=r"run\.html would replace .*run\.json, which is not of a"):
        report.build(run, run / "run.html")
    assert (run / "run.json").read_bytes() == before
    assert not (run / "run.html").exists()
