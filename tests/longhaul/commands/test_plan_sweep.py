# SPDX-License-Identifier: Apache-2.0
"""`longhaul plan --sweep`: table, JSON, CSV, picture, frontier, and refusals in one sentence."""

import csv
import json
from dataclasses import replace

import pytest

from longhaul.commands.plan_sweep import MOST, parsed
from longhaul.pages.sweep_plot import picture
from recipes.models import CARDS
from recipes.planner.batch_size import even_batch
from recipes.planner.search.ranking import search
from recipes.planner.search.request import SearchRequest
from recipes.planner.search.sweep import frontier, sweep
from recipes.spec import cluster
from recipes.spec.units import K, M

SWEEP = ("plan", "llama31_70b", "--sweep", "seq=128K:1M nodes=1:4")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("seq=64K:256K", {"seq": [64 * K, 128 * K, 256 * K]}),
        ("seq=64K:100K nodes=3:8", {"seq": [64 * K, 100 * K], "nodes": [3, 6, 8]}),
        ("gpus=1,2:4,8", {"gpus": [1, 2, 4, 8]}),
        ("nodes=8,1,8", {"nodes": [8, 1]}),
    ],
)
def test_ranges_double_and_commas_list(words, values):
    assert parsed(words) == values


def test_every_point_is_the_plan_of_that_length_and_number_of_gpus(answer):
    code, shown, said = answer(*SWEEP, "--json", "--tokens", "2B")
    assert code == 0, said
    found = json.loads(shown)
    asked = [(one["seq_length"], one["gpus"]) for one in found["points"]]
    assert asked == [(length * K, gpus) for length in (128, 256, 512, 1024) for gpus in (8, 16, 32)]
    assert {one["fits"] for one in found["points"]} == {True, False}
    for one in found["points"]:
        if not one["fits"]:
            assert "layout" not in one
            continue
        alone = answer(
            "plan", "llama31_70b", "--seq", one["seq_length"], "--nodes", one["gpus"] // 8,
            "--tokens", "2B", "--json",
        )  # fmt: skip
        plan = json.loads(alone.out)["plans"][0]
        assert one["layout"] == plan["layout"]
        assert one["gpu_hours"] == pytest.approx(plan["goodput"]["gpu_hours"])
        assert one["days"] == pytest.approx(one["gpu_hours"] / one["gpus"] / 24)
        assert one["tokens_per_second"] == pytest.approx(
            plan["tokens_per_second_per_gpu"] * one["gpus"]
        )


def test_the_table_says_what_does_not_fit_and_the_longest_that_does(answer):
    code, shown, _ = answer(*SWEEP)
    assert code == 0
    assert "does not fit" in shown
    assert shown.count("\n│") == 12
    assert "longest of these lengths that fits, by GPUs: 512K on 8, 1M on 16 to 32\n" in shown


def test_a_narrow_terminal_has_the_layouts_below_the_table(answer, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = answer(*SWEEP).out
    assert "\n1M on 32: batch 4M; layout tp" in shown


def test_small_figures_have_digits(answer):
    shown = answer("plan", "tiny", "--sweep", "seq=1K nodes=1", "--tokens", "1M").out
    (row,) = [line for line in shown.splitlines() if line.startswith("│")]
    cells = [float(cell) for cell in row.split("│")[9:12] if cell.strip()]
    assert len(cells) == 3
    assert all(cells)


def test_csv_and_picture_are_written_whole(answer, tmp_path):
    made = answer(*SWEEP, "--csv", tmp_path / "s.csv", "--plot", tmp_path / "s.png")
    assert made.code == 0
    with (tmp_path / "s.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert {row["fits"] for row in rows} == {"True", "False"}
    assert all((row["layout"] == "") == (row["fits"] == "False") for row in rows)
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


def _points(lengths=(128 * K,), gpus=(8, 16, 32)):
    asked = [
        SearchRequest(
            card=CARDS["llama31_8b"], seq_length=length,
            tokens_per_batch=even_batch(4 * M, length, count),
            cluster=cluster.load("dgx_h100"), gpus=count,
        )
        for length in lengths
        for count in gpus
    ]  # fmt: skip
    return list(sweep(asked, 10**9))


def test_no_point_beats_those_of_the_frontier_and_each_other_is_beaten():
    points = _points(lengths=(128 * K, 512 * K), gpus=(8, 16, 24, 32, 64))
    best = frontier(points)
    for one in points:
        others = [other for other in points if other.question.seq_length == one.question.seq_length]
        beaten = any(
            other.days <= one.days and other.gpu_hours <= one.gpu_hours
            for other in others
            if other is not one
        )
        assert beaten == (one not in best)


def test_the_picture_has_a_line_per_number_of_gpus_and_per_length():
    points = _points(lengths=(128 * K, 512 * K))
    reach, rate, cost = picture(points).axes
    assert [line.get_ydata()[0] for line in reach.lines] == [512 * K]
    assert len(rate.lines) == 3
    assert len(cost.lines) == 2
    best = search(points[0].question).plans[0]
    assert rate.lines[0].get_ydata()[0] == pytest.approx(best.time.tokens_per_gpu_second * 8)


def test_a_picture_of_nothing_is_refused():
    (point,) = _points(gpus=(8,))
    with pytest.raises(ValueError, match="nothing fits dgx_h100 at any point"):
        picture([replace(point, plan=None)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sweep", "seq"), "'seq' is not NAME=VALUES; a sweep is written as in --sweep 'seq="),
        (("--sweep", " "), "--sweep is empty"),
        (("--sweep", "node=1:4"), "--sweep has no 'node'; did you mean nodes?"),
        (("--sweep", "seq=1M:64K"), "seq=1M:64K ends below its start; write 64K:1M"),
        (("--sweep", "seq=64Q"), "--sweep seq=64Q: a length is a number, with K or M"),
        (("--sweep", "seq=64K nodes=0"), "nodes=0: expected a number of nodes from 1 on"),
        (("--sweep", "seq=64K nodes=1 gpus=8"), "states nodes and gpus; leave one of them out"),
        (("--sweep", "seq=64K seq=1M"), "states seq twice"),
        (("--sweep", "seq=64K gpus=12"), "--gpus is 12, not a whole number of nodes of 8"),
        (("--sweep", "nodes=1:8"), "states no lengths; add seq=64K:4M to it, or --seq"),
        (("--sweep", "seq=64K", "--seq", "1M"), "--sweep states seq; leave --seq out"),
        (("--sweep", "nodes=1:4", "--seq", "1M", "--gpus", "8"), "states nodes; leave --gpus out"),
        (("--sweep", "seq=64K", "--max-seq"), "--max-seq cannot go with --sweep"),
        (("--seq", "64K", "--csv", "x.csv"), "--csv is the file of a sweep; add --sweep"),
        (("--sweep", "seq=64K", "--csv", "x.txt"), "--csv x.txt is not a .csv file"),
    ],
)
def test_a_sweep_that_is_none_is_refused(answer, words, said):
    assert said in answer("plan", "llama31_8b", *words).error()


def test_too_many_points_are_told_with_their_number_and_time(answer):
    lengths = ",".join(map(str, range(1024, 1024 + 200)))
    nodes = ",".join(map(str, range(1, 31)))
    said = answer("plan", "llama31_8b", "--sweep", f"seq={lengths} nodes={nodes}").error()
    assert f"has 6,000 points, which take about 5 minutes; at most {MOST:,}" in said
