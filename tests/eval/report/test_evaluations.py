# SPDX-License-Identifier: Apache-2.0
"""Evaluations with other settings are kept beside each other, and only like is compared."""

import json
from dataclasses import replace

import pytest

from eval.measurements import ContextGain, RangeMean, ShortLoss
from eval.provenance import Provenance
from eval.report import page
from eval.report.evaluations import (
    Settings,
    comparable,
    in_words,
    other_evaluations,
    same_settings,
    write_evaluation,
)
from eval.report.how_measured import provenance_rows
from eval.run_folder import (
    Evaluation,
    evaluation_path,
    load,
    read_evaluation,
    stage_folder,
    write_json,
)
from longhaul.commands.report import report as show_report
from tests.eval.report.test_page import NAMES, built, make_run, words

LONG = Evaluation(
    stage="tiny_8k", seq_length=8192, eval_length=8192, documents=24, tokens=24 * 8192,
    ranges=(RangeMean(0, 512, 3.39, 24 * 512),), store="one",
)  # fmt: skip
SHORT = replace(LONG, documents=4, ranges=(RangeMean(0, 512, 3.18, 4 * 512),))


def test_one_with_other_settings_is_kept_and_one_with_the_same_replaced(tmp_path):
    for each in (LONG, SHORT, LONG, replace(LONG, seq_length=512)):
        write_evaluation(tmp_path, each)
    assert read_evaluation(tmp_path, "tiny_8k").seq_length == 512
    assert [each.documents for each in other_evaluations(tmp_path, "tiny_8k")] == [4]


GAIN = ContextGain(8, (16, 32), (2.0, 1.5), (0.1, 0.1), ((2.0, 1.5), (2.0, 1.5)))
BRIEF = ShortLoss(8, 2.0, 0.1, 2.0, (1.9, 2.1), (5, 6))
WITH_GAIN = replace(
    LONG, identity="a", step=60, context_gain=GAIN, short=BRIEF, provenance=Provenance("monday")
)


@pytest.mark.parametrize("between", [(), (SHORT,)], ids=["next", "after one with other settings"])
def test_what_a_later_evaluation_did_not_measure_is_kept(tmp_path, caplog, between):
    later = replace(WITH_GAIN, context_gain=None, provenance=Provenance("tuesday"))
    for each in (WITH_GAIN, *between, later, replace(later, provenance=Provenance("friday"))):
        write_evaluation(tmp_path, each)
    found = read_evaluation(tmp_path, "tiny_8k")
    assert found.context_gain == GAIN
    assert found.kept == {"context_gain": "monday"}
    assert found.provenance.date == "friday"
    assert ("friday (gain from context: monday)") in [
        cell.text for cell in provenance_rows([found])[0].cells
    ]
    assert [each.documents for each in other_evaluations(tmp_path, "tiny_8k")] == [
        each.documents for each in between
    ]
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("earlier", "why"),
    [
        ({"identity": "b"}, "that is of other weights or documents"),
        ({"step": 40}, "that is of other weights or documents"),
        ({"identity": ""}, "that does not state its weights"),
    ],
)
def test_what_was_measured_of_other_weights_is_not_kept_and_told(tmp_path, caplog, earlier, why):
    write_evaluation(tmp_path, replace(WITH_GAIN, **earlier))
    write_evaluation(tmp_path, replace(WITH_GAIN, context_gain=None))
    assert read_evaluation(tmp_path, "tiny_8k").context_gain is None
    said = "tiny_8k: the gain from context of its earlier evaluation of monday is not kept, since"
    assert f"{said} {why}" in caplog.text
    assert "short documents" not in caplog.text


def test_another_store_is_another_setting_and_one_that_is_not_said_is_none(tmp_path):
    write_evaluation(tmp_path, replace(LONG, store=""))
    write_evaluation(tmp_path, LONG)
    assert other_evaluations(tmp_path, "tiny_8k") == []
    write_evaluation(tmp_path, replace(LONG, store="two"))
    assert [each.store for each in other_evaluations(tmp_path, "tiny_8k")] == ["one"]


def test_a_file_from_before_settings_were_said_loads(tmp_path):
    write_json(evaluation_path(tmp_path, "tiny_8k"), LONG)
    content = json.loads(evaluation_path(tmp_path, "tiny_8k").read_text())
    del content["store"], content["step"]
    write_json(evaluation_path(tmp_path, "tiny_8k"), content)
    assert read_evaluation(tmp_path, "tiny_8k").step is None
    assert Settings.of(read_evaluation(tmp_path, "tiny_8k")).same_as(Settings.of(LONG))


def test_a_broken_file_is_replaced(tmp_path):
    evaluation_path(tmp_path, "tiny_8k").parent.mkdir()
    evaluation_path(tmp_path, "tiny_8k").write_text("{")
    write_evaluation(tmp_path, LONG)
    assert read_evaluation(tmp_path, "tiny_8k") == LONG


@pytest.fixture
def reevaluated(tmp_path):
    """Return a run of three stages, the last of which was evaluated again on four documents."""
    run = make_run(tmp_path / "run")
    before = read_evaluation(run, "tiny_8k")
    write_evaluation(run, replace(before, documents=4, ranges=SHORT.ranges))
    return run


def test_stages_are_compared_by_the_settings_that_most_of_them_have(reevaluated):
    stages, others, _ = comparable(reevaluated, load(reevaluated)[1])
    assert [stage.evaluation.documents for stage in stages] == [24, 24, 24]
    assert [(each.stage, each.documents) for each in others] == [("tiny_8k", 4)]
    assert same_settings([stage.evaluation for stage in stages])


def save_checkpoint(run, step):
    """Write the marker of a whole checkpoint of tiny_8k."""
    folder = stage_folder(run, "tiny_8k") / "checkpoints" / f"step={step}"
    write_json(folder / "longhaul.json", {"step": step, "max_steps": 60, "tokenizer": "x"})


def test_what_was_measured_of_an_earlier_checkpoint_is_marked_and_not_chosen(tmp_path):
    run = make_run(tmp_path / "run")
    before = read_evaluation(run, "tiny_8k")
    write_evaluation(run, replace(before, step=20))
    write_evaluation(run, replace(before, step=60, documents=4, ranges=SHORT.ranges))
    stages, others, outdated = comparable(run, load(run)[1])
    assert [stage.evaluation.documents for stage in stages] == [24, 24, 4]
    assert [(each.step, each.documents) for each in others] == [(20, 24)]
    assert outdated == []
    assert "tiny_8k at step 20, 24 documents to 8,192 tokens" in words(built(run))


def test_an_evaluation_of_an_earlier_checkpoint_than_the_newest_is_said_to_be(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    write_evaluation(run, replace(read_evaluation(run, "tiny_8k"), step=20))
    save_checkpoint(run, 20)
    assert comparable(run, load(run)[1]).outdated == []
    save_checkpoint(run, 40)
    said = (
        "tiny_8k was evaluated at step 20 and its newest checkpoint is of step 40: evaluate it "
        "again"
    )
    assert f"{said}." in words(built(run))
    show_report(run=run)
    assert f"note: {said}\n" in capsys.readouterr().err


def test_the_store_is_named_wherever_stores_differ(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    for name in NAMES:
        write_evaluation(run, replace(read_evaluation(run, name), store="stores/one"))
    assert "documents of stores/one" not in words(built(run))
    write_evaluation(run, replace(read_evaluation(run, "tiny_8k"), store="stores/two"))
    text = words(built(run))
    assert "tiny_8k, 24 documents of stores/two to 8,192 tokens, 4 trials: " in text
    assert "24 held-out documents of stores/one, " in text
    show_report(run=run)
    shown = capsys.readouterr().out
    assert "24 documents of stores/one to 8,192 tokens, 4 trials\n" in shown
    assert "tiny_8k, 24 documents of stores/two to " in shown
    kept = next((run / "eval" / "other" / "tiny_8k").iterdir())
    kept.unlink()
    text = words(built(run))
    assert (
        "(24 documents of stores/one to 8,192 tokens, 4 trials; 24 documents of stores/two" in text
    )
    assert "tiny_8k (24 documents of stores/two to" in text
    show_report(run=run)
    assert "documents of stores/two to" in capsys.readouterr().out


def test_the_report_lists_what_was_made_with_other_settings(reevaluated):
    text = words(built(reevaluated))
    assert "tiny_8k, 4 documents to 8,192 tokens, 4 trials: 3.18 at 0-512" in text
    assert "bold and underlined." in text


def test_what_cannot_be_compared_is_not_compared(reevaluated):
    for kept in (reevaluated / "eval" / "other" / "tiny_8k").iterdir():
        kept.unlink()
    text = words(built(reevaluated))
    assert "tiny_512 and tiny_8k were measured with different settings" in text
    assert "tiny_8k (4 documents to 8,192 tokens, 4 trials)" in text
    assert "not here, where settings differ" in text
    assert page.verdict([]) != text
    assert all(name in text for name in NAMES)


def test_documents_of_other_sources_are_another_setting(tmp_path):
    in_turn = replace(LONG, sources=("books", "code") * 12)
    assert not Settings.of(in_turn).same_as(Settings.of(LONG))
    assert "24 documents (of 2 sources in turn) to " in in_words(in_turn)
    write_evaluation(tmp_path, in_turn)
    assert read_evaluation(tmp_path, "tiny_8k").sources == in_turn.sources
    write_evaluation(tmp_path, LONG)
    assert other_evaluations(tmp_path, "tiny_8k") == [in_turn]
