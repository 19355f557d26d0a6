# SPDX-License-Identifier: Apache-2.0
"""`longhaul rope search` on a small trained stage: a file that a Stage can use, and its scores."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from custom_modules.rope.config import RopeScaling
from custom_modules.rope.rotary import Rotation, inverse_frequencies
from eval.run_folder import write_json
from longhaul.commands import rope_search
from longhaul.run_folder.lock import InUseError, in_use
from recipes.notation import rope_file
from recipes.spec.stage import Cosine, Stage
from tests.longhaul.json_units import not_numbers
from tests.ranks import TREE, Ranks, Server
from tests.runs.train import recipe, train_on_forked_rank
from tests.warm_start import MORE, path_with

STAGE, TRAINED, TARGET, NEEDLES = "tiny_512", 512, 1024, 4
OWN = RopeScaling.yarn(base=10_000, factor=4.0, original_length=128)
COMMAND = """
import typer
from longhaul.commands.rope_search import search

if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(search)
    app()
"""


def slow(test):
    """Mark a test for which a stage is trained and torchrun starts: a minute alone, six if busy."""
    return pytest.mark.slow(pytest.mark.timeout(1200)(test))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_store) -> Path:
    """Return the run folder of a stage that was trained for 20 steps."""
    from longhaul.jobs import records
    from recipes.resolved.stage import ResolvedStage

    run = tmp_path_factory.mktemp("trained")
    options = {"run": str(run), "store": str(small_store), "layout": {"dp": 2}}
    records.record(ResolvedStage.of(recipe(options)), start="scratch")
    server = Server("recipes.pretrain", "nemo_run")
    log = str(run / "train.log")
    with Ranks(train_on_forked_rank, 2, options, log, server=server) as ranks:
        ranks.results(300)
    return run


def search(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own; nemo-run imports its main file on every rank."""
    script = folder / "command.py"
    script.write_text(COMMAND)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    paths = {"PATH": programs, "PYTHONPATH": path_with(TREE)}
    return subprocess.run(
        [sys.executable, script, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | paths | MORE | {"PYTHONWARNINGS": "ignore"},
        check=False,
    )


@pytest.fixture(scope="module")
def searched(trained, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the file found and what the command said."""
    folder = tmp_path_factory.mktemp("searched")
    out = folder / "found.json"
    done = search(
        folder, "--run", trained, "--stage", STAGE, "--target", TARGET, "--out", out,
        "--population", 8, "--iterations", 4, "--documents", 2, "--needles", NEEDLES,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done


@slow
def test_the_factors_found_beat_yarns_on_what_was_searched(searched):
    out, done = searched
    about = json.loads(out.read_text())["about"]
    assert about["score"] < about["start_score"]
    assert about["critical"] is not None
    assert about["history"][-1] == about["score"]
    assert f"{about['start_score']:.4f}  {about['score']:8.4f}" in done.stdout
    assert done.stdout.splitlines()[-1] == str(out)
    assert [*not_numbers(about)] == []


@slow
def test_a_stage_can_use_the_file(searched):
    rope = rope_file.read(searched[0])
    assert (rope.method, rope.factor, rope.original_length) == ("longrope", 2.0, TRAINED)
    before, _ = inverse_frequencies(OWN, 32)
    within, _ = inverse_frequencies(rope, 32, TRAINED)
    torch.testing.assert_close(within, before)
    assert rope.long_factor[-1] >= 2 * rope.short_factor[-1]
    stage = Stage(
        seq_length=TARGET, rope=rope, tokens=TARGET, tokens_per_batch=TARGET, lr=Cosine(peak=1e-3)
    )
    assert stage.rope.reach == TARGET


@slow
def test_the_scores_are_those_of_a_forward_pass_that_forms_all_logits(
    trained, searched, small_store, megatron_rank
):
    from transformers import AutoTokenizer

    from data.store import Manifest
    from data.token_files.held_out import long_documents
    from eval import load_model
    from eval.rope_search.scored_text import needle_texts

    manifest = Manifest.load(small_store)
    tokenizer = AutoTokenizer.from_pretrained(manifest.tokenizer_path)
    documents = list(islice(long_documents(manifest, min_tokens=TARGET), 2))
    texts = needle_texts(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        documents, length=TARGET, needles=NEEDLES,
    )  # fmt: skip
    model = load_model.load(trained / "stages" / STAGE, seq_length=TARGET)
    about = json.loads(searched[0].read_text())["about"]
    yarn = RopeScaling.yarn(base=10_000, factor=2.0, original_length=TRAINED, before=OWN)
    for rope, told in ((yarn, "start_score"), (rope_file.read(searched[0]), "score")):
        model.rotation = Rotation(rope, model.rotation.head_dim)
        nats = []
        for text in texts:
            tokens = torch.from_numpy(text.tokens)
            with torch.no_grad():
                logits = model(tokens[None], torch.arange(TARGET)[None], None)[0]
            surprise = -logits.double().log_softmax(-1)
            nats += [surprise[at - 1, tokens[at]] for at in text.scored.nonzero()[0]]
        assert about[told] == pytest.approx(float(sum(nats) / len(nats)), rel=1e-5)  # fp32


@slow
def test_a_search_that_is_refused_leaves_the_progress_of_the_one_that_runs(
    trained, tmp_path, monkeypatch
):
    folder = trained / "rope_search"
    ours = os.path.dirname(sys.executable)  # as the command itself begins PATH
    monkeypatch.setenv("PATH", os.pathsep.join((ours, os.environ["PATH"])))
    monkeypatch.setattr(rope_search, "require_unused", lambda _: None)  # the other begins after it
    with in_use(folder):
        progress = folder / f"{STAGE}_{TARGET}.jsonl"
        progress.write_text("of the other")
        app = typer.Typer()
        app.command()(rope_search.search)
        words = {
            "--run": trained,
            "--stage": STAGE,
            "--target": TARGET,
            "--out": tmp_path / "a.json",
        }
        result = CliRunner().invoke(app, [str(word) for pair in words.items() for word in pair])
        assert isinstance(result.exception, InUseError), result.exception
        assert progress.read_text() == "of the other"
        progress.unlink()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", 512), "--target is 512 tokens and tiny_512 was trained for 512"),
        (("--stage", "tiny_9k"), "has no stage 'tiny_9k'"),
        (("--score", "words"), "--score is 'words'; expected needle or documents"),
        (("--device", "tpu"), "--device is 'tpu'; expected cpu or cuda"),
        (("--out", "found.yaml"), "--out found.yaml is not a .json file"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value)),
)
def test_a_mistake_is_answered_before_anything_is_loaded(tmp_path, words, said):
    write_json(tmp_path / "stages" / STAGE / "stage.json", {"name": STAGE, "seq_length": TRAINED})
    given = {"--run": tmp_path, "--stage": STAGE, "--target": TARGET, "--out": "found.json"}
    given |= dict([words])
    app = typer.Typer()
    app.command()(rope_search.search)
    result = CliRunner().invoke(app, [str(word) for pair in given.items() for word in pair])
    assert isinstance(result.exception, ValueError)
    assert said in str(result.exception)


def about(**changed: object) -> dict:
    """Return what a search may have written of itself."""
    unseen = {
        "start": {"needle": 1.75, "documents": 3.5},
        "found": {"needle": 1.5, "documents": 3.25},
        "guess": 2.0,
    }
    return {
        "objective": "needle", "trained": 512, "critical_pairs": [4, 8], "critical": 5,
        "evaluations": 1344, "start_score": 1.625, "score": 1.375, "unseen": unseen,
    } | changed  # fmt: skip


def test_what_was_found_is_told_beside_the_start_on_seen_and_unseen_texts():
    assert rope_search.summary(about()) == [
        "1,344 candidates, critical pair 4 to 8; the best: searched from pair 5",
        "nats per token                       YaRN     found",
        "answers to needles, searched on    1.6250    1.3750",
        "answers to needles, unseen         1.7500    1.5000",
        "tokens past 512, unseen            3.5000    3.2500",
    ]


def test_a_stage_that_answers_worse_than_a_guess_is_told_apart():
    scores = {"needle": 2.25, "documents": 3.25}
    unseen = {"start": scores, "found": scores, "guess": 2.0}
    last = rope_search.summary(about(unseen=unseen, critical=None))[-1]
    assert "a guess of the digits costs 2.0000" in last
    assert "note" not in rope_search.summary(about(unseen=unseen, objective="documents"))[-1]
