# SPDX-License-Identifier: Apache-2.0
"""What a stage has read of a store of one source, and when that is not known."""

import shutil
from pathlib import Path

import pytest
import yaml

from data.store import MANIFEST, Manifest
from eval.report.data_mix import mix_as_read
from eval.run_folder import StageRecord, StageResults
from recipes.checkpoints.marker import RECIPE, TRAINED_ON, write_marker
from recipes.resolved.data_read import data_read
from recipes.spec.naming import stage_folder

CONFIG = {"trainer": {"max_steps": 3}, "data": {"seq_length": 64, "global_batch_size": 2}}


def trained(run: Path, store: Path, **facts: object) -> Path:
    """Write the folder of a stage that took two steps on a store."""
    folder = stage_folder(run, "short")
    checkpoint = folder / "checkpoints" / "step=2"
    checkpoint.mkdir(parents=True)
    content = {**CONFIG, "data": {**CONFIG["data"], "store": str(store)}}
    (folder / RECIPE).write_text(yaml.safe_dump(content))
    tokenizer = Manifest.load(store).tokenizer.fingerprint
    write_marker(checkpoint, {"step": 2, "max_steps": 3, "tokenizer": tokenizer, **facts})
    return folder


@pytest.mark.parametrize("stated", [True, False], ids=["stated", "of an earlier version"])
def test_a_stage_reads_whole_sequences_of_the_one_source(tmp_path, small_store, stated):
    facts = {TRAINED_ON: Manifest.load(small_store).train_sha256} if stated else {}
    read = data_read(trained(tmp_path, small_store, **facts))
    (source,) = read.sources
    assert (read.step, source.tokens, source.share_read) == (2, 2 * 2 * 64, 1.0)


def test_another_store_at_the_same_path_is_noticed(tmp_path, small_store):
    store = Path(shutil.copytree(small_store, tmp_path / "store"))
    folder = trained(tmp_path, store, **{TRAINED_ON: Manifest.load(store).train_sha256})
    assert data_read(folder) is not None
    content = (store / MANIFEST).read_text()
    sha256 = Manifest.load(store).train.parts[0].idx.sha256
    content = content.replace(sha256, "0" * 64).replace("own_sha256", "other")
    (store / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match="has other documents than short was trained on"):
        data_read(folder)
    mix = mix_as_read(tmp_path, [StageResults("short", None, (), "a recipe", None)])
    assert mix.stages == ()
    assert mix.unknown[0].startswith("What short read of each source is not known: the store ")


def test_a_mean_of_checkpoints_has_read_nothing_itself(tmp_path, small_store):
    trained(tmp_path, small_store)
    start = "0.75 of runs/a/checkpoints/step=3 and 0.25 of models/b"
    record = StageRecord("short", 64, start=start)
    mix = mix_as_read(tmp_path, [StageResults("short", record, (), "a recipe", None)])
    assert mix.stages == ()
    assert mix.unknown == (f"short is a mean of checkpoints and has read nothing itself: {start}",)
    of_stage = StageResults("short", StageRecord("short", 64, start="tiny_512"), (), "a", None)
    assert len(mix_as_read(tmp_path, [of_stage]).stages) == 1
