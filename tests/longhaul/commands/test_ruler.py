# SPDX-License-Identifier: Apache-2.0
"""`longhaul ruler` from samples to scores, and what it says of mistakes."""

import hashlib
import json
import shlex
from pathlib import Path

import pytest

from eval.ruler.results import read_results
from eval.run_folder import write_json
from tests.eval.ruler import support
from tests.longhaul.json_units import not_numbers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("a tokenizer")
    support.byte_level().save(folder)
    return folder


def make(answer, tokenizer: Path, *words: str):
    return answer("ruler", "make", "--tokenizer", tokenizer, "--out", "my samples", *words)


def test_samples_are_made_found_and_scored(answer, tokenizer, tmp_path):
    words = ("--lengths", "2K,3K", "--tasks", "vt,qa_2", "--samples", "2", "--seed", "5")
    code, shown, said = make(answer, tokenizer, *words)
    assert code == 0, said
    assert "| qa_2 |     3K |       2 |" in shown
    assert "do not report its scores as RULER's" in said
    folder = Path(shown.splitlines()[-1])
    assert folder.name.startswith("ruler-offline-")
    found = json.loads(make(answer, tokenizer, *words, "--json").out)
    assert [*not_numbers(found)] == []
    assert [row["samples"] for row in found["files"]] == [2, 2, 2, 2]
    assert "checked" in make(answer, tokenizer, *words).out

    samples = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.open()]
    assert len(samples) == 8
    with (tmp_path / "predictions.jsonl").open("w") as file:
        for sample in samples:
            wrong = sample["task"] == "vt" and sample["max_length"] == 3072
            text = "none" if wrong else sample["expected"]
            file.write(json.dumps({"id": sample["id"], "prediction": text}) + "\n")
    command = said.splitlines()[-1].strip().replace("PREDICTIONS", "predictions.jsonl")
    code, shown, said = answer(*shlex.split(command)[1:])
    assert code == 0, said
    assert "| vt      | 100.0 +- 16.8 |   0.0 +- 16.8 |" in shown
    assert "| average | 100.0 +- 11.9 |  50.0 +- 11.9 |" in shown
    assert "effective length: not stated, since 2,048 tokens has 2 of the 13 tasks" in shown
    found = json.loads(answer(*shlex.split(command)[1:], "--json").out)
    assert [*not_numbers(found)] == []
    assert found["effective_length"] is None
    assert found["scores"][0]["low"] < 60


@pytest.fixture
def answers(answer, tokenizer, tmp_path) -> tuple[str, ...]:
    """Return the words that score two answers, next to a run with two stages."""
    words = ("--lengths", "2K", "--tasks", "vt", "--samples", "2")
    folder = Path(make(answer, tokenizer, *words).out.splitlines()[-1])
    samples = [json.loads(line) for line in next(folder.glob("*.jsonl")).open()]
    lines = [{"id": each["id"], "prediction": each["expected"]} for each in samples]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(
        tmp_path / "run" / "run.json", {"ladder": "x", "card": "x", "stages": ["x_1k", "x_2k"]}
    )
    return ("ruler", "score", str(folder), "--predictions", "p.jsonl", "--run", "run")


def test_scores_are_written_into_a_run(answer, answers, tmp_path):
    assert (
        "no record next to p.jsonl says that a stage of run answered; name the model: --model x_2k"
        in (answer(*answers).error())
    )
    code, shown, said = answer(*answers, "--model", "base")
    assert code == 0, said
    assert shown.splitlines()[-1] == "run/eval/ruler/base.json"
    assert said.splitlines()[-1].strip() == "longhaul report --run run"
    checkpoint = tmp_path / "run" / "stages" / "x_2k" / "checkpoints" / "step=7"
    write_json(checkpoint / "longhaul.json", {"step": 7, "max_steps": 7, "tokenizer": "t"})
    record = {
        "weights": str(checkpoint),
        "weights_sha256": "w",
        "tokenizer": "t",
        "precision": "fp32",
    }
    write_json(tmp_path / "p.jsonl.job" / "model.json", record)
    code, _, said = answer(*answers)
    assert code == 0, said
    first, second = read_results(tmp_path / "run")
    assert (first.model, first.step, second.model, second.step) == ("base", None, "x_2k", 7)
    assert second.weights == str(checkpoint)
    assert second.provenance.command == f"longhaul {shlex.join(answers)}"
    (score,) = second.scores.scores
    assert (score.task, score.length, score.metric, score.score) == ("vt", 2048, "all", 100)
    (file,) = Path(answers[2]).glob("*.jsonl")
    assert [each.sha256 for each in score.files] == [hashlib.sha256(file.read_bytes()).hexdigest()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "x_4k"), "run has no stage 'x_4k'; did you mean x_2k"),
        (("--run", "rnu", "--model", "base"), "there is no run folder at rnu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_model_that_the_run_does_not_have_is_named(answer, answers, tmp_path, words, said):
    assert said in answer(*answers, *words).error()
    assert not (tmp_path / "run" / "eval").exists()


def test_answers_of_one_stage_are_not_written_as_another_s(answer, answers, tmp_path):
    record = {"weights": str(tmp_path / "run" / "stages" / "x_2k" / "checkpoints" / "step=7")}
    write_json(tmp_path / "p.jsonl.job" / "model.json", record)
    assert "--model is x_1k, and p.jsonl has answers of stage x_2k" in (
        answer(*answers, "--model", "x_1k").error()
    )
    assert "--model needs --run" in answer(*answers[:-2], "--model", "x_1k").error()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tasks", "niah_singel_1"), "'niah_singel_1'; did you mean niah_single_1"),
        (("--tasks", ""), "--tasks"),
        (("--samples", "0"), "--samples is 0; ask for at least 1"),
        (("--samples", "-1"), "--samples is -1"),
        (("--lengths", "4X"), "not 4X"),
        (("--lengths", "100"), "--lengths has 100 tokens, and the answer of niah_single_1"),
        (("--lengths", "300", "--tasks", "qa_2", "--samples", "1"), "qa_2 cannot be made at 300"),
        (("--lengths", "400", "--tasks", "niah_single_1,vt"), "vt cannot be made at 400"),
        (("--ruler-data", "nowhere"), "nowhere is not a folder"),
        (("--ruler-data", "."), "lacks PaulGrahamEssays.json, squad.json, hotpotqa.json; put"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_named_and_nothing_is_written(answer, tokenizer, tmp_path, words, said):
    assert said in make(answer, tokenizer, *words).error()
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_and_files_that_are_not_there_are_named(answer, tmp_path):
    assert "nowhere" in make(answer, Path("nowhere"), "--samples", "1").error()
    (tmp_path / "p.jsonl").write_text("")
    score = ("ruler", "score", "nowhere", "--predictions")
    assert "nowhere does not exist" in answer(*score, "p.jsonl").error()
    assert "q.jsonl is not a file" in answer(*score, "q.jsonl").error()
    (tmp_path / "nowhere").mkdir()
    assert "nowhere has no sample files" in answer(*score, "p.jsonl").error()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name what answers: --run with --stage, or --export"),
        (("--run", "r", "--export", "e"), "name what answers"),
        (("--run", "r"), "--run needs --stage"),
        (("--export", "e", "--tp", "2", "--stage", "4K"), "--stage and --tp cannot go with"),
        (("--export", "e", "--device", "gpu"), "--device is 'gpu'; expected cpu or cuda"),
        (("--export", "e"), "nowhere does not exist; name a file of samples"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_in_predicting_is_named_before_a_library_is_loaded(answer, tmp_path, words, said):
    assert said in answer("ruler", "predict", "nowhere", "--out", "p.jsonl", *words).error()
    assert list(tmp_path.iterdir()) == []


def test_predictions_go_to_a_jsonl_file(answer, tokenizer, tmp_path):
    words = ("--lengths", "2K", "--tasks", "vt", "--samples", "1")
    folder = make(answer, tokenizer, *words).out.splitlines()[-1]
    predict = ("ruler", "predict", folder, "--export", "e", "--out")
    assert "p.json is not a .jsonl file" in answer(*predict, "p.json").error()
    (tmp_path / "d.jsonl").mkdir()
    assert "d.jsonl is a folder" in answer(*predict, "d.jsonl").error()
