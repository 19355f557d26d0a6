# SPDX-License-Identifier: Apache-2.0
"""SCROLLS by one name and without downloaded code, and lengths that are too small for RULER."""

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness, the extra eval, is not installed")

from data.tokenization.tokenizer import train
from eval.harness import scrolls
from eval.harness.tasks import built, find
from tests.eval.ruler import support


@pytest.fixture(scope="module")
def theirs() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    to = tmp_path_factory.mktemp("of_words") / "tokenizer"
    train(support.texts(), 3000).save(to)
    return to


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    to = tmp_path / "tasks"
    to.mkdir()
    return to


def test_scrolls_is_its_seven_tasks_with_metrics_of_ours(folder, theirs, monkeypatch):
    import datasets

    for name in scrolls.TASKS:
        (folder / f"{name}.yaml").write_text(f"include: {theirs / 'scrolls' / name}.yaml\n")
    tasks, _, manager = find(["scrolls"], folder)
    assert tuple(task.name for task in tasks) == scrolls.TASKS
    assert {path.stem for path in (theirs / "scrolls").glob("*.yaml")} == set(scrolls.TASKS)
    row = {"id": "1", "pid": "1_0", "input": "Who?\n\nThe old man wrote it.", "output": "Old Man"}
    qasper = tasks[3]
    monkeypatch.setitem(
        qasper.config["class"].download.__globals__,
        "load_dataset",
        lambda *_, **__: datasets.DatasetDict(
            {split: datasets.Dataset.from_list([row]) for split in ("train", "validation")}
        ),
    )
    loaded = built(qasper, manager, tokenizer=folder, length=None, limit=None)
    assert [dict(doc)["question"] for doc in loaded.eval_docs] == ["Who?"]
    score = loaded.aggregation()["f1"]
    assert score([("the old man!", ["Old Man", "nobody"]), ("man", ["old man"])]) == pytest.approx(
        (100 + 200 / 3) / 2
    )
    (folder / "scrolls.yaml").write_text("group: scrolls\ntask: [scrolls_qasper]\n")
    assert [task.name for task in find(["scrolls"], folder)[0]] == ["scrolls_qasper"]


def test_rouge_of_a_summary_is_that_of_its_best_reference():
    found = scrolls.Metric().compute(["the cat sat"], [["a dog", "the cat sat down"]])
    assert found["rouge/rouge1"] == found["rouge/rougeL"] == pytest.approx(100 * 6 / 7)
    assert found["rouge/rouge2"] == pytest.approx(100 * 4 / 5)


def test_a_metric_that_is_downloaded_code_is_refused_by_name(folder):
    (folder / "rows.jsonl").write_text(json.dumps({"word": "w"}) + "\n")
    (folder / "one.yaml").write_text(
        "task: one\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: '{{word}}'\n"
        "doc_to_target: '{{word}}'\nmetric_list: [{metric: wer, hf_evaluate: true}]\n"
    )
    [task], _, manager = find(["one"], folder)
    with pytest.raises(ValueError, match=r"task one .*the code of the metric wer.*never runs such"):
        built(task, manager, tokenizer=folder, length=None, limit=None)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("niah_single_1", "niah_single_1"),
        ("niah_multikey_2", "niah_multikey_2"),
        ("vt", "ruler_vt"),
        ("cwe", "ruler_cwe"),
        ("fwe", "ruler_fwe"),
    ],
)
def test_a_length_that_is_too_small_is_told_with_the_smallest(
    folder, theirs, tokenizer, file, name
):
    (folder / f"{file}.yaml").write_text(f"include: {theirs / 'ruler' / file}.yaml\n")
    [task], _, manager = find([name], folder)

    def made(length: int) -> int:
        loaded = built(task, manager, tokenizer=tokenizer, length=length, limit=1)
        return len(loaded.eval_docs)

    with pytest.raises(
        ValueError, match=rf"task {name} cannot be made at 64 tokens: its shor"
    ) as refused:
        made(64)
    smallest = int(str(refused.value).partition("take ")[2].partition(";")[0].replace(",", ""))
    assert 64 < smallest < 2048
    assert made(smallest + 64) == 1


def test_a_task_that_makes_its_prompts_is_the_same_in_every_working_folder(
    folder, theirs, tmp_path, monkeypatch
):
    (folder / "vt.yaml").write_text(f"include: {theirs / 'ruler' / 'vt'}.yaml\n")
    [task], _, _ = find(["ruler_vt"], folder)
    (tmp_path / "notes.txt").write_text("of another folder")
    monkeypatch.chdir(tmp_path)
    [there], _, _ = find(["ruler_vt"], folder)
    assert there.digest == task.digest


def test_a_tokenizer_of_too_many_tokens_for_the_solved_example_of_vt_is_told(
    folder, theirs, tmp_path
):
    (folder / "vt.yaml").write_text(f"include: {theirs / 'ruler' / 'vt'}.yaml\n")
    support.byte_level().save(tmp_path / "tokenizer")
    [task], _, manager = find(["ruler_vt"], folder)
    with pytest.raises(ValueError, match=r"example of RULER's vt takes 5\d\d tokens of this token"):
        built(task, manager, tokenizer=tmp_path / "tokenizer", length=4096, limit=1)
