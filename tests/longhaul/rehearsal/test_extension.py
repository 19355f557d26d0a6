# SPDX-License-Identifier: Apache-2.0
"""What a probe saw, from the files of its run."""

import json
from pathlib import Path

import pytest

from eval.measurements import BaseRecord, ContextGain, RangeMean
from eval.run_folder import Evaluation, append_step, evaluation_path, plain, write_json
from longhaul.rehearsal.extension import (
    PUBLISHED,
    TRAINED,
    UNTRAINED,
    probed,
    sentences,
    table_rows,
)
from recipes.models import CARDS
from recipes.spec.extension_facts import card_facts
from recipes.spec.naming import stage_folder

STAGE, NATIVE, LENGTH = "qwen3_8b_longer_probe_64k", 128, 256


def write(run: Path, name: str, beyond: list[float], stages: tuple[str, ...] | None = None) -> None:
    """Write the evaluation of a model whose documents cost `beyond` more given all of a window."""
    evaluation = Evaluation(
        stage=name,
        seq_length=NATIVE,
        eval_length=LENGTH,
        documents=len(beyond),
        tokens=LENGTH * len(beyond),
        ranges=tuple(
            RangeMean(start, stop, loss=2.0, by_document=tuple(2.0 + cost for cost in beyond))
            for start, stop in ((0, 64), (64, NATIVE), (NATIVE, LENGTH))
        ),
        base=None if stages is None else BaseRecord("models/a", {"method": "default"}, stages),
        context_gain=ContextGain(
            scored=64,
            contexts=(NATIVE, LENGTH),
            loss=(2.0, 2.0),
            standard_error=(0.0, 0.0),
            by_document=tuple((2.0, 2.0 + cost) for cost in beyond),
        ),
    )
    write_json(evaluation_path(run, name), plain(evaluation))


@pytest.fixture
def run(tmp_path) -> Path:
    """Return the folder of a probe of three documents."""
    write(tmp_path, "base", [1.2, 1.3, 1.4], stages=())
    write(tmp_path, "base_with_yarn_x2", [0.4, 0.5, 0.6], stages=(STAGE,))
    write(tmp_path, "base_with_yarn_x4", [9.0, 9.0, 9.0], stages=("another",))
    write(tmp_path, STAGE, [0.2, 0.3, 0.4])
    metrics = stage_folder(tmp_path, STAGE) / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    for step in range(1, 9):
        append_step(metrics, {"step": step, "loss": 3.0 - 0.1 * step, "tokens": 500_000})
    return tmp_path


def seen(run: Path):
    facts = card_facts(CARDS["qwen3_8b"])
    return probed(run, STAGE, start="models/a", native=NATIVE, facts=facts)


def test_the_three_models_are_read_and_judged(run):
    found = seen(run)
    assert list(found.readings) == [PUBLISHED, UNTRAINED, TRAINED]
    assert (found.length, found.documents, found.steps, found.tokens) == (256, 3, 8, 4_000_000)
    assert found.slope[0] == pytest.approx(-0.2)  # nats per million tokens
    assert found.verdict.word == "more tokens, or another base"
    rows = table_rows(found)
    assert [row[0] for row in rows][:3] == ["0-64", "64-128", "128-256 *"]
    assert rows[-1][1:] == ["+1.300 +- 0.058", "+0.500 +- 0.058", "+0.300 +- 0.058"]
    said = "\n".join(sentences(found))
    assert "training: 8 steps of 500,000 tokens, loss 2.900 to 2.200; its last half -0.2 +-" in said
    assert "verdict: more tokens, or another base" in said
    assert "1 of 4 choices" in said
    assert "queries and keys are normalised (QK norm)" in said


def test_the_record_has_every_number_and_is_json(run):
    content = json.loads(json.dumps(plain(seen(run).content())))
    assert content["cost_beyond_native"][UNTRAINED]["mean"] == pytest.approx(0.5)
    assert content["gain_from_context"][TRAINED]["mean"] == pytest.approx(-0.3)
    assert content["verdict"]["fell"]["mean"] == pytest.approx(0.2)
    assert content["facts"][0]["name"] == "qk_norm"


def test_with_one_rotation_the_untrained_model_is_the_published_one(run):
    evaluation_path(run, "base_with_yarn_x2").unlink()
    found = seen(run)
    assert list(found.readings) == [PUBLISHED, TRAINED]
    assert found.verdict.cost_untrained == found.verdict.cost_published


def test_a_missing_evaluation_is_named(run):
    evaluation_path(run, STAGE).unlink()
    with pytest.raises(ValueError, match="no evaluation of the model after the probe; run"):
        seen(run)
