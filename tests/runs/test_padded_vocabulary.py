# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that TP does not divide, from training over resumes to evaluation and export."""

import json
import shutil
from typing import NamedTuple

import pytest

from tests.ranks import Ranks
from tests.runs.conftest import NEMO, TIMEOUT_SECONDS, TrainingRun
from tests.runs.train import evaluate_on_forked_rank

pytestmark = pytest.mark.slow

CARD = {"vocab": 515}  # 768 rows on two tensor ranks
ALONE: dict[str, object] = {}
PADDED = {"tp": 2, "tiling": {"loss": True, "loss_tile": 200}}


class Runs(NamedTuple):
    """Runs of the same steps: two, two more after a resume, and two more after another."""

    alone: TrainingRun
    there_and_back: TrainingRun
    """Its middle steps are of two tensor ranks."""
    padded: TrainingRun
    """Without the last steps, so its checkpoint has padding."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_store) -> Runs:
    folder = tmp_path_factory.mktemp("padded")

    def train(name: str, layout: dict[str, object], steps: int) -> TrainingRun:
        ranks = layout.get("tp", 1)
        run = TrainingRun(
            folder / name, small_store, layout=layout, card=CARD, ranks=ranks, steps=steps
        )
        run.finish()
        return run

    train("alone", ALONE, 2)
    shutil.copytree(folder / "alone", folder / "padded")
    train("alone", ALONE, 4)
    padded = train("padded", PADDED, 4)
    shutil.copytree(folder / "padded", folder / "back")
    return Runs(train("alone", ALONE, 6), train("back", ALONE, 6), padded)


def test_each_loss_is_that_of_one_rank_after_resumes_with_more_and_with_fewer_rows(runs):
    alone, padded = runs.alone.steps(), runs.there_and_back.steps()
    assert len(padded) == 6
    for ours, right in zip(padded, alone, strict=True):
        assert ours["loss"] == pytest.approx(right["loss"], rel=1e-5), ours["step"]
        assert ours["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4), ours["step"]
    assert padded[-1]["loss"] < padded[0]["loss"]


def test_a_start_and_a_resume_with_another_vocabulary_are_refused_before_any_rank_starts(
    runs, tmp_path
):
    from longhaul.jobs.stage_checks import require_inputs
    from recipes.resolved.stage import ResolvedStage
    from tests.runs.train import recipe

    stage, other = runs.alone.metrics.parent, {"card": {"vocab": CARD["vocab"] + 1}}
    starts = {"run": str(tmp_path), "start": str(stage / "checkpoints")}
    for changed in (starts, {}):
        made = ResolvedStage.of(recipe(runs.alone.options | other | changed))
        with pytest.raises(ValueError, match="vocabulary of 515 and this one has 516"):
            require_inputs(made)
    require_inputs(ResolvedStage.of(recipe(runs.alone.options | starts)))


def test_padding_changes_no_result_of_an_evaluation(runs):
    from eval.run_folder import write_json
    from longhaul.jobs import records
    from recipes.resolved.stage import ResolvedStage
    from tests.runs.train import recipe

    run = runs.padded
    records.record(ResolvedStage.of(recipe(run.options)), start="scratch")
    write_json(run.folder / "run.json", {"ladder": "tiny", "card": "tiny", "stages": ["tiny_512"]})
    found = []
    for ranks in (1, 2):
        options = {
            "run": str(run.folder), "stages": ["tiny_512"], "store": run.options["store"],
            "lengths": [512], "documents": 2, "tensor_parallel": ranks,
        }  # fmt: skip
        output = str(run.folder / "output.log")
        with Ranks(evaluate_on_forked_rank, ranks, options, output, server=NEMO) as started:
            started.results(TIMEOUT_SECONDS)
        result = json.loads((run.folder / "eval" / "tiny_512.json").read_text())
        passkey = result["passkey"]
        found.append((result["by_position"]["loss"], passkey["nats"][0], passkey["hits"][0]))
    alone, padded = found
    assert padded[0] == pytest.approx(alone[0], rel=1e-5)
    assert padded[1] == pytest.approx(alone[1], rel=1e-5)
    assert padded[2] == alone[2]


def test_the_export_has_a_row_for_each_token_alone_bit_for_bit(runs, tmp_path):
    from megatron.core import dist_checkpointing
    from safetensors.torch import load_file

    from recipes.checkpoints.verified import one_rank
    from recipes.hugging_face.export import export
    from recipes.hugging_face.source_checkpoint import trained as checkpoint
    from recipes.resolved import yaml_file
    from tests.runs.train import recipe

    run = runs.padded
    stage = run.metrics.parent
    yaml_file.write(recipe(run.options), stage / "config.yaml")
    source = checkpoint(stage)
    export(source, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["vocab_size"] == CARD["vocab"]
    found = load_file(tmp_path / "exported" / "model.safetensors")["model.embed_tokens.weight"]
    with one_rank():
        saved = dist_checkpointing.load_plain_tensors(str(source.checkpoint / "weights"))
    rows = saved["module.embedding.word_embeddings.weight"]
    assert rows.shape[0] == 768
    assert found.equal(rows[: CARD["vocab"]])
    assert not rows[CARD["vocab"] :].any()
