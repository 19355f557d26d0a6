# SPDX-License-Identifier: Apache-2.0
"""A stage and its export get the same scores from lm-evaluation-harness, on one rank and on two."""

import json
from pathlib import Path

import pytest

from tests.eval.stage_and_export import Models
from tests.ranks import Ranks
from tests.recipes.hugging_face.support.stages import LENGTH
from tests.runs.conftest import NEMO

pytest.importorskip("lm_eval", reason="lm-evaluation-harness, the extra eval, is not installed")
pytestmark = pytest.mark.slow

TASKS = Path(__file__).parent / "tasks"
PAIRS = [("The opposite of hot is", " cold"), ("", "the the the"), ("a b c d e f g", " h i")]
TEXT = "bytes and merges " * 40
"""More than the longest request, so that it is read in windows."""


def answers(stage: str, tokenizer: str, tp: int, cp: int) -> list:
    """Return log-likelihoods, a rolling one and generated texts of a stage on this rank.

    Pipeline parallelism is refused before.
    """
    from megatron.core import parallel_state
    from transformers import AutoTokenizer

    from custom_modules.cpu.backend import cpu_backend
    from eval.harness.model import Megatron
    from eval.load_model import load

    with cpu_backend(force=True):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        with pytest.raises(ValueError, match="PP=2; a checkpoint loads under any layout"):
            Megatron(None, None, longest=128)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, context_parallel_size=cp
        )
        model = load(Path(stage), seq_length=LENGTH)
        lm = Megatron(model, AutoTokenizer.from_pretrained(tokenizer), longest=128)
        found = answers_of(lm)
        parallel_state.destroy_model_parallel()
    return found


def answers_of(lm) -> list:
    pairs = [request("loglikelihood", pair) for pair in PAIRS]
    kwargs = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
    prompts = [request("generate_until", (before, kwargs)) for before, _ in PAIRS if before]
    return [
        lm.loglikelihood(pairs),
        lm.loglikelihood_rolling([request("loglikelihood_rolling", (TEXT,))]),
        lm.generate_until(prompts),
    ]


def request(kind: str, arguments: tuple):
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0, metadata=("pairs", 7, 1))


@pytest.fixture(scope="module")
def models(tmp_path_factory, small_store) -> Models:
    return Models(tmp_path_factory.mktemp("models"), small_store)


def suites(out: str) -> list[dict]:
    """Return the results that a command printed, below what launchers log in this process."""
    return json.loads(out[out.index("{\n") :])["suites"]


def test_the_scores_of_a_stage_are_those_of_its_export(models, answer, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    words = ("evaluate", "--run", models.run, "--suite", "words_choice,words_copy")
    of_stage = ("--store", models.store, "--device", "cpu", "--ranks", 2, "--cp", 2)
    given = (*words, "--include-path", TASKS, "--json")
    done = answer(*given, *of_stage)
    assert done.code == 0, done.err
    of_export = answer(*given, "--export", models.export)
    assert of_export.code == 0, of_export.err
    ours, theirs = suites(done.out), suites(of_export.out)
    assert [each["settings"]["backend"] for each in (*ours, *theirs)] == ["megatron"] * 2 + [
        "hf"
    ] * 2
    for one, other in zip(ours, theirs, strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["samples"] == one["available"] == 4
        same = ("task_sha256", "tokenizer_sha256", "longest", "harness")
        assert [one["settings"][key] for key in same] == [other["settings"][key] for key in same]
    choice, copy = ours
    assert choice["version"] == "2.0"
    assert [metric["name"] for metric in choice["metrics"]] == ["acc", "acc_norm"]
    assert copy["metrics"][0]["value"] > copy["metrics"][0]["standard_error"] > 0

    file = models.run / "eval" / "suites" / models.stage.name / "words_choice.json"
    file.with_name("words_copy.json").unlink()
    before = file.stat().st_mtime_ns
    again = answer(*given, *of_stage)
    assert again.code == 0, again.err
    assert suites(again.out) == ours  # the missing one was made again
    assert file.stat().st_mtime_ns == before


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 1)], ids=["CP=2", "TP=2"])
def test_two_ranks_answer_as_one_rank_and_as_transformers_do(models, megatron_rank, tp, cp):
    from eval.harness.model import Export

    tokenizer = str(models.store / "tokenizer")
    with Ranks(answers, 2, str(models.stage), tokenizer, tp, cp, server=NEMO) as started:
        first, second = started.results(300)
    assert first == second
    theirs = answers_of(Export(models.export, longest=128, device="cpu"))
    assert first[2] == theirs[2]
    assert any(first[2])
    for ours, other in zip(first[0], theirs[0], strict=True):
        assert ours[0] == pytest.approx(other[0], abs=2e-3)
        assert ours[1] == other[1]
    assert first[1] == pytest.approx(theirs[1], rel=1e-4)


def test_a_folder_that_is_no_export_is_refused(tmp_path):
    from eval.harness.run import of_export

    with pytest.raises(ValueError, match="nowhere is not a Hugging Face folder"):
        of_export(tmp_path / "nowhere", "cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="max_position_embeddings"):
        of_export(tmp_path, "cpu")
