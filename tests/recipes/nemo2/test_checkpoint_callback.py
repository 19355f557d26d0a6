# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a stage on the disk, apart from a training."""

from recipes.checkpoints.marker import newest_checkpoint, write_marker
from recipes.nemo2.checkpoint_callback import _remove_others


def test_earlier_checkpoints_are_removed_also_where_their_marker_is_damaged(tmp_path):
    for step in (2, 4, 6):
        facts = {"step": step, "max_steps": 8, "tokenizer": "t"}
        write_marker(tmp_path / f"step={step}", facts)
    (tmp_path / "step=2" / "longhaul.json").write_text("{")
    (tmp_path / "step=3").mkdir()  # it was never complete
    _remove_others(tmp_path / "step=6")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=3", "step=6"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step=6"
