# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest

from longhaul.commands.rope import spans

LONGHAUL = Path(sys.executable).parent / "longhaul"


def rope(*words: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([LONGHAUL, "rope", *words], capture_output=True, text=True, check=False)


def test_two_methods_stand_side_by_side_and_are_drawn(tmp_path):
    picture = tmp_path / "plots" / "rope.png"
    done = rope("--card", "tiny", "--method", "linear:factor=4", "--method", "yarn:factor=4",
                "--plot", picture)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trained at 512 tokens; shown at 2,048" in done.stdout
    known = next(line for line in done.stdout.splitlines() if "known angles" in line)
    assert known.split()[-3:] == ["512", "2,048", "2,048"]
    kept = next(line for line in done.stdout.splitlines() if "pairs kept" in line)
    assert "none" in kept
    assert "1.13863" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in picture.parent.iterdir()] == ["rope.png"]


def test_a_hugging_face_folder_is_looked_at_by_what_its_config_says(tmp_path):
    config = {
        "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = rope("--model", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "heads of 32, linear at base 10,000, trained at 2,048 tokens" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "name one model: --card NAME or --model FOLDER"),
        (["--card", "tinny"], "no card is called 'tinny'; did you mean tiny?"),
        (["--model", "nowhere"], "nowhere has no config.json"),
        (["--card", "tiny", "--plot", "rope.jpg"], "rope.jpg is not a .png file"),
        (["--card", "tiny", "--method", "yarn:factor=0.1"], "factor is 0.1"),
    ],
)
def test_a_mistake_is_one_sentence(words, expected):
    done = rope(*words)
    assert done.returncode == 2
    assert f"error: {expected}" in done.stderr or expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recipe_takes_a_method_by_name_and_the_rest_from_its_own_rotation():
    from recipes.resolved.overrides import with_rope
    from recipes.shipped.factories import recipe_named

    made = with_rope(recipe_named("tiny_8k"), "ntk:factor=8").model.config.rope
    assert (made.method, made.base, made.factor, made.original_length) == ("ntk", 40_000, 8, 2048)
    stretched = with_rope(
        recipe_named("tiny_8k"), "linear:factor=2,original_length=8192,before=own"
    )
    assert stretched.model.config.rope.before.method == "yarn"


def test_numbers_are_shown_as_spans():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert spans([]) == "none"
