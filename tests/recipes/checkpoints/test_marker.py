# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is complete by its marker; one that is damaged is never taken for none."""

import json
from pathlib import Path

import pytest

from custom_modules.checkpoints.index import CheckpointError
from recipes.checkpoints.marker import (
    MARKER,
    checkpoint_facts,
    is_marked,
    newest_checkpoint,
    require_vocabulary,
    start_checkpoint,
    steps_taken,
    write_marker,
)

FACTS = {"step": 4, "max_steps": 8, "tokenizer": "t"}


@pytest.fixture
def stage(tmp_path) -> Path:
    """Return the checkpoints of a stage that stopped at step 4 of 8."""
    for step in (2, 4):
        write_marker(tmp_path / f"step={step}", FACTS | {"step": step})
    (tmp_path / "step=6").mkdir()
    return tmp_path


def test_the_newest_complete_checkpoint_is_found(stage):
    assert newest_checkpoint(stage) == stage / "step=4"
    assert checkpoint_facts(stage / "step=4") == FACTS
    assert steps_taken(stage) == 4
    assert steps_taken(stage / "none") == 0
    assert checkpoint_facts(stage / "step=4" / MARKER) is None
    with pytest.raises(ValueError, match="at step 4 of 8; run that stage to its end"):
        start_checkpoint(stage)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value"),
        (b'{"step": 4, "max_st', "Unterminated string"),
        (b"\xff\xfe", "can't decode byte 0xff"),
        (b"[" * 100_000, "recursion"),
        (b"[4]", "it is not a JSON object"),
        (json.dumps(FACTS | {"step": "4"}).encode(), "'step' is '4'"),
        (json.dumps(FACTS | {"max_steps": None}).encode(), "'max_steps' is None"),
        (json.dumps(FACTS).replace("tokenizer", "tokenixer").encode(), "it has no 'tokenizer'"),
    ],
    ids=["empty", "cut", "bytes", "deep", "list", "string", "null", "a flipped bit"],
)
def test_a_damaged_marker_is_named_and_not_taken_for_none(stage, content, why):
    marker = stage / "step=4" / MARKER
    marker.write_bytes(content)
    for asked in (newest_checkpoint, steps_taken, start_checkpoint):
        with pytest.raises(CheckpointError) as error:
            asked(stage)
        assert str(error.value).startswith(f"{marker} is damaged (")
        assert why in str(error.value)
        assert f"or remove the folder {marker.parent} to train again" in str(error.value)
        assert error.value.path == marker


def test_a_number_that_a_flipped_bit_made_another_is_damage(stage):
    marker = stage / "step=4" / MARKER
    text = marker.read_text()
    marker.write_text(text.replace('"step": 4', '"step": 5'))
    with pytest.raises(CheckpointError, match=r"longhaul\.json is damaged \(its SHA-256 differs"):
        newest_checkpoint(stage)
    marker.write_text(json.dumps(json.loads(text)))  # another layout of the same content
    assert newest_checkpoint(stage) == stage / "step=4"


def test_a_marker_that_cannot_be_read_is_not_taken_for_none(stage):
    marker = stage / "step=4" / MARKER
    marker.unlink()
    marker.mkdir()
    with pytest.raises(CheckpointError, match=r"longhaul\.json cannot be read \(Is a directory"):
        newest_checkpoint(stage)


def test_a_save_or_removal_under_way_hides_the_marker_in_whatever_state_it_is(stage):
    (stage / "step=4" / MARKER).write_text("{")
    assert is_marked(stage / "step=4")
    (stage / "step=4-unfinished").touch()
    assert not is_marked(stage / "step=4")
    assert newest_checkpoint(stage) == stage / "step=2"


def test_a_checkpoint_of_another_vocabulary_is_refused_and_an_earlier_one_is_not(tmp_path):
    write_marker(tmp_path, FACTS | {"vocabulary": 32_003})
    require_vocabulary(tmp_path, 32_003)
    with pytest.raises(ValueError, match="with a vocabulary of 32,003 and this one has 32,000"):
        require_vocabulary(tmp_path, 32_000)
    write_marker(tmp_path, FACTS)
    require_vocabulary(tmp_path, 32_000)
    write_marker(tmp_path, FACTS | {"vocabulary": "32,000"})
    with pytest.raises(CheckpointError, match="'vocabulary' is '32,000'"):
        require_vocabulary(tmp_path, 32_000)
