# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness by name: what is found, made, refused and averaged."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-evaluation-harness, the extra eval, is not installed")

from eval.harness.tasks import LENGTHS, built, find, require_few_shot, template_sha256
from eval.suite_results import Group, SuiteSettings
from tests.eval.chat_tokenizers import saved, tokenizer
from tests.ranks import one_rank

TASKS = Path(__file__).parent / "tasks"
TREE = Path(__file__).resolve().parents[3]
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: rows.jsonl}}
{more}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{word}}}}"
doc_to_choice: ["a", "b"]
doc_to_target: 0
"""
MADE = """
task: made
custom_dataset: !function made.rows
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "x"
generation_kwargs: {max_gen_toks: 2}
"""
ROWS = """
import random

import datasets

CALLS = []


def samples(length, num_samples=500):
    CALLS.append(num_samples)
    return [{"text": "x" * length, "draw": random.random()} for _ in range(num_samples)]


def rows(**given):
    made = [row for length in given["max_seq_lengths"] for row in samples(length)]
    return {"test": datasets.Dataset.from_list(made)}
"""
SETTINGS = SuiteSettings(
    task="one", task_sha256="t", length=None, limit=None, longest=512, weights_sha256="w",
    tokenizer_sha256="k", backend="megatron", precision="fp32", harness="0.4.13",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return a folder of tasks with one row of data."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    to = tmp_path / "tasks"
    to.mkdir()
    (to / "rows.jsonl").write_text('{"word": "w"}\n')
    return to


def write(folder: Path, name: str, more: str = "") -> None:
    (folder / f"{name}.yaml").write_text(CHOICE.format(name=name, more=more))


def load(folder: Path, name: str, **given):
    (task,), _, manager = find([name], folder)
    defaults = {"tokenizer": folder, "length": None, "limit": None}
    return built(task, manager, **{**defaults, **given})


def test_a_task_reads_the_data_next_to_its_file(folder):
    write(folder, "one")
    assert [dict(row) for row in load(folder, "one").eval_docs] == [{"word": "w"}]


def test_the_digest_of_a_task_changes_with_its_data(folder):
    write(folder, "one")
    first = find(["one"], folder)[0][0].digest
    assert find(["one"], folder)[0][0].digest == first
    (folder / "rows.jsonl").write_text('{"word": "v"}\n')
    assert find(["one"], folder)[0][0].digest != first


def test_the_digest_of_a_task_changes_with_files_of_a_pattern_and_a_folder(folder):
    for more in (f"data_files: {folder}/*.jsonl", f"data_dir: {folder}"):
        (folder / "many.yaml").write_text(
            f"task: many\ndataset_path: json\ndataset_kwargs: {{{more}}}\n"
        )
        first = find(["many"], folder)[0][0].digest
        (folder / "rows.jsonl").write_text(f'{{"word": "{len(more)}"}}\n')
        assert find(["many"], folder)[0][0].digest != first


def test_a_task_with_two_configurations_and_a_group_of_none_are_refused(folder):
    write(folder, "one")
    (folder / "both.yaml").write_text("group: both\ntask: [{task: one, num_fewshot: 3}]\n")
    with pytest.raises(ValueError, match="has the task one with two configurations"):
        find(["one", "both"], folder)
    (folder / "empty.yaml").write_text("group: empty\ntask: []\n")
    with pytest.raises(ValueError, match="the group empty lists no tasks"):
        find(["empty"], folder)


def test_the_digest_of_a_task_changes_with_what_its_functions_use(folder):
    write(folder, "one", "process_results: !function scores.scored")
    code = "WORD = {word!r}\n\n\ndef scored(doc, results):\n    return {{WORD: 1.0}}\n"
    (folder / "scores.py").write_text(code.format(word="a"))
    first = find(["one"], folder)[0][0].digest
    (folder / "scores.py").write_text(code.format(word="b"))
    assert find(["one"], folder)[0][0].digest != first


@pytest.mark.nightly  # the harness reads all of its tasks
def test_a_group_may_list_a_task_of_the_harness(folder):
    write(folder, "one")
    (folder / "both.yaml").write_text("group: both\ntask: [one, copa]\n")
    assert [task.name for task in find(["both"], folder)[0]] == ["one", "copa"]


@pytest.mark.nightly  # the harness reads all of its tasks
def test_a_group_may_not_list_a_task_that_nobody_has(folder):
    (folder / "none.yaml").write_text("group: none\ntask: [no_such_task]\n")
    with pytest.raises(ValueError, match="lists a task 'no_such_task' that the harness"):
        find(["none"], folder)


def test_a_group_has_its_tasks_with_its_overrides(folder):
    for name in ("one", "two"):
        write(folder, name)
    (folder / "both.yaml").write_text(
        "group: both\ntask:\n  - one\n  - {task: two, num_fewshot: 3}\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: false}]\n"
    )
    tasks, groups, _ = find(["both"], folder)
    assert [(task.name, task.config.get("num_fewshot")) for task in tasks] == [
        ("one", None),
        ("two", 3),
    ]
    assert groups == [Group("both", ("one", "two"), ("acc",), by_size=False)]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("unsafe_code: true", "runs code that the model writes"),
        ("doc_to_image: word", "images or audio"),
    ],
)
def test_a_task_that_this_command_does_not_run_is_refused_by_name(folder, more, words):
    write(folder, "other", more)
    with pytest.raises(ValueError, match=f"task other .*{words}"):
        find(["other"], folder)


def test_a_task_that_asks_for_remote_code_is_refused_by_name(folder):
    write(folder, "remote")
    file = folder / "remote.yaml"
    file.write_text(
        file.read_text().replace(
            "test: rows.jsonl}", "test: rows.jsonl}\n  trust_remote_code: true"
        )
    )
    with pytest.raises(ValueError, match="task remote asks for trust_remote_code"):
        find(["remote"], folder)


def test_missing_and_empty_data_are_told_in_one_sentence(folder):
    write(folder, "one")
    (folder / "rows.jsonl").write_text("")
    with pytest.raises(ValueError, match="task one has no samples"):
        load(folder, "one")
    (folder / "made.py").write_text(ROWS.replace("num_samples=500", "num_samples=0"))
    (folder / "made.yaml").write_text(MADE)
    with pytest.raises(ValueError, match="task made has no samples"):
        load(folder, "made", length=16)
    (folder / "rows.jsonl").unlink()
    with pytest.raises(ValueError, match=r"task one reads rows.jsonl, which is not in"):
        find(["one"], folder)


def test_data_that_are_not_in_the_cache_are_told_with_the_place_of_the_cache(folder, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write(folder, "hub")
    file = folder / "hub.yaml"
    text = file.read_text().replace("dataset_path: json", "dataset_path: nobody/nothing")
    file.write_text(text.replace("dataset_kwargs:\n  data_files: {test: rows.jsonl}\n", ""))
    with pytest.raises(ValueError, match=r"data of task hub \(nobody/nothing\).*copy a filled"):
        load(folder, "hub")


def test_a_limited_task_makes_no_more_prompts_and_is_the_same_in_each_run(folder):
    (folder / "made.py").write_text(ROWS)
    (folder / "made.yaml").write_text(MADE)
    (task,), _, _ = find(["made"], folder)
    assert task.makes_prompts
    module = task.config["custom_dataset"].__globals__
    first = load(folder, "made", length=16, limit=3)
    assert module["CALLS"] == [3]
    assert first.config.metadata[LENGTHS] == [16]
    assert [row["text"] for row in first.eval_docs] == ["x" * 16] * 3
    again = load(folder, "made", length=16, limit=3)
    assert list(again.eval_docs) == list(first.eval_docs)
    load(folder, "made", length=16)
    assert module["CALLS"] == [3, 3, 500]  # the task's own function is back


def test_a_task_file_names_the_part_of_babilong_that_it_reads(folder, monkeypatch):
    """As docs/other_suites.md has it: the harness alone reads the part 0k."""
    import datasets
    from lm_eval import tasks

    parts = []

    def load_dataset(path, name, split):
        parts.append((path, name, split))
        row = {"input": "Mary is in the hall. ", "question": "Where is Mary?", "target": "hall"}
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    theirs = Path(tasks.__file__).parent / "babilong" / "babilong_qa1.yaml"
    (folder / "qa1.yaml").write_text(
        f"include: {theirs}\ntask: babilong_qa1_64k\nmetadata: {{max_seq_lengths: 64k}}\n"
    )
    assert len(load(folder, "babilong_qa1_64k").eval_docs) == 1
    assert not find(["babilong_qa1_64k"], folder)[0][0].makes_prompts
    assert set(parts) == {("RMT-team/babilong-1k-samples", "64k", "qa1")}


def test_a_metric_that_is_downloaded_code_is_refused_by_name(folder):
    (folder / "rows.jsonl").write_text('{"word": "w"}\n')
    (folder / "one.yaml").write_text(
        "task: one\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: '{{word}}'\n"
        "doc_to_target: '{{word}}'\nmetric_list: [{metric: wer, hf_evaluate: true}]\n"
    )
    [task], _, manager = find(["one"], folder)
    with pytest.raises(ValueError, match=r"task one .*the code of the metric wer.*never runs such"):
        built(task, manager, tokenizer=folder, length=None, limit=None)


def test_the_script_of_scrolls_metrics_is_not_run(folder, monkeypatch):
    import datasets
    from lm_eval import tasks

    theirs = Path(tasks.__file__).parent / "scrolls" / "scrolls_qasper.yaml"
    (folder / "qasper.yaml").write_text(f"include: {theirs}\n")
    [task], _, manager = find(["scrolls_qasper"], folder)
    row = {"id": "1", "pid": "1_0", "input": "Who?\n\nThe old man wrote it.", "output": "Old Man"}
    parts = {split: datasets.Dataset.from_list([row]) for split in ("train", "validation")}
    scope = task.config["class"].download.__globals__
    monkeypatch.setitem(scope, "load_dataset", lambda *_, **__: datasets.DatasetDict(parts))
    monkeypatch.setitem(scope, "_download_metric", lambda: "scrolls.py")
    with pytest.raises(ValueError, match=r"needs code of others.*of the metric scrolls.py"):
        built(task, manager, tokenizer=folder, length=None, limit=None)


def test_a_task_that_makes_its_prompts_is_the_same_in_every_working_folder(
    folder, tmp_path, monkeypatch
):
    from lm_eval import tasks

    theirs = Path(tasks.__file__).parent / "ruler" / "vt.yaml"
    (folder / "vt.yaml").write_text(f"include: {theirs}\n")
    [task], _, _ = find(["ruler_vt"], folder)
    (tmp_path / "notes.txt").write_text("of another folder")
    monkeypatch.chdir(tmp_path)
    [there], _, _ = find(["ruler_vt"], folder)
    assert there.digest == task.digest


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    first, other = (template_sha256(saved(name, tmp_path / name)) for name in ("phi3", "gemma"))
    assert first != other
    made = tokenizer("phi3")
    made.chat_template = None
    made.save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match=r"none has no chat template .* without --chat-template"):
        template_sha256(tmp_path / "none")


def of_bytes(longest: int):
    """Return a model whose tokens are bytes and whose scores are their numbers."""
    from eval.harness.model import RefusesOverlong

    class Bytes(RefusesOverlong):
        eot_token_id = 0

        def tok_encode(self, string, add_special_tokens=None, **_):
            return list(string.encode())

        def _loglikelihood_tokens(self, requests, **_):
            return [(float(len(before) + len(after)), True) for _, before, after in requests]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            return []

        def _generated(self, requests):
            return ["" for _ in requests]

    lm = Bytes()
    lm.longest = longest
    return lm


def test_examples_are_before_each_question_and_count_as_tokens(folder):
    from eval.harness.model import OverlongError
    from eval.harness.run import Evaluated, evaluated

    write(folder, "one", "fewshot_split: test")
    (folder / "rows.jsonl").write_text("".join(f'{{"word": "w{row}"}}\n' for row in range(4)))
    (task,), _, manager = find(["one"], folder)
    model = Evaluated("m", folder, 1, 64, "w", folder, "megatron", "fp32", of_bytes)

    def tokens(count, longest=64):
        settings = replace(SETTINGS, few_shot=count, longest=longest)
        with one_rank():
            found = evaluated(of_bytes(longest), task, manager, model, settings)
        assert found.few_shot == (count or 0)
        return found.most_tokens

    assert tokens(None) == tokens(0) == len("w0 a")
    assert tokens(2) == len("w1 a\n\nw2 a\n\nw0 a")
    with pytest.raises(OverlongError, match="16 tokens do not fit in 15"):
        tokens(2, longest=15)
    write(folder, "none", "num_fewshot: 0")
    (alone,), _, _ = find(["none"], folder)
    require_few_shot([task], 2)
    require_few_shot([alone], 0)
    with pytest.raises(ValueError, match="--few-shot 2: task none states num_fewshot: 0"):
        require_few_shot([task, alone], 2)
    write(folder, "bare")
    (bare,), _, _ = find(["bare"], folder)
    require_few_shot([bare], None)
    with pytest.raises(ValueError, match="task bare names no fewshot_split"):
        require_few_shot([bare], 2)
    with pytest.raises(ValueError, match="task one makes prompts of a length"):
        require_few_shot([replace(task, makes_prompts=True)], 2)


def test_a_request_that_is_too_long_is_refused_with_its_document():
    from lm_eval.api.instance import Instance

    from eval.harness.model import OverlongError

    def request(kind, *arguments):
        return Instance(kind, {}, arguments, 0, metadata=("some_task", 7, 1))

    lm = of_bytes(10)
    assert lm.loglikelihood([request("loglikelihood", "12345678", "90")]) == [(10.0, True)]
    assert lm.generate_until([request("generate_until", "123", {"max_gen_toks": 7})]) == [""]
    assert lm.most == 10
    with pytest.raises(OverlongError, match="some_task, document 7: 11 tokens do not fit in 10"):
        lm.loglikelihood([request("loglikelihood", "12345678", "901")])
    with pytest.raises(OverlongError, match="4 tokens and 7 to generate do not fit in 10"):
        lm.generate_until([request("generate_until", "1234", {"max_gen_toks": 7})])
    with pytest.raises(ValueError, match="some_task samples or searches"):
        lm.generate_until([request("generate_until", "1", {"do_sample": True, "max_gen_toks": 1})])
