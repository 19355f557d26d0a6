# SPDX-License-Identifier: Apache-2.0
"""A stage and its export get the same scores from lm-evaluation-harness, on one rank and on two."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from recipes.spec.gate import SuiteThreshold
from recipes.spec.suites import SuiteRun
from tests.eval.stage_and_export import Models
from tests.ranks import Ranks, one_rank
from tests.recipes.hugging_face.support.stages import LENGTH
from tests.runs.conftest import NEMO

pytest.importorskip("lm_eval", reason="lm-evaluation-harness, the extra eval, is not installed")
pytestmark = pytest.mark.slow

TASKS = Path(__file__).parent / "tasks"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|endoftext|>{{ message.role }}\n{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)
MADE = 512
"""Tokens of the prompts of RULER's task."""
LONGEST = MADE + 256
PAIRS = [("The opposite of hot is", " cold"), ("", "the the the"), ("a b c d e f g", " h i")]
TEXT = "bytes and merges " * 40
"""More than the longest request, so that it is read in windows."""


def answers(
    stage: str, tokenizer: str, run: str, tasks: str, tp: int, cp: int
) -> tuple[list, list[str]]:
    """Return the answers of a stage on this rank, and its generated texts of tasks.

    The results of the tasks are in the folder `run`. Two ranks refuse pipeline parallelism before.
    """
    from megatron.core import parallel_state
    from transformers import AutoTokenizer

    from custom_modules.cpu.backend import cpu_backend
    from eval.evaluate import Subject
    from eval.harness.model import Megatron
    from eval.harness.run import of_checkpoint
    from eval.load_model import load

    with cpu_backend(force=True):
        if dist.get_world_size() == 2:
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
            with pytest.raises(ValueError, match="PP=2; a checkpoint loads under any layout"):
                Megatron(None, None, longest=128)
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, context_parallel_size=cp
        )
        model = load(Path(stage), seq_length=LONGEST)
        lm = Megatron(model, AutoTokenizer.from_pretrained(tokenizer), longest=128)
        found = answers_of(lm)
        subject = Subject(Path(stage).name, Path(stage), LENGTH, 5)
        texts = evaluated(run, tasks, of_checkpoint(subject, Path(tokenizer), "cpu", True), lm)
        parallel_state.destroy_model_parallel()
    return found, texts


def evaluated(run: str, tasks: str, model, lm) -> list[str]:
    """Write the results of a model on three kinds of tasks, and return the generated texts."""
    from eval.harness.run import Suite, evaluate_models

    texts: list[str] = []
    generated = lm._generated

    def recorded(requests):
        texts.extend(answers := generated(requests))
        return answers

    lm._generated = recorded
    asked = Suite(("niah_single_1", "words_choice", "words_copy"), (MADE,), 2, Path(tasks))
    in_chat = replace(asked, names=asked.names[1:], chat_template=True)
    for each in (asked, in_chat):
        evaluate_models(Path(run), [replace(model, model=lambda _: lm)], each)
    return texts


def answers_of(lm) -> list:
    pairs = [request("loglikelihood", pair) for pair in PAIRS]
    kwargs = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
    prompts = [request("generate_until", (before, kwargs)) for before, _ in PAIRS if before]
    texts = lm.generate_until(prompts)
    lm.other_ends = tuple(lm.tok_encode(texts[0])[1:])
    return [
        lm.loglikelihood(pairs),
        lm.loglikelihood_rolling([request("loglikelihood_rolling", (TEXT,))]),
        texts,
        lm.generate_until(prompts),
    ]


def request(kind: str, arguments: tuple):
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0, metadata=("pairs", 7, 1))


@pytest.fixture(scope="module")
def models(tmp_path_factory, small_store) -> Models:
    """Return models whose export has a chat template; the tokenizer of the store has none."""
    made = Models(tmp_path_factory.mktemp("models"), small_store)
    (made.export / "chat_template.jinja").write_text(TEMPLATE)
    return made


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

    file = models.run / "eval" / "suites" / models.export.name / "words_choice.json"
    file.with_name("words_copy.json").unlink()
    before = file.stat().st_mtime_ns
    again = answer(*given, "--export", models.export)
    assert again.code == 0, again.err
    assert suites(again.out) == theirs  # the missing one was made again
    assert file.stat().st_mtime_ns == before
    refused = answer(*given, *of_stage, "--chat-template").error()
    assert f"the tokenizer in {models.store / 'tokenizer'} has no chat template" in refused
    export = ("--export", models.export)
    for options, said in (
        (("--backend", "vllm"), "`longhaul evaluate --backend` is not in this release"),
        ((*export, "--tp", 2), "--tp cannot go with --export"),
    ):
        assert said in answer(*given, *options).error()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Iterator[Path]:
    """Return a folder with the tasks here and RULER's first one, whose index takes no seconds.

    Nothing is downloaded: RULER looks for NLTK's sentence splitter, which this task does not use.
    Its answers have fewer tokens than the 128 of RULER, each of which is a pass of the model.
    """
    from lm_eval import tasks as of_harness

    to = tmp_path_factory.mktemp("of_tasks")
    shutil.copytree(TASKS, to / "tasks")
    ruler = Path(of_harness.__file__).parent / "ruler" / "niah_single_1.yaml"
    shorter = {"do_sample": False, "max_gen_toks": 24, "until": []}
    niah = f"include: {ruler}\ngeneration_kwargs: {json.dumps(shorter)}\n"
    (to / "tasks" / "niah.yaml").write_text(niah)
    (to / "nltk" / "tokenizers" / "punkt_tab").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(to / "nltk"))
        patch.setenv("HF_DATASETS_CACHE", str(to / "cache"))
        patch.setattr("nltk.data.path", [str(to / "nltk")])
        patch.setattr("datasets.config.HF_DATASETS_CACHE", to / "cache")
        yield to / "tasks"


@pytest.fixture(scope="module")
def by_transformers(models, tasks, tmp_path_factory) -> tuple[list, list[str], list[dict]]:
    """Return the export's answers, its generated texts of tasks and their scores."""
    from eval.harness.model import Export
    from eval.harness.run import of_export

    run = tmp_path_factory.mktemp("by_transformers")
    found = answers_of(Export(models.export, longest=128, device="cpu"))
    with one_rank():
        lm = Export(models.export, longest=LONGEST, device="cpu")
        texts = evaluated(str(run), str(tasks), of_export(models.export, "cpu"), lm)
    return found, texts, scores(run)


def scores(run: Path) -> list[dict]:
    files = sorted((run / "eval" / "suites").rglob("*.json"))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.nightly  # the command above has both, test_ruler and test_generation have ranks
@pytest.mark.parametrize(
    ("ranks", "tp", "cp"),
    [(1, 1, 1), (2, 1, 1), (2, 1, 2), (2, 2, 1)],
    ids=["one rank", "DP=2", "CP=2", "TP=2"],
)
def test_ranks_answer_and_score_as_transformers_does(
    models, tasks, by_transformers, tmp_path, ranks, tp, cp
):
    words = (str(models.stage), str(models.export), str(tmp_path), str(tasks), tp, cp)
    with Ranks(answers, ranks, *words, server=NEMO) as started:
        first, *others = started.results(500)
    assert all(other == first for other in others)
    (found, texts), (theirs, their_texts, their_scores) = first, by_transformers
    assert found[2:] == theirs[2:]
    whole, ended = found[2][0], found[3][0]
    assert whole.startswith(ended)
    assert len(ended) < len(whole)
    for ours, other in zip(found[0], theirs[0], strict=True):
        assert ours[0] == pytest.approx(other[0], abs=2e-3)
        assert ours[1] == other[1]
    assert found[1] == pytest.approx(theirs[1], rel=1e-4)
    assert texts == their_texts
    assert len(texts) == 6
    assert all(texts[:4])
    assert any(texts[4:])
    assert texts[2:4] != texts[4:]
    our_scores = scores(tmp_path)
    assert [
        (each["settings"]["task"], bool(each["settings"]["chat_template"])) for each in our_scores
    ] == [
        ("niah_single_1", False), ("words_choice", False), ("words_choice", True),
        ("words_copy", False), ("words_copy", True),
    ]  # fmt: skip
    for ours, other in zip(our_scores, their_scores, strict=True):
        same = ("metrics", "samples", "most_tokens", "version", "few_shot")
        assert [ours[key] for key in same] == [other[key] for key in same]
        assert ours["samples"] == 2


def run_in_chain(run: str, store: str, stage: str, suites: list, thresholds: list) -> str:
    """Run suites on the base model and on a stage, as the chain does; return why its gate shut."""
    from eval.gates.chain_suites import run_suites
    from recipes.spec.gate import GateShutError

    dist.destroy_process_group()  # a job of the chain joins by itself, as torchrun tells it
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    reason = ""
    run_suites(run, "base", stage, store, suites)
    try:
        run_suites(run, stage, stage, store, suites, before="base", thresholds=thresholds)
    except GateShutError as error:
        reason = str(error)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return reason


def test_a_chain_runs_suites_on_the_base_model_and_a_stage_and_judges_their_scores(
    models, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    suites = [SuiteRun(tasks=("words_choice",), limit=3, include=str(TASKS))]
    thresholds = [
        SuiteThreshold(task="words_choice", drop=1),
        SuiteThreshold(task="words_choice", metric="acc_norm", least=1.5),
    ]
    with Ranks(
        run_in_chain, 1, str(models.run), str(models.store), models.stage.name, suites, thresholds,
        server=NEMO,
    ) as started:  # fmt: skip
        [reason] = started.results(300)
    folder = models.run / "eval" / "suites"
    base, stage = (
        json.loads((folder / name / "words_choice_limit_3.json").read_text())
        for name in ("base", models.stage.name)
    )
    assert base["samples"] == stage["samples"] == 3
    assert base["settings"]["weights_sha256"] != stage["settings"]["weights_sha256"]
    kept = json.loads((models.run / "eval" / f"{models.stage.name}.suites.gate.json").read_text())
    drop, least = kept["judgements"]
    scores = [{each["name"]: each["value"] for each in of["metrics"]} for of in (base, stage)]
    assert drop["measured"] == pytest.approx(scores[0]["acc"] - scores[1]["acc"])
    assert (drop["passed"], least["passed"], kept["open"]) == (True, False, False)
    assert least["measured"] == scores[1]["acc_norm"]
    assert f"the gate after {models.stage.name} is shut: suites words_choice (acc_norm)" in reason

    from eval.gates.chain_suites import found_tasks, have_passed

    found, name = found_tasks(suites), models.stage.name
    asked = (str(models.run), name, name, str(models.store), suites, found, "base")
    assert have_passed(*asked)
    assert have_passed(*asked, thresholds[:1])
    assert not have_passed(*asked, thresholds)  # a new job would judge it, and run no task
    fewer = [SuiteRun(tasks=("words_choice",), limit=2, include=str(TASKS))]
    assert not have_passed(*asked[:4], fewer, found, "base")
    assert have_passed(str(models.run), "base", *asked[2:6])


def test_what_a_suite_of_a_ladder_lacks_is_said_before_training(models, tmp_path):
    from longhaul.jobs.chain_suites import _of_suite, _refused

    tokenizer = models.store / "tokenizer"
    suite = SuiteRun(tasks=("words_choice",), include=str(TASKS), lengths=(512,))
    found = _of_suite(suite, tokenizer)
    assert found == {"words_choice": False}
    known = {name: (suite, made) for name, made in found.items()} | {"made": (suite, True)}
    for threshold, said in (
        ({"task": "words_choice"}, ""),
        ({"task": "mmlu"}, "is of no task that the ladder's suites run; they are words_choice"),
        ({"task": "words_choice", "length": 512}, "does not make its prompts; leave it out"),
        ({"task": "made", "length": 513}, "needs a length of the prompts that the suite makes: 51"),
        ({"task": "made", "length": 512}, ""),
    ):
        refused = _refused(SuiteThreshold(**threshold, least=0.5), known)
        assert (said in refused) if said else not refused
    (tmp_path / "lost.yaml").write_text((TASKS / "words.yaml").read_text())
    with pytest.raises(ValueError, match=r"words_choice reads words\.jsonl, which is not in"):
        _of_suite(SuiteRun(tasks=("words_choice",), include=str(tmp_path)), tokenizer)


def test_a_folder_that_is_no_export_is_refused(tmp_path):
    from eval.harness.run import of_export

    with pytest.raises(ValueError, match="nowhere is not a Hugging Face folder"):
        of_export(tmp_path / "nowhere", "cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="max_position_embeddings"):
        of_export(tmp_path, "cpu")


def test_an_export_with_a_flipped_bit_is_not_evaluated(models, answer, monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    export = Path(shutil.copytree(models.export, tmp_path / "export"))
    weights = export / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    words = ("evaluate", "--run", models.run, "--suite", "words_choice", "--include-path", TASKS)
    said = answer(*words, "--export", export).error()
    assert f"{weights} is damaged: its SHA-256 differs from what was written" in said
