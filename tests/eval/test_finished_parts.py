# SPDX-License-Identifier: Apache-2.0
"""Finished parts of an evaluation are used again by the same code only."""

from eval import finished_parts
from eval.finished_parts import FinishedParts, titles_of
from tests.ranks import one_rank


def test_parts_of_other_code_are_measured_again_whatever_the_commit_says(
    tmp_path, monkeypatch, caplog
):
    module = tmp_path / "tree" / "eval" / "loss.py"
    module.parent.mkdir(parents=True)
    module.write_text("SCALE = 1\n")
    (tmp_path / "run" / "eval").mkdir(parents=True)
    monkeypatch.setattr(finished_parts, "TREE", tmp_path / "tree")

    def measure(value: int, commit: str = "abc and changes") -> int:
        finished_parts.code_sha256.cache_clear()
        parts = FinishedParts(tmp_path / "run", "stage", {"commit": commit, "device": "cpu"})
        return parts.part("loss", int, lambda: value)

    with one_rank():
        assert [measure(1), measure(2)] == [1, 1]
        module.write_text("SCALE = 2\n")
        assert "is of another evaluation" not in caplog.text
        assert [measure(3), measure(4)] == [3, 3]
        assert "stage.partial: measured again, since it is of another evaluation (code)" in (
            caplog.text
        )
        assert measure(5, commit="") == 5
        assert titles_of(tmp_path / "run", "stage") == ["loss"]
    finished_parts.code_sha256.cache_clear()
