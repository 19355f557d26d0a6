# SPDX-License-Identifier: Apache-2.0
"""The base model of a run is evaluated as its stages are, with its own rotation and with theirs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from custom_modules.rope.config import RopeScaling
from data.store import Manifest
from eval.finished_parts import partial_path, titles_of
from eval.run_folder import base_evaluations, read_evaluation, read_stage
from recipes.checkpoints.marker import (
    TRAINED_ON,
    checkpoint_facts,
    newest_checkpoint,
    write_marker,
)
from tests.ranks import Ranks
from tests.runs.conftest import NEMO, TIMEOUT_SECONDS, TrainingRun
from tests.runs.train import evaluate_on_forked_rank

pytestmark = pytest.mark.slow

STAGE = "tiny_512"
OWN = RopeScaling.base_change(10_000)


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_store):
    """Return a stage of two steps whose recipe says that it started from its own checkpoint.

    The checkpoint it started from is said to have another rotation, so the base model with the
    rotation of the stage is the stage itself.
    """
    from longhaul.jobs import records
    from recipes.resolved.stage import ResolvedStage
    from tests.runs.train import recipe

    made = TrainingRun(
        tmp_path_factory.mktemp("base") / "run", small_store, ranks=2, layout={"cp": 2}, steps=2
    )
    made.finish()
    start = made.folder / "start"
    shutil.copytree(made.folder / "stages" / STAGE / "checkpoints" / "step=2", start)
    marker = json.loads((start / "longhaul.json").read_text())
    del marker["rotation"]  # as of an import
    marker |= {"rope": OWN.to_dict(), "seq_length": 128}
    write_marker(start, marker)
    records.record(ResolvedStage.of(recipe(made.options | {"start": str(start)})), start=str(start))
    return made


def evaluate_until_the_second_row(options: dict[str, object], output: str) -> None:
    """Evaluate on a rank that fails at the first passkey prompt of 512 tokens."""
    from eval.answers import passkey_grid

    def score(model, prompt):
        if len(prompt.tokens) == 512:
            raise RuntimeError("stopped at a prompt")
        return passkey_score(model, prompt)

    passkey_score = passkey_grid.score
    with mock.patch.object(passkey_grid, "score", score):
        evaluate_on_forked_rank(options, output)


def evaluate_only_the_second_row(options: dict[str, object], output: str) -> None:
    """Evaluate on a rank that fails if it measures what the first one has measured."""
    from eval import evaluate as evaluation
    from eval.answers import passkey_grid

    def score(model, prompt):
        assert len(prompt.tokens) == 512
        return passkey_score(model, prompt)

    passkey_score = passkey_grid.score
    again = mock.Mock(side_effect=AssertionError("measured again"))
    with (
        mock.patch.object(passkey_grid, "score", score),
        mock.patch.object(evaluation, "loss_by_position", again),
        mock.patch.object(evaluation, "short_loss", again),
        mock.patch.object(evaluation.context_gains, "context_gain", again),
    ):
        evaluate_on_forked_rank(options, output)


def evaluate(
    run: TrainingRun, on_rank: Callable[..., None] = evaluate_on_forked_rank, **choices: object
) -> None:
    options = {
        "run": str(run.folder), "stages": [STAGE], "store": run.options["store"],
        "lengths": [128, 512], "documents": 3, "trials": 1, "base": True,
        "passkey_lengths": [256, 512], "depths": [0.3], "context_gain": True, "command": "typed",
        **choices,
    }  # fmt: skip
    with Ranks(on_rank, 2, options, str(run.folder / "output.log"), server=NEMO) as ranks:
        ranks.results(TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def evaluated(run):
    """Return the run with its evaluations: the base model, with its stage's rotation, the stage."""
    evaluate(run)
    return run, [*base_evaluations(run.folder), read_evaluation(run.folder, STAGE)]


def test_the_base_model_with_the_rotation_of_the_stage_has_the_losses_of_its_weights(evaluated):
    _, (base, stretched, stage) = evaluated
    assert (base.stage, stretched.stage) == ("base", "base_with_yarn_x4")
    assert stretched.by_position == stage.by_position
    assert stretched.passkey == stage.passkey
    assert base.by_position.loss != stage.by_position.loss
    assert base.base.rope["method"] == "default"
    assert stretched.base.rope["method"] == "yarn"
    assert (base.seq_length, stage.seq_length) == (128, 512)
    assert (stage.passkey.lengths, stage.passkey.depths) == ((256, 512), (0.3,))


def test_a_mean_is_that_of_its_documents_and_of_its_buckets(evaluated):
    for each in evaluated[1]:
        for mean in each.ranges:
            assert np.mean(mean.by_document) == pytest.approx(mean.loss)
            inside = each.by_position.loss[mean.start // 64 : mean.stop // 64]
            assert np.mean(inside) == pytest.approx(mean.loss)
            error = np.std(mean.by_document, ddof=1) / 3**0.5
            assert mean.standard_error == pytest.approx(error)


def test_the_whole_window_gives_its_last_tokens_the_loss_of_their_positions(evaluated):
    for each in evaluated[1]:
        gain, bands = each.context_gain, each.by_position.bands
        assert (gain.scored, gain.contexts) == (128, (256, 512))
        last = np.array(bands.of_documents(384, 512))  # of windows with one token more before them
        assert np.array(gain.by_document)[:, 1] == pytest.approx(last, abs=0.02)
        assert np.array(gain.by_document)[:, 1] != pytest.approx(last, abs=1e-9)


def test_evaluations_say_how_they_came_about(evaluated):
    run, (base, stretched, stage) = evaluated
    assert base.provenance.tokens_seen == 0
    assert len({"", base.identity, stretched.identity, stage.identity}) == 4
    assert stage.provenance.tokens_seen == 2 * read_stage(run.folder, STAGE).tokens_per_batch
    assert stage.provenance.parameters > 100_000
    assert stage.provenance.command == "typed"
    assert stage.provenance.seeds == {"windows": 0, "passkeys": 0}
    assert stage.passkey.prompt_version == 2


def test_a_checkpoint_states_the_documents_that_it_was_trained_on(run):
    checkpoint = newest_checkpoint(run.folder / "stages" / STAGE / "checkpoints")
    sha256 = Manifest.load(run.options["store"]).train_sha256
    assert checkpoint_facts(checkpoint)[TRAINED_ON] == sha256


def test_only_what_is_missing_is_evaluated(evaluated):
    run, found = evaluated
    files = {name: run.folder / "eval" / f"{name}.json" for name in ("base", STAGE)}
    files["base"].unlink()
    before = files[STAGE].stat().st_mtime_ns
    evaluate(run, missing=True)
    assert files[STAGE].stat().st_mtime_ns == before
    assert base_evaluations(run.folder)[0] == found[0]


def test_an_interrupted_evaluation_continues_with_the_parts_that_are_left(evaluated):
    run, (*_, whole) = evaluated
    result = run.folder / "eval" / f"{STAGE}.json"
    partial = partial_path(run.folder, STAGE)
    result.unlink()
    partial.write_text('{"identity": {"settings": "others"}, "parts": {"loss by position": [[1]]}}')
    with pytest.raises(RuntimeError, match="stopped at a prompt"):
        evaluate(run, evaluate_until_the_second_row, base=False)
    assert not result.exists()
    assert titles_of(run.folder, STAGE) == [
        "number of parameters", "rotation in effect", "loss by position", "gain from context",
        "passkeys of 256 tokens",
    ]  # fmt: skip
    evaluate(run, evaluate_only_the_second_row, base=False)
    found = read_evaluation(run.folder, STAGE)
    assert replace(found, provenance=whole.provenance) == whole
    assert found.identity == whole.identity
    assert not partial.exists()
    said = (run.folder / "output.log").read_text()
    assert said.count(f"{STAGE}: loss by position: there already") == 1


def test_the_logits_of_a_few_positions_are_those_of_the_whole_prompt(run, megatron_rank):
    from eval import load_model
    from eval.answers.generation import logits_only_of

    model = load_model.load(run.folder / "stages" / STAGE, seq_length=256)
    tokens = torch.randint(0, 500, (1, 256), generator=torch.Generator().manual_seed(0))
    positions, asked = torch.arange(256)[None], torch.zeros(256, dtype=torch.bool)
    asked[[7, 250, 251]] = True
    with torch.no_grad():
        whole = model(tokens, positions, None)
        with logits_only_of(model, asked):
            few = model(tokens, positions, None)
        again = model(tokens, positions, None)
    torch.testing.assert_close(few[0], whole[0, asked], rtol=1e-5, atol=1e-5)
    assert few.shape[1] == 3
    assert again.shape == whole.shape


def test_a_run_without_a_base_model_says_so(run, tmp_path):
    from eval.base_model import base_models
    from longhaul.jobs import records
    from recipes.resolved.stage import ResolvedStage
    from tests.runs.train import recipe

    options = run.options | {"run": str(tmp_path)}
    records.record(ResolvedStage.of(recipe(options)), start="scratch")
    with pytest.raises(ValueError, match=f"{STAGE} started from random weights, so .* no base"):
        base_models(tmp_path, [STAGE])
    gone = options | {"start": str(tmp_path / "gone")}
    records.record(ResolvedStage.of(recipe(gone)), start="gone")
    with pytest.raises(ValueError, match="gone holds no complete checkpoint"):
        base_models(tmp_path, [STAGE])


def test_a_length_that_no_held_out_document_has_is_refused_before_ranks_start(run, answer):
    words = ("evaluate", "--run", run.folder, "--base")
    said = answer(*words, "--lengths", "128,1M").error()
    assert run.options["store"] in said
    assert "1,048,576" in said
    assert "1,048,576" in answer(*words, "--passkeys", "1M").error()
    assert "--depths is '2'" in answer(*words, "--depths", "2").error()


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        (OWN, "rope_base_10000"),
        (RopeScaling.base_change(8e6), "rope_base_8e06"),
        (RopeScaling.yarn(base=10_000, factor=2.0, original_length=128), "yarn_x2"),
        (RopeScaling(method="ntk", base=10_000, factor=1.5, original_length=128), "ntk_x1.5"),
    ],
)
def test_a_rotation_in_a_word_names_a_file(rope, word):
    from eval.base_model import rope_word

    assert rope_word(rope) == word


def test_stages_with_other_rotations_of_one_word_have_names_of_their_own(run, monkeypatch):
    from eval import base_model
    from recipes.resolved import yaml_file

    first = yaml_file.read(run.folder / "stages" / STAGE / "config.yaml")
    second = yaml_file.read(run.folder / "stages" / STAGE / "config.yaml")
    second.model.config.rope.beta_fast = 16.0
    recipes = {STAGE: first, "tiny_1k": second, "tiny_2k": first}
    monkeypatch.setattr(base_model.yaml_file, "read", lambda path: recipes[path.parent.name])
    models = base_model.base_models(run.folder, list(recipes))
    assert [(model.name, model.stages) for model in models] == [
        ("base", ()),
        ("base_with_yarn_x4", (STAGE, "tiny_2k")),
        ("base_with_yarn_x4_of_512", ("tiny_1k",)),
    ]


@pytest.mark.parametrize(
    ("lengths", "ranks", "of_prompt"),
    [
        ([4, 8, 12, 16], 2, [1, 1, 1, 0]),
        ([4, 4, 4, 4], 2, [0, 1, 0, 1]),
        ([4, 8], 1, [0, 0]),
        ([8], 4, [0]),
    ],
)
def test_the_longest_prompts_go_to_the_ranks_with_the_least_to_do(lengths, ranks, of_prompt):
    from eval.distributed import shared_out

    assert shared_out(lengths, ranks) == of_prompt
