# SPDX-License-Identifier: Apache-2.0
"""RULER's scores in a run folder, and how a report puts models side by side."""

import json
from dataclasses import replace

import pytest

from eval.provenance import Provenance
from eval.report.ruler_tables import ruler_figures, ruler_part
from eval.report.several_runs import build_several, read_runs, side_by_side
from eval.ruler.results import (
    RulerResult,
    covers,
    read_results,
    result_at,
    result_path,
    together,
    why_apart,
    write_result,
)
from eval.ruler.scoring import ScoredFile, Scores, average, effective_length, task_score
from eval.run_folder import BrokenResultError, stage_folder, write_json
from tests.eval.report.test_page import NAMES, Page, built, cells, make_run, words

TASKS = ("vt", "qa_1")


def scored(model: str, means: dict[int, int], *, seed: str = "a", **facts: object) -> RulerResult:
    """Return scores: at each length so many of ten samples are answered, of both tasks."""
    rows = [
        replace(
            task_score(task, length, [1.0] * right + [0.0] * (10 - right)),
            metric="all",
            files=(
                ScoredFile(file=f"{task}.jsonl", sha256=f"{seed}{task}{length}".ljust(64, "0")),
            ),
        )
        for length, right in means.items()
        for task in TASKS
    ]
    averages = [average(at, [row for row in rows if row.length == at]) for at in means]
    scores = Scores(
        suite="ruler-offline", scores=rows, averages=averages,
        effective_length=effective_length(averages), not_stated_because="",
    )  # fmt: skip
    about = Provenance(date="2026-11-25 12:00 UTC", commit="0123456789abcdef", command="longhaul x")
    return RulerResult(model=model, scores=scores, provenance=about, tokenizer_sha256="t", **facts)


def test_scores_are_read_back_as_they_were_written(tmp_path):
    result = scored("tiny_8k", {4096: 9, 8192: 3}, step=60)
    assert write_result(tmp_path, result) == []
    assert read_results(tmp_path) == [result]
    shorter = scored("tiny_8k", {4096: 9}, step=60)
    assert write_result(tmp_path, shorter) == ["vt at 8,192", "qa_1 at 8,192"]


def test_scores_of_a_suite_that_an_earlier_release_wrote_are_read(tmp_path):
    ruler = scored("tiny_8k", {4096: 9})
    write_result(tmp_path, ruler)
    given = replace(ruler, scores=replace(ruler.scores, suite="mrcr"))
    write_json(result_path(tmp_path, "tiny_8k").with_suffix(".mrcr.json"), given)
    groups = together(read_results(tmp_path))
    assert [[each.scores.suite for each in group] for group in groups] == [
        ["ruler-offline"], ["mrcr"],
    ]  # fmt: skip


def test_scores_that_a_file_has_are_told_from_others():
    asked = scored("tiny_8k", {4096: 9}, weights_sha256="w", precision="bf16")
    more = scored("tiny_8k", {4096: 9, 8192: 3}, weights_sha256="w", precision="bf16")

    def has(kept: RulerResult | None) -> bool:
        return covers(kept, asked.scores, "w", "bf16")

    first, other = asked.scores.scores
    all_samples = [replace(row, samples=500, score=1.0) for row in (first, other)]
    for rows in (more.scores.scores, all_samples):
        assert has(replace(more, scores=replace(more.scores, scores=rows, averages=[
            average(at, [row for row in rows if row.length == at])
            for at in sorted({row.length for row in rows})
        ])))  # fmt: skip
    assert not any(
        map(has, (
            None, replace(more, weights_sha256="x"), replace(more, precision="fp32"),
            replace(more, scores=replace(more.scores, suite="ruler")),
            scored("tiny_8k", {4096: 8, 8192: 3}, weights_sha256="w", precision="bf16"),
            scored("tiny_8k", {4096: 9}, seed="b", weights_sha256="w", precision="bf16"),
        ))
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda scores: scores["scores"].clear(), "scores.scores is empty; expected the score"),
        (lambda scores: scores["averages"].clear(), "must have each length of scores.scores once"),
        (
            lambda scores: scores["scores"].append(scores["scores"][0]),
            "has vt at 4,096 tokens twice",
        ),
        (lambda scores: scores["scores"][0]["files"].clear(), "no files of samples of vt at 4,096"),
        (lambda scores: scores["scores"][0].update(score=130), "is 130.0, not 0 to 100"),
        (lambda scores: scores["scores"][0].update(score=None), "scores.scores[0].score is None"),
    ],
)
def test_a_damaged_file_is_named_in_one_sentence(tmp_path, change, said):
    write_result(tmp_path, scored("tiny_8k", {4096: 9}))
    path = result_path(tmp_path, "tiny_8k")
    content = json.loads(path.read_text())
    change(content["scores"])
    write_json(path, content)
    with pytest.raises(BrokenResultError) as raised:
        result_at(path)
    assert str(raised.value).startswith(str(path))
    assert said in str(raised.value)


def test_models_that_were_asked_other_samples_have_tables_apart():
    long = scored("tiny_8k", {4096: 9, 8192: 3})
    short = scored("tiny_2k", {4096: 8})
    assert why_apart(long, short) == ""
    other = scored("tiny_512", {4096: 8}, seed="b")
    assert (
        "at 4,096 tokens they were asked other samples of vt (10 of SHA-256 avt40960"
        in why_apart(long, other)
    )
    assert "their tokenizers differ" in why_apart(long, replace(short, tokenizer_sha256="u"))
    assert why_apart(short, scored("x", {8192: 1})) == "they have no length in common"
    assert [[each.model for each in group] for group in together([long, other, short])] == [
        ["tiny_8k", "tiny_2k"],
        ["tiny_512"],
    ]
    part = ruler_part([long, other, short], NAMES)
    assert [table.title for table in part.tables] == [
        "ruler-offline, table 1",
        "ruler-offline, table 2",
    ]
    (sentence,) = part.apart
    assert sentence.startswith("tiny_2k is not put next to tiny_512: at 4,096 tokens")
    assert [(row.name, model) for row, model in part.tables[1].tasks] == [
        ("vt", "tiny_2k"), ("vt", "tiny_8k"), ("qa_1", "tiny_2k"), ("qa_1", "tiny_8k"),
    ]  # fmt: skip
    assert [cell.text for cell in part.tables[1].tasks[0][0].cells] == [
        "80.0 \N{PLUS-MINUS SIGN} 12.6",
        "-",
    ]


def test_the_page_has_means_tasks_figure_and_effective_length(tmp_path):
    run = make_run(tmp_path)
    for result in (scored("tiny_8k", {4096: 10, 8192: 5}, step=20), scored("base", {4096: 7})):
        write_result(run, result)
    marker = {"step": 60, "max_steps": 60, "tokenizer": "x"}
    write_json(stage_folder(run, "tiny_8k") / "checkpoints" / "step=60" / "longhaul.json", marker)
    text = built(run)
    assert Page(text).open == []
    said = words(text)
    # two tasks of ten samples: each has the error of a binomial, 10 * sqrt(p (1 - p) * 10)
    assert {"50.0 \N{PLUS-MINUS SIGN} 11.2", "70.0 \N{PLUS-MINUS SIGN} 14.5"} <= cells(text)
    assert "tiny_8k: effective length: 4K (an average above 85.6" in said
    assert "base: effective length: below 4K" in said
    assert "answered by tiny_8k at step 20 and its newest checkpoint is of step 60" in said
    assert (run / "ruler.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_has_the_means_with_their_errors():
    part = ruler_part([scored("tiny_8k", {4096: 10, 8192: 5})], NAMES)
    (figure,) = ruler_figures(part, NAMES).values()
    (drawn,) = figure.axes[0].containers
    assert drawn.lines[0].get_xydata().tolist() == [[4096, 100], [8192, 50]]
    one = ruler_figures(ruler_part([scored("tiny_8k", {4096: 10})], NAMES), NAMES)
    assert one == {"ruler": None}


def test_models_of_several_runs_are_named_by_their_runs(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    for run, right in zip(runs, (9, 4), strict=True):
        write_result(run, scored("tiny_8k", {4096: right}))
    found = read_runs(runs)
    text = build_several(found, side_by_side(found), tmp_path / "page.html").read_text()
    assert "one: tiny_8k: effective length: 4K" in words(text)
    assert "two: tiny_8k: effective length: below 4K" in words(text)
    assert text.count("<h3>ruler-offline</h3>") == 1
