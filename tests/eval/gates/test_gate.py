# SPDX-License-Identifier: Apache-2.0
"""The gate between stages: each threshold judges what it says, and the judgement is kept."""

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest

from eval.gates.gate import Loss, _at_most, gate_path, has_passed, judge, pass_gate
from eval.loss.context_gain import gain_of
from eval.loss.loss_by_position import position_bands
from eval.measurements import ByPosition, Passkey, ShortLoss
from eval.run_folder import (
    Evaluation,
    evaluation_path,
    write_json,
)
from recipes.spec.gate import Gate, GateShutError, gate_from

EDGES = tuple(range(0, 1025, 64))


def evaluation(name="long", length=1024, losses=None, hits=None) -> Evaluation:
    bins = losses or [3 - 0.05 * at for at in range(16)]
    passkey = hits and Passkey(
        lengths=(512, 1024), depths=(0.0, 1.0), trials=1, digits=5, hits=hits,
        nats=((1.0, 1.0), (1.0, 1.0)), chance_nats=2.3,
    )  # fmt: skip
    return Evaluation(
        stage=name, seq_length=length, eval_length=1024, documents=2, tokens=2048,
        by_position=ByPosition(edges=EDGES, loss=tuple(bins), tokens=(128,) * 16), passkey=passkey,
    )  # fmt: skip


def measured(losses: list[list[float]], name="long", length=1024) -> Evaluation:
    """Return the evaluation of documents with these losses in their 16 buckets, a row each."""
    rows = np.array(losses)
    found = evaluation(name, length, losses=rows.mean(0).tolist())
    return replace(
        found, documents=len(rows),
        by_position=replace(found.by_position, bands=position_bands(rows, [512, 1024])),
    )  # fmt: skip


def documents(rise: float, spread: float, count: int) -> list[list[float]]:
    """Return losses that rise by so much towards the end, and by half `spread` more or less."""
    return [
        [level] * 8 + [level + rise + (-spread if at % 2 else spread) / 2] * 8
        for at, level in enumerate(np.linspace(2, 4, count).tolist())
    ]


def judged(gate: Gate, stage: Evaluation, before: Evaluation | None = None):
    return {one.name: one for one in judge(gate, stage, before)}


def test_a_loss_that_falls_with_position_opens_the_gate():
    found = judged(Gate(), evaluation(), evaluation("short", 512))
    assert set(found) == {"rise", "forgotten"}
    assert all(one.passed for one in found.values())
    # mean of bins 12 to 15 over that of bins 4 to 7
    assert found["rise"].measured == pytest.approx(-0.05 * 8)


def test_a_loss_that_rises_beyond_the_old_border_shuts_it():
    lost = [3.0] * 8 + [4.0] * 8
    found = judged(Gate(rise=0.5), evaluation(losses=lost))
    assert found["rise"].measured == pytest.approx(1.0)
    assert not found["rise"].passed
    assert "0.5 allowed" in found["rise"].said


def test_what_the_stage_before_knew_must_not_be_forgotten():
    worse = [3.3 - 0.05 * at for at in range(16)]
    found = judged(Gate(), evaluation(losses=worse), evaluation("short", 512))
    assert found["forgotten"].measured == pytest.approx(0.3)
    assert not found["forgotten"].passed
    assert "after short" in found["forgotten"].said


def test_passkeys_are_counted_over_the_whole_grid():
    stage = evaluation(hits=((1.0, 1.0), (1.0, 0.0)))
    assert judged(Gate(passkey=0.75), stage)["passkey"].passed
    assert not judged(Gate(passkey=0.8), stage)["passkey"].passed
    assert not judged(Gate(passkey=0.1), evaluation())["passkey"].passed


@pytest.mark.parametrize(
    ("rise", "spread", "state", "passed"),
    [
        (0.05, 0.1, "met", True),
        (0.4, 0.1, "not met", False),
        (0.19, 0.4, "too few documents to tell", True),
        (0.21, 0.4, "too few documents to tell", False),
    ],
)
def test_a_threshold_is_judged_with_the_error_over_documents(rise, spread, state, passed):
    found = judged(Gate(rise=0.2, forgotten=None), measured(documents(rise, spread, 8)))["rise"]
    assert found.measured == pytest.approx(rise)
    assert found.standard_error == pytest.approx(spread / 2 / 7**0.5)  # levels cancel
    assert (found.state, found.passed, found.counted) == (state, passed, 8)
    assert f"{rise:+.3f} +- {found.standard_error:.3f} nats, 0.2 allowed: {state}" in found.said
    assert found.undecided is (found.would_do is not None)
    if found.undecided:
        assert found.would_do > 1000
        assert f"(8 measured, about {found.would_do:,} are needed)" in found.said


def test_what_was_forgotten_is_judged_by_the_same_documents_before_and_after():
    losses = documents(0.0, 0.0, 6)
    worse = [[loss + 0.3 + 0.01 * at for loss in row] for at, row in enumerate(losses)]
    before = measured(losses, "short", 512)
    found = judged(Gate(), measured(worse), before)["forgotten"]
    assert found.state == "not met"
    assert found.standard_error < 0.01  # the documents themselves differ by 2 nats
    others = judged(Gate(), measured(worse), replace(before, store="another"))["forgotten"]
    assert (others.state, others.counted) == ("too few documents to tell", 0)
    assert "does not state the loss of each on the same ones" in others.said


def test_a_single_document_tells_nothing_but_the_measured_value_decides():
    found = judged(Gate(), measured(documents(0.5, 0.0, 1)))["rise"]
    assert (found.state, found.passed) == ("too few documents to tell", False)
    assert "(1 measured)" in found.said


def whole(losses: list[float], tokens: int = 40) -> ShortLoss:
    mean = sum(losses) / len(losses)
    return ShortLoss(256, mean, 0.1, mean, tuple(losses), (tokens,) * len(losses))


def test_short_documents_are_compared_with_those_after_the_stage_before():
    before = replace(evaluation("first", 512), short=whole([2.0, 3.0, 4.0]))
    stage = replace(evaluation(), short=whole([2.1, 3.12, 4.08]))
    assert "short" not in judged(Gate(), stage, before)
    assert "short" not in judged(Gate(short=0.2), stage)
    found = judged(Gate(short=0.2), stage, before)["short"]
    assert (found.state, found.passed, found.counted) == ("met", True, 3)
    assert found.measured == pytest.approx(0.1)
    assert "loss 3.100 of short documents, 3.000 after first: +0.100 +- 0.012" in found.said
    assert judged(Gate(short=0.01), stage, before)["short"].state == "not met"
    others = replace(stage, short=whole([2.1, 3.12, 4.08], tokens=41))
    assert judged(Gate(short=0.2), others, before)["short"].undecided
    found = judged(Gate(short=0.2), stage, evaluation("first", 512))["short"]
    assert not found.passed
    assert "the evaluation of first has no short documents" in found.said


@pytest.mark.parametrize(
    ("least", "missed", "trials", "state", "passed"),
    [
        (0.9, 0, 50, "met", True),
        (0.9, 0, 1, "too few prompts to tell", True),
        (0.9, 40, 50, "not met", False),
        (0.9, 1, 10, "too few prompts to tell", True),
        (0.9, 6, 10, "too few prompts to tell", False),
        (1.0, 0, 1, "met", True),
        (1.0, 1, 10, "not met", False),
    ],
)
def test_a_share_of_passkeys_is_judged_with_its_interval(least, missed, trials, state, passed):
    stage = evaluation(hits=((1.0, 1.0), (1.0, 1 - missed / trials)))
    stage = replace(stage, passkey=replace(stage.passkey, trials=trials))
    found = judged(Gate(passkey=least), stage)["passkey"]
    assert (found.state, found.passed, found.counted) == (state, passed, 4 * trials)
    assert state in found.said
    assert found.undecided is (found.would_do is not None)


def test_a_gate_that_opens_without_being_sure_logs_why(tmp_path, caplog):
    write_json(evaluation_path(tmp_path, "long"), measured(documents(0.19, 0.4, 8)))
    with caplog.at_level(logging.WARNING):
        pass_gate(tmp_path, "long", None, Gate())
    assert "the gate after long opens, but rise: " in caplog.text
    kept = json.loads(gate_path(tmp_path, "long").read_text())
    assert kept["judgements"][0]["state"] == "too few documents to tell"


def test_a_loss_that_is_no_number_does_not_pass():
    assert not judged(Gate(), evaluation(losses=[math.nan] * 16))["rise"].passed


def test_none_leaves_a_judgement_out():
    assert judged(Gate(rise=None, forgotten=None), evaluation()) == {}


def test_the_judgement_is_kept_and_a_shut_gate_says_why(tmp_path):
    write_json(evaluation_path(tmp_path, "long"), evaluation(losses=[3.0] * 8 + [4.0] * 8))
    pass_gate(tmp_path, "long", None, Gate(rise=2.0))
    assert json.loads(gate_path(tmp_path, "long").read_text())["open"] is True
    with pytest.raises(GateShutError, match=r"gate after long is shut: rise: .* 0.1 allowed"):
        pass_gate(tmp_path, "long", None, Gate(rise=0.1))
    kept = json.loads(gate_path(tmp_path, "long").read_text())
    assert kept["open"] is False
    assert kept["judgements"][0]["measured"] == pytest.approx(1.0)


def test_a_gate_with_other_thresholds_has_not_been_passed(tmp_path):
    write_json(evaluation_path(tmp_path, "long"), evaluation())
    assert not has_passed(tmp_path, "long", Gate())
    pass_gate(tmp_path, "long", None, Gate())
    assert has_passed(tmp_path, "long", Gate())
    assert not has_passed(tmp_path, "long", Gate(passkey=0.9))


def test_a_stage_is_not_judged_without_the_evaluation_of_the_one_before(tmp_path):
    write_json(evaluation_path(tmp_path, "long"), evaluation())
    with pytest.raises(ValueError, match=r"short of .* has not been evaluated"):
        pass_gate(tmp_path, "long", "short", Gate())


def test_a_stage_without_an_evaluation_is_not_judged(tmp_path):
    with pytest.raises(ValueError, match="has not been evaluated"):
        pass_gate(tmp_path, "long", None, Gate())


@pytest.mark.parametrize("field", [{"rise": -1}, {"forgotten": -0.1}, {"passkey": 1.5}])
def test_a_threshold_that_judges_nothing_is_refused(field):
    with pytest.raises(ValueError, match=f"gate {next(iter(field))} is"):
        Gate(**field)


def test_thresholds_may_be_said_in_words():
    assert gate_from("passkey=0.9,rise=none", Gate()) == Gate(passkey=0.9, rise=None)
    assert gate_from("", Gate(rise=0.3)) == Gate(rise=0.3)
    with pytest.raises(ValueError, match=r"a gate has no 'pasky'; did you mean passkey\?"):
        gate_from("pasky=1", Gate())
    with pytest.raises(ValueError, match="gate rise is 'x'; it must be a number, or none"):
        gate_from("rise=x", Gate())


def test_documents_that_only_one_evaluation_states_give_no_error_of_the_difference():
    early, late = Loss(2.0, [1.9, 2.1]), Loss(2.3, [])
    found = _at_most("rise", late, early, 0.2, "said")
    assert not found.passed
    assert math.isnan(found.standard_error)
    assert "does not state the loss of each" in found.said


def test_an_evaluation_without_prompts_shuts_the_gate_with_a_sentence():
    (found,) = judge(
        Gate(rise=None, forgotten=None, passkey=0.5), replace(evaluation(), passkey=None), None
    )
    assert not found.passed
    assert "no passkey prompts" in found.said


@pytest.mark.parametrize(
    ("rows", "state", "passed"),
    [
        ([[3.0, 2.9, 2.8], [2.0, 1.9, 1.81], [2.5, 2.4, 2.3]], "met", True),
        ([[3.0, 2.9, 2.99], [2.0, 1.9, 1.99], [2.5, 2.4, 2.49]], "not met", False),
        ([[3.0, 2.9, 2.5], [2.0, 1.9, 2.1]], "too few documents to tell", True),
    ],
)
def test_the_gain_from_context_is_judged_document_by_document(rows, state, passed):
    stage = replace(evaluation(), context_gain=gain_of(256, [512, 768, 1024], rows))
    found = judged(Gate(context_gain=0.1), stage)["context_gain"]
    assert (found.state, found.passed) == (state, passed), found.said
    found = judged(Gate(context_gain=0.1), evaluation())["context_gain"]
    assert not found.passed
    assert "has no gain from context" in found.said


def test_a_gate_file_of_fewer_thresholds_counts_if_the_others_are_not_asked_for(tmp_path):
    write_json(evaluation_path(tmp_path, "long"), evaluation())
    pass_gate(tmp_path, "long", None, Gate(rise=2.0))
    content = json.loads(gate_path(tmp_path, "long").read_text())
    del content["gate"]["context_gain"]
    write_json(gate_path(tmp_path, "long"), content)
    assert has_passed(tmp_path, "long", Gate(rise=2.0))
    assert not has_passed(tmp_path, "long", Gate(rise=2.0, context_gain=0.0))
