# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that cannot score a store are refused before any rank is set up."""

import json
from pathlib import Path

import pytest

from data.store import Manifest, StoreError
from eval.loss.impactful_tokens import analyse


def stage(folder: Path, tokenizer: str) -> str:
    """Write the marker of a complete checkpoint."""
    checkpoint = folder / "checkpoints" / "step=3"
    checkpoint.mkdir(parents=True)
    facts = {"step": 3, "max_steps": 3, "tokenizer": tokenizer}
    (checkpoint / "longhaul.json").write_text(json.dumps(facts))
    return str(folder)


@pytest.mark.parametrize("other", ["before", "after"])
def test_a_stage_trained_with_another_tokenizer_than_the_stores_is_refused(
    small_store, tmp_path, other
):
    own = Manifest.load(small_store).tokenizer.fingerprint
    stages = {
        name: stage(tmp_path / name, "another" if name == other else own)
        for name in ("before", "after")
    }
    with pytest.raises(
        StoreError, match=rf"another tokenizer than .*{other} was trained with: .*, not another"
    ):
        analyse(str(small_store), **stages, length=64)


def test_a_stage_without_a_checkpoint_is_refused(small_store, tmp_path):
    own = Manifest.load(small_store).tokenizer.fingerprint
    before = stage(tmp_path / "before", own)
    with pytest.raises(ValueError, match="after has no complete checkpoint"):
        analyse(str(small_store), before, str(tmp_path / "after"), length=64)
