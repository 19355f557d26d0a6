# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a stage on the disk, apart from a training."""

import errno
import json
import shutil
from types import SimpleNamespace

import pytest
from nemo import lightning as nl
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from data.files.sha256 import sha256_of
from recipes.checkpoints.marker import newest_checkpoint, write_marker
from recipes.nemo2 import checkpoint_callback, failed_saves
from recipes.nemo2.checkpoint_callback import StageCheckpoint, _remove_others


def test_earlier_checkpoints_are_removed_also_where_their_marker_is_damaged(tmp_path):
    for step in (2, 4, 6):
        facts = {"step": step, "max_steps": 8, "tokenizer": "t"}
        write_marker(tmp_path / f"step={step}", facts)
    (tmp_path / "step=2" / "longhaul.json").write_text("{")
    (tmp_path / "step=3").mkdir()  # it was never complete
    _remove_others(tmp_path / "step=6")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=3", "step=6"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step=6"


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ({}, [10]),
        ({"keep_last": 3}, [6, 8, 10]),
        ({"keep_every": 4}, [4, 8, 10]),
        ({"keep_last": 2, "keep_every": 6}, [6, 8, 10]),
        ({"keep_last": 9}, [2, 4, 6, 8, 10]),
    ],
)
def test_a_training_keeps_the_last_few_and_those_at_multiples(tmp_path, policy, left):
    for step in (2, 4, 6, 8, 10):
        write_marker(tmp_path / f"step={step}", {"step": step, "max_steps": 10, "tokenizer": "t"})
    _remove_others(tmp_path / "step=10", **policy)
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == left


def test_a_policy_that_keeps_nothing_is_refused():
    with pytest.raises(ValueError, match="keep_last is 0 and keep_every 0; keep_last is at least"):
        StageCheckpoint(keep_last=0)


def test_each_save_gives_freed_memory_back_on_the_ranks(monkeypatch):
    done = []
    monkeypatch.setattr(checkpoint_callback, "give_back", lambda: done.append("given back"))

    class Failing(StageCheckpoint):
        def _try(self, trainer, filepath):
            done.append(filepath)
            self._again = self._attempt < checkpoint_callback.TRIES

    saving = Failing()
    saving.async_save = False  # as NeMo's setup reads it from the strategy
    saving._save_checkpoint(None, "step=2.ckpt")
    assert done == ["step=2.ckpt", "given back"] * 2


def test_freed_memory_is_given_back_at_the_same_steps_on_all_ranks(monkeypatch):
    given = []
    monkeypatch.setattr(checkpoint_callback, "give_back", lambda: given.append(step))
    monkeypatch.setattr(nl.ModelCheckpoint, "on_train_batch_end", lambda *of: None)
    saving = StageCheckpoint()
    saving._last_global_step_saved = 100  # which has given back
    for step in (49, 50, 51, 100, 150):
        saving.on_train_batch_end(SimpleNamespace(global_step=step))
    assert given == [50, 150]


def test_the_reason_of_a_failed_save_is_that_of_the_rank_that_had_it():
    try:
        raise RuntimeError("a worker") from OSError(errno.ENOSPC, "No space left on device")
    except RuntimeError as error:
        of_rank = _wrap_exception(error)
    said, full = failed_saves.reason([CheckpointException("write", {1: of_rank})])
    assert (said, full) == ("OSError: [Errno 28] No space left on device", True)
    assert failed_saves.reason([OSError(errno.EIO, "Input/output error")])[1] is False
    assert failed_saves.reason([]) is None


def test_room_that_the_next_checkpoint_will_not_have_is_told_early(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    facts = {"step": 2, "max_steps": 8, "tokenizer": "t"}
    write_marker(tmp_path / "step=2", facts)
    assert failed_saves.too_full(tmp_path) is None  # its size is not known
    size = {"bytes": 2 * free, "sha256": sha256_of([tmp_path / "step=2" / "longhaul.json"])[0]}
    write_marker(tmp_path / "step=2", {**facts, "files": {"weights/a": size}})
    finding = failed_saves.too_full(tmp_path)
    assert finding.kind == "disk_full"
    failed_saves.tell(tmp_path, 5, finding)
    line = json.loads((tmp_path / "health.jsonl").read_text())
    assert (line["step"], line["kind"]) == (5, "disk_full")
    assert "the last checkpoint is kept until the next is complete" in line["cause"]
    assert failed_saves.failure(tmp_path / "step=4", "a reason", False, "").kind == "disk_full"
