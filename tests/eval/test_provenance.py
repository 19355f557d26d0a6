# SPDX-License-Identifier: Apache-2.0
"""Evaluations state how they came about, and the report shows it, also of files that do not."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from eval.model_facts import parameters_of, tokens_seen
from eval.provenance import Provenance
from eval.run_folder import evaluation_at, evaluation_path, read_evaluation, write_json
from longhaul.jobs.origin import origin
from recipes.checkpoints.marker import write_marker
from recipes.spec.naming import stage_folder
from tests.custom_modules.support import llamas
from tests.eval.report.test_page import built, cells, make_run, words
from tests.eval.test_scores_of_ranks import PLAIN

ABOUT = Provenance(
    date="2026-11-25 02:00 UTC", commit=f"{'0123456789' * 4} and changes",
    command="longhaul evaluate --run runs/tiny", seeds={"windows": 0, "passkeys": 3},
    tokenizer="byte-level-bpe 0123abcd", parameters=12_345, tokens_seen=67_890,
    rotation={"sha256": 6 * "0123456789", "longest_wavelength": 141_332.4, "temperature": 1.138629},
)  # fmt: skip


def test_the_report_says_how_each_evaluation_was_measured(tmp_path):
    run = make_run(tmp_path)
    measured = read_evaluation(run, "tiny_2k")
    write_json(
        evaluation_path(run, "tiny_2k"),
        replace(measured, provenance=ABOUT, step=40, store="stores/one"),
    )
    page = built(run)
    assert "How it was measured" in page
    shown = {
        ABOUT.date, "40", "12,345", "67,890", ABOUT.tokenizer, "stores/one",
        "windows 0, passkeys 3", "longest wavelength 141,332, temperature 1.139, 012345678901",
        "012345678901 and changes", ABOUT.command,
    }  # fmt: skip
    assert shown <= cells(page)
    assert read_evaluation(run, "tiny_2k").provenance == ABOUT
    assert read_evaluation(run, "tiny_8k").provenance is None


def test_the_report_says_that_positions_are_those_in_a_window(tmp_path):
    run = make_run(tmp_path)
    text = words(built(run))
    assert "one window, which begins at a random token" in text
    assert "position in the document" not in text
    assert "position in the window" in (run / "report.html").read_text()


def test_tokens_of_training_are_added_up_over_the_stages_of_a_run(tmp_path):
    run = make_run(tmp_path)
    for name, step in (("tiny_512", 240), ("tiny_2k", 30)):
        checkpoint = stage_folder(run, name) / "checkpoints" / f"step={step}"
        checkpoint.mkdir(parents=True)
        write_marker(checkpoint, {"step": step, "max_steps": 240, "tokenizer": "one"})
    assert tokens_seen(run, "tiny_512") == 240 * 8192
    assert tokens_seen(run, "tiny_2k") == (240 + 30) * 8192
    shutil.rmtree(stage_folder(run, "tiny_512"))
    assert tokens_seen(run, "tiny_2k") == 30 * 8192
    assert tokens_seen(run, "tiny_512") is None
    path = stage_folder(run, "tiny_2k") / "stage.json"
    content = json.loads(path.read_text())
    del content["tokens_per_batch"]
    path.write_text(json.dumps(content))
    assert tokens_seen(run, "tiny_2k") is None


def test_the_size_of_a_model_is_that_of_its_weights(megatron_rank):
    weights = llamas.made_up_weights()
    model = llamas.ours(PLAIN, llamas.megatron_weights(weights), torch.float64)
    assert parameters_of(model) == sum(each.numel() for each in weights.values())


def test_the_command_and_the_commit_of_a_process_are_stated(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/bin/longhaul", "evaluate", "--run", "runs/my run"])
    assert origin()["command"] == "longhaul evaluate --run 'runs/my run'"
    assert set(origin()) == {"command", "commit"}


@pytest.mark.parametrize("name", ["provenance", "passkey", "by_position"])
def test_a_file_without_a_part_is_read(tmp_path, name):
    run = make_run(tmp_path)
    path = evaluation_path(run, "tiny_8k")
    content = json.loads(path.read_text())
    content.pop(name, None)
    path.write_text(json.dumps(content))
    assert getattr(evaluation_at(path), name) is None
    assert "tiny_8k" in built(run)
