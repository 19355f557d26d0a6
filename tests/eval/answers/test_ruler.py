# SPDX-License-Identifier: Apache-2.0
"""A stage and its export answer RULER's samples the same way, on one rank and on two."""

import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from data.files.sha256 import sha256_of
from tests.eval.stage_and_export import Models
from tests.ranks import Ranks, one_rank
from tests.recipes.hugging_face.support.stages import LENGTH
from tests.runs.conftest import NEMO

pytestmark = pytest.mark.slow

SAMPLES = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory, small_store) -> Models:
    return Models(tmp_path_factory.mktemp("models"), small_store)


@pytest.fixture(scope="module")
def samples(models, tmp_path_factory) -> Path:
    """Return a folder of samples whose answers fit in the context of the stage."""
    from data.tokenization.tokenizer import load
    from eval.ruler.samples import make, suite_folder
    from eval.ruler.sources import Sources
    from eval.ruler.tasks import TASKS
    from eval.ruler.tokens import Tokens

    sources, tokens = Sources(None), Tokens(load(str(models.store / "tokenizer")))
    folder = suite_folder(tmp_path_factory.mktemp("ruler"), sources, tokens)
    make(folder, TASKS["niah_single_1"], length=LENGTH, samples=SAMPLES, seed=0, tokens=tokens,
         sources=sources)  # fmt: skip
    return folder


def lines(path: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["prediction"] for row in rows}


@pytest.fixture(scope="module")
def of_one_rank(models, samples) -> dict[str, str]:
    """Return the answers of the stage on one rank."""
    from megatron.core import parallel_state

    from custom_modules.cpu.backend import cpu_backend

    with one_rank(), cpu_backend(force=True):
        parallel_state.initialize_model_parallel()
        answer = by_stage(models)
        found = {sample.id: answer(sample) for sample in asked(samples)}
        parallel_state.destroy_model_parallel()
    assert all(found.values())
    assert len(set(found.values())) == SAMPLES
    return found


def by_stage(models: Models):
    from data.tokenization.tokenizer import load
    from eval.answers import ruler as ruler_answers
    from eval.load_model import load as load_stage
    from eval.ruler.tokens import Tokens

    model = load_stage(models.stage, seq_length=LENGTH)
    tokens = Tokens(load(str(models.store / "tokenizer")))
    return ruler_answers.by_stage(model, tokens, ())


def asked(samples: Path) -> list:
    from eval.ruler.samples import read_samples

    return list(read_samples(next(samples.glob("*.jsonl"))))


def predict(answer, samples: Path, *words: object):
    return answer("ruler", "predict", samples, "--out", "p.jsonl", *words)


@pytest.mark.nightly  # test_generation has two context ranks
def test_two_context_ranks_answer_as_one_rank(models, samples, of_one_rank, answer, tmp_path):
    words = ("--run", models.run, "--store", models.store, "--stage", LENGTH, "--device", "cpu")
    done = predict(answer, samples, *words, "--cp", "2")
    assert done.code == 0, done.err
    assert f"{models.stage.name} answers 3 of 3 samples on 2 ranks" in done.err
    assert lines(tmp_path / "p.jsonl") == of_one_rank
    of_export = predict(answer, samples, "--export", models.export, "--device", "cpu")
    assert "another model or of other samples (weights " in of_export.error()
    assert lines(tmp_path / "p.jsonl") == of_one_rank


def test_an_interrupted_export_resumes_and_answers_as_its_stage(
    models, samples, of_one_rank, answer, tmp_path
):
    out, first = tmp_path / "p.jsonl", next(iter(of_one_rank))
    words = ("--export", models.export, "--device", "cpu")
    done = predict(answer, samples, *words, "--limit", 1, "--ranks", 1)
    assert done.code == 0, done.err
    assert lines(out) == {first: of_one_rank[first]}
    score = shlex.split(done.err.splitlines()[-1])
    assert answer(*score[1:]).code == 0
    assert "2 samples have no prediction" in answer(*score[1:-2]).error()

    with out.open("a") as file:
        file.write('{"id": "cut')
    done = predict(answer, samples, *words)
    assert done.code == 0, done.err
    assert "answers 2 of 3 samples on 2 ranks" in done.err
    assert lines(out) == of_one_rank
    before = out.stat().st_mtime_ns
    assert predict(answer, samples, *words).code == 0  # nothing is left, so no rank starts
    assert out.stat().st_mtime_ns == before


def run_in_chain(port: int, models_of: tuple[str, str, str], files: list[str]) -> str:
    """Answer, score and judge as a rank of a chain's job; return why the gate shut."""
    from eval.gates.chain_ruler import run_ruler
    from recipes.spec.gate import GateShutError

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # a job of the chain joins by itself, as torchrun tells it
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    reason = ""
    try:
        run_ruler(*models_of, files, {"niah_single_1": 1.0, "mean": 0.5})
    except GateShutError as error:
        reason = str(error)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return reason


def test_a_chain_answers_scores_and_judges_a_stage_and_continues(models, samples, of_one_rank):
    from eval.gates.chain_ruler import have_passed
    from eval.ruler.results import read_results, write_result
    from tests.slurm.support.real_slurm import free_ports

    name, [file] = models.stage.name, samples.glob("*.jsonl")
    told = (str(models.run), name, str(models.store / "tokenizer"))

    def reasons() -> list[str]:
        with Ranks(run_in_chain, 2, free_ports(1)[0], told, [str(file)], server=NEMO) as started:
            return started.results(300)

    first, other = reasons()
    folder = models.run / "eval" / "ruler"
    answers = sorted((folder / "answers").rglob("*.jsonl"))
    assert [path.name for path in answers] == ["0.jsonl", "1.jsonl"]
    assert lines(answers[0]) | lines(answers[1]) == of_one_rank
    [kept] = read_results(models.run)
    [row] = kept.scores.scores
    assert (row.task, row.length, row.samples) == ("niah_single_1", LENGTH, SAMPLES)
    assert (kept.model, kept.scores.suite, kept.precision) == (name, "ruler-offline", "fp32")
    assert row.files[0].sha256 == sha256_of([file])[0]
    judged = json.loads((models.run / "eval" / f"{name}.ruler.gate.json").read_text())
    assert [each["measured"] for each in judged["judgements"]] == [row.score / 100] * 2
    assert not judged["open"]
    assert f"the gate after {name} is shut: ruler niah_single_1: score 0.000" in first
    assert not other
    asked = (models.run, name, [file])
    assert not have_passed(*asked, {"mean": 0.5}, None, "cpu")
    assert have_passed(*asked, {}, None, "cpu")
    assert have_passed(*asked, {}, 1, "cpu")  # the scores are of all samples

    more = with_another_length(kept)
    write_result(models.run, more)  # as `ruler score --run` of more files does
    answers[0].write_text('{"id": "cut')  # as an interruption leaves it
    before = answers[1].read_text()
    assert not have_passed(*asked, {}, None, "cpu")
    assert reasons()[0] == first
    assert answers[1].read_text().startswith(before)
    assert lines(answers[0]) | lines(answers[1]) == of_one_rank
    assert read_results(models.run) == [more]
    assert have_passed(*asked, {}, None, "cpu")


def with_another_length(result):
    """Return scores with those of one more length."""
    from eval.ruler.scoring import average

    [row] = result.scores.scores
    longer = replace(row, length=2 * row.length)
    averages = [average(each.length, [each]) for each in (row, longer)]
    return replace(result, scores=replace(result.scores, scores=[row, longer], averages=averages))


def test_an_expected_answer_takes_one_forward(
    models, samples, of_one_rank, megatron_rank, monkeypatch
):
    from eval.answers import generation

    ours = by_stage(models)
    sample = asked(samples)[0]
    whole = of_one_rank[sample.id]
    lengths = []
    forward = generation.next_tokens

    def counted(model, tokens, start, stop):
        lengths.append(len(tokens))
        return forward(model, tokens, start, stop)

    monkeypatch.setattr(generation, "next_tokens", counted)
    right = replace(sample, expected=whole[:3], outputs=(whole[:3].strip(),))
    assert ours(right) == whole[:3]
    assert len(lengths) == 1
    assert ours(replace(right, outputs=("not in it",))) == whole
    assert len(lengths) == 1 + sample.max_new_tokens


def test_a_model_that_cannot_answer_the_samples_is_refused(
    models, samples, answer, tmp_path, tmp_path_factory
):
    from data.tokenization.tokenizer import load
    from eval.ruler.samples import make, suite_folder
    from eval.ruler.sources import Sources
    from eval.ruler.tasks import TASKS
    from eval.ruler.tokens import Tokens
    from tests.eval.ruler.support import byte_level

    stage = ("--run", models.run, "--store", models.store, "--stage", models.stage.name)
    sources = Sources(None)
    folders = []
    for tokenizer in (load(str(models.store / "tokenizer")), byte_level()):
        tokens = Tokens(tokenizer)
        folders.append(suite_folder(tmp_path_factory.mktemp("ruler"), sources, tokens))
        make(folders[-1], TASKS["niah_single_1"], length=2 * LENGTH, samples=1, seed=0,
             tokens=tokens, sources=sources)  # fmt: skip
    longer, of_another = folders
    for words in (stage, ("--export", models.export)):
        assert "was made with another tokenizer than" in predict(answer, of_another, *words).error()
        assert "and the context of" in predict(answer, longer, *words).error()
    assert "has no stage" in predict(answer, samples, *stage[:-1], "unknown").error()
    refused = predict(answer, samples, *stage, "--tp", 3, "--ranks", 3).error()
    assert "8 heads and 4 KV heads are not both divisible by TP 3" in refused
    assert list(tmp_path.iterdir()) == []


def test_an_export_with_a_flipped_bit_does_not_answer(models, samples, answer, tmp_path):
    export = Path(shutil.copytree(models.export, tmp_path / "export"))
    weights = export / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    words = ("--export", export, "--device", "cpu")
    assert f"{weights} is damaged: its SHA-256" in predict(answer, samples, *words).error()
