# SPDX-License-Identifier: Apache-2.0
"""The benchmark of RULER's samples at a tiny size: its page, with and without the peer."""

import importlib.util

import pytest

from benchmarks import ruler_samples
from tests.eval.ruler import support


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    support.byte_level().save(folder)
    return str(folder)


@pytest.fixture
def without_peer(monkeypatch):
    """Hide the peer, and run contestants in this process."""
    find = importlib.util.find_spec

    def found(name, *arguments):
        return None if name == ruler_samples.PEER else find(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", found)

    def here(name, *arguments):
        return ruler_samples.contestant(name, arguments)

    monkeypatch.setattr(ruler_samples, "in_a_process", here)


def test_the_page_has_a_row_for_each_task_and_names_a_missing_peer(
    tokenizer, without_peer, tmp_path, capsys
):
    out = tmp_path / "page.md"
    words = ["--length", "2K", "--samples", "2", "--rounds", "1", "--tasks", "niah_single_1,vt"]
    ruler_samples.main(["--tokenizer", tokenizer, *words, "--out", str(out)])
    page = out.read_text()
    assert capsys.readouterr().out == page
    rows = [line.split(" | ") for line in page.splitlines() if " | ours | " in line]
    assert [row[0].strip("| ") for row in rows] == ["niah_single_1", "vt"]
    assert all(float(row[-2].rstrip("%")) >= 95 for row in rows)
    assert "* vt: lm_eval is not installed" in page


def test_a_contestant_that_fails_says_why():
    said = ruler_samples.contestant("ours", ("vt", "nowhere", 2048, 1))
    assert said.startswith("TokenizerError: the tokenizer cannot be loaded: nowhere")
