# SPDX-License-Identifier: Apache-2.0
"""A model that does not rotate as configured is refused: in training, at each hand-over and after.

One stage of two steps is trained. Then the facts of its checkpoint are changed, and put back.
"""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest

from recipes.checkpoints.marker import write_marker
from tests.longhaul.test_damaged import changed
from tests.ranks import Ranks
from tests.runs.conftest import NEMO, TIMEOUT_SECONDS
from tests.runs.planted_rotation import refused_on_forked_rank
from tests.runs.train import (
    evaluate_on_forked_rank,
    recipe,
    train_file_on_forked_rank,
    train_on_forked_rank,
)

pytestmark = pytest.mark.slow

STAGE, LENGTH = "tiny_512", 512


class Trained(NamedTuple):
    """A stage of two steps, and how it was trained."""

    stage: Path
    options: dict

    @property
    def marker(self) -> Path:
        return self.stage / "checkpoints" / "step=2" / "longhaul.json"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_store) -> Trained:
    """Return a stage whose layers are divided between two ranks."""
    from longhaul.jobs import records
    from recipes.resolved.stage import ResolvedStage

    run = tmp_path_factory.mktemp("trained")
    options = {"run": str(run), "store": str(small_store), "layout": {"pp": 2}, "steps": 2}
    records.record(ResolvedStage.of(recipe(options)), start="scratch")
    with Ranks(train_on_forked_rank, 2, options, str(run / "log"), server=NEMO) as ranks:
        ranks.results(TIMEOUT_SECONDS)
    return Trained(run / "stages" / STAGE, options)


def stated():
    from custom_modules.rope.config import RopeScaling
    from custom_modules.rope.rotary import stated_rotation
    from recipes.models import TINY

    rope = RopeScaling.yarn(base=10_000, factor=4.0, original_length=128)
    return stated_rotation(rope, TINY.head_dim, LENGTH)


def test_marker_and_run_folder_have_the_rotation_of_the_built_model(trained):
    from custom_modules.rope.in_effect import RotationInEffect

    marker = json.loads(trained.marker.read_text())["rotation"]
    record = json.loads((trained.stage / "rotation.json").read_text())
    assert RotationInEffect.from_dict(marker) == stated()
    assert record == {"in_effect": marker, "start": None, "start_recorded": False}
    assert (
        f"rotation in effect: {stated().describe()}"
        in (trained.stage.parents[1] / "log").read_text()
    )


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("builder", "turns once in 70,666 tokens instead of 141,332"),
        ("tables", r"at position \d+ attention gets cos .* instead of"),
    ],
)
def test_an_ignored_factor_ends_all_ranks_in_the_first_step(tmp_path, small_store, plant, said):
    options = {"run": str(tmp_path), "store": str(small_store), "layout": {"pp": 2}, "steps": 1}
    log = str(tmp_path / "log")
    with Ranks(refused_on_forked_rank, 2, options, log, plant, 1, server=NEMO) as ranks:
        messages = ranks.results(TIMEOUT_SECONDS)
    assert messages[0] == messages[1]
    assert "the built model does not rotate by yarn with base 10000 and factor 4" in messages[0]
    assert messages[0].endswith("(rank 1 of 2); nothing was saved")
    assert re.search(said, messages[0])
    assert not list(tmp_path.rglob("longhaul.json"))


def test_a_stage_that_changes_the_rotation_starts_and_says_so(trained, tmp_path):
    """The new stage draws its frequencies (GeNE), so its tables differ from sample to sample."""
    options = trained.options | {
        "run": str(tmp_path), "start": str(trained.marker.parent), "steps": 1,
        "positions": {"kind": "gene", "target_length": 2048},
    }  # fmt: skip
    with Ranks(train_on_forked_rank, 2, options, str(tmp_path / "log"), server=NEMO) as ranks:
        ranks.results(TIMEOUT_SECONDS)
    log = (tmp_path / "log").read_text()
    assert f"rotation changed from: {stated().describe()}" in log
    assert "could not be compared" not in log
    record = json.loads((tmp_path / "stages" / STAGE / "rotation.json").read_text())
    assert record["start"] == stated().summary()
    assert record["start_recorded"] is True
    assert f"rotation changed to: 16 pairs, longest wavelength {_longest(record)}" in log
    saved = tmp_path / "stages" / STAGE / "checkpoints" / "step=1"
    made = json.loads((saved / "reproduce" / "record.json").read_text())
    assert made["start"] == {
        "path": str(trained.marker.parent), "step": 2,
        "marker_sha256": sha256(trained.marker.read_bytes()).hexdigest(),
    }  # fmt: skip


def _longest(record: dict) -> str:
    return f"{record['in_effect']['longest_wavelength']:,.0f} tokens"


def other_factor(path: Path) -> None:
    """Record the rotation that a model would have had with half of the factor."""
    from custom_modules.rope.config import RopeScaling
    from custom_modules.rope.rotary import stated_rotation

    rope = RopeScaling.yarn(base=10_000, factor=2.0, original_length=128)
    facts = json.loads(path.read_text())
    facts["rotation"] = stated_rotation(rope, 32, LENGTH).to_dict()
    write_marker(path.parent, facts)


def one_frequency(path: Path) -> None:
    facts = json.loads(path.read_text())
    facts["rotation"]["frequencies"][-1] *= 2
    write_marker(path.parent, facts)


def not_recorded(path: Path) -> None:
    facts = json.loads(path.read_text())
    del facts["rotation"]
    write_marker(path.parent, facts)


def commands(trained: Trained) -> dict[str, tuple]:
    """Return the words of each command that opens a checkpoint and needs no ranks for it."""
    return {
        "export": ("export", "--from", trained.stage, "--to", "exported"),
        "resume": ("pretrain", "--yaml", trained.stage / "config.yaml"),
        "hand-over": (
            "pretrain", "--factory", "tiny_2k", f"data.store={trained.options['store']}",
            f"resume.start={trained.stage / 'checkpoints'}",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["export", "resume", "hand-over"])
def test_a_checkpoint_of_another_rotation_than_configured_is_refused(trained, answer, name):
    words = commands(trained)[name]
    with changed(trained.marker, other_factor):
        code, _, err = answer(*words)
    assert code == 2
    assert "was trained with another rotation than its stage configures" in err
    with changed(trained.marker, one_frequency):
        code, _, err = answer(*words)
    assert code == 2
    assert f"the rotation in {trained.marker} is damaged (its sha256 is" in err
    assert not Path("exported").exists()


def test_an_export_records_the_rotation_also_where_the_checkpoint_does_not(trained, answer):
    for change, recorded in ((lambda _: None, True), (not_recorded, False)):
        to = f"exported_{recorded}"
        with changed(trained.marker, change):
            code, _, err = answer("export", "--from", trained.stage, "--to", to)
        assert code == 0, err
        content = json.loads((Path(to) / "longhaul_rotation.json").read_text())
        assert content["in_effect"] == stated().to_dict()
        assert content["recorded_in_training"] is recorded


def test_an_export_that_transformers_would_rotate_otherwise_is_not_written(
    trained, tmp_path, monkeypatch
):
    from recipes.checkpoints.rotation import RotationError
    from recipes.hugging_face import export as exporting
    from recipes.hugging_face.source_checkpoint import trained as source_of

    written = exporting.exported_config

    def without_factor(*args, **kwargs) -> dict:
        config = written(*args, **kwargs)
        return config | {"rope_scaling": config["rope_scaling"] | {"factor": 2.0}}

    monkeypatch.setattr(exporting, "exported_config", without_factor)
    with pytest.raises(RotationError, match="turns once in 70,666 tokens instead of 141,332"):
        exporting.export(source_of(trained.stage), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_checkpoint_is_made_again_with_the_recipe_of_its_record(trained, tmp_path, answer):
    checkpoint = trained.marker.parent
    record = json.loads((checkpoint / "reproduce" / "record.json").read_text())
    assert (record["step"], record["ranks"], record["start"]) == (2, 2, None)
    covered = json.loads(trained.marker.read_text())["files"]
    assert {"reproduce/record.json", "reproduce/config.yaml"} <= set(covered)
    assert answer("checkpoint", "diff", checkpoint).code == 0
    stage = str(trained.stage), str(tmp_path / "again" / "stages" / STAGE)
    recipe = (checkpoint / "reproduce" / "config.yaml").read_text().replace(*stage)
    (tmp_path / "again.yaml").write_text(recipe)
    code, _, err = answer("pretrain", "--yaml", tmp_path / "again.yaml", "--dryrun")
    assert code == 0, err
    log, recipe_file = str(tmp_path / "log"), str(tmp_path / "again.yaml")
    with Ranks(train_file_on_forked_rank, 2, recipe_file, log, server=NEMO) as ranks:
        ranks.results(TIMEOUT_SECONDS)
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (trained.stage, tmp_path / "again" / "stages" / STAGE)
    ]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def test_an_evaluation_states_the_rotation_and_refuses_another(trained, tmp_path):
    run = trained.stage.parents[1]
    options = {
        "run": str(run), "stages": [STAGE], "store": trained.options["store"],
        "lengths": [LENGTH], "documents": 1, "trials": 0,
    }  # fmt: skip
    log = str(tmp_path / "log")
    with (
        changed(trained.marker, other_factor),
        Ranks(evaluate_on_forked_rank, 1, options, log, server=NEMO) as ranks,
        pytest.raises(Exception, match="trained with another rotation than its stage configures"),
    ):
        ranks.results(TIMEOUT_SECONDS)
    with Ranks(evaluate_on_forked_rank, 1, options, log, server=NEMO) as ranks:
        ranks.results(TIMEOUT_SECONDS)
    found = json.loads((run / "eval" / f"{STAGE}.json").read_text())
    assert found["provenance"]["rotation"] == stated().summary()
