# SPDX-License-Identifier: Apache-2.0
"""Stages are compared with the base model document by document, and the page shows both."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from eval.measurements import BaseRecord, ByPosition, Passkey, RangeMean, ShortLoss
from eval.position_bands import bands_of
from eval.report import page, plots
from eval.report.base_plot import against_base
from eval.report.cells import PLUS_MINUS
from eval.report.evaluations import (
    Settings,
    base_record,
    evaluated_with,
    in_words,
    range_rows,
    write_evaluation,
    write_record,
)
from eval.report.gains import (
    difference_rows,
    difference_text,
    gain_sentences,
    gains,
    pairs,
)
from eval.report.passkey_tables import passkey_sentence
from eval.run_folder import (
    Evaluation,
    StageResults,
    base_evaluations,
    base_results,
    evaluation_path,
    load,
    read_evaluation,
    write_json,
)
from eval.uncertainty import standard_error
from longhaul.commands.report import report as show_report
from longhaul.pages.evaluation_tables import show_evaluations
from tests.eval.report.test_page import Page, built, make_run, words

OWN = {"method": "default", "base": 10_000.0}
YARN = {"method": "yarn", "base": 10_000.0, "factor": 4.0, "original_length": 2048}


def means(*rows: tuple[float, ...]) -> tuple[RangeMean, ...]:
    """Return a range of 512 positions for each row of losses by document."""
    return tuple(
        RangeMean(
            512 * at, 512 * at + 512, sum(row) / len(row), 512 * len(row), standard_error(row), row
        )
        for at, row in enumerate(rows)
    )


GRID = Passkey((512, 1024), (0.2,), 1, 5, ((1.0,), (0.0,)), ((0.5,), (2.0,)), 2.3)
BASE = Evaluation(
    stage="base", seq_length=512, eval_length=1024, documents=3, tokens=3 * 1024,
    ranges=means((3.0, 2.0, 4.0), (5.0, 4.0, 6.0)), passkey=GRID, store="one", step=0,
    base=BaseRecord("models/tiny", OWN),
)  # fmt: skip
STRETCHED = replace(
    BASE, stage="base_with_yarn_x4", base=BaseRecord("models/tiny", YARN),
    ranges=means((3.1, 2.1, 4.1), (3.0, 2.0, 4.0)),
)  # fmt: skip
TRAINED = replace(
    BASE, stage="tiny_2k", base=None, step=None,
    ranges=means((3.1, 2.1, 4.1), (2.9, 1.8, 3.9)),
)  # fmt: skip


def test_the_standard_error_is_that_of_a_mean_over_documents():
    assert standard_error([3.0, 2.0, 4.0]) == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(standard_error([3.0]))


def test_a_gain_has_the_error_of_the_differences_which_is_less_than_that_of_the_means():
    near, far = gains(STRETCHED, TRAINED)
    assert (near.difference, near.standard_error) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert (far.start, far.stop) == (512, 1024)
    assert far.difference == pytest.approx(-(0.1 + 0.2 + 0.1) / 3)
    assert far.standard_error == pytest.approx(0.1 / 3)
    assert far.standard_error < TRAINED.ranges[1].standard_error / 10


def test_nothing_is_gained_over_other_documents_or_a_file_without_documents():
    assert gains(replace(BASE, documents=2), TRAINED) == []
    assert gains(replace(BASE, store="two"), TRAINED) == []
    before = replace(BASE, ranges=(RangeMean(0, 512, 3.0, 1536), RangeMean(512, 1024, 5.0, 1536)))
    assert gains(before, TRAINED) == []


def test_a_gain_within_two_standard_errors_is_not_called_one():
    noisy = replace(TRAINED, ranges=means((3.1, 2.1, 4.1), (3.5, 1.4, 4.0)))
    [said] = gain_sentences([STRETCHED, noisy])
    assert said.endswith("within two standard errors, so no difference is shown.")
    [clear] = gain_sentences([STRETCHED, TRAINED])
    assert "is 0.133 +- 0.033 nats below that of base_with_yarn_x4" in clear
    assert "no difference" not in clear


def test_a_stage_is_compared_with_its_own_rotation_and_not_with_that_of_another():
    own = replace(STRETCHED, base=replace(STRETCHED.base, stages=("tiny_2k",)))
    other = replace(
        STRETCHED, stage="base_with_yarn_x8", base=replace(STRETCHED.base, stages=("tiny_8k",))
    )
    found = [(base.stage, stage.stage) for base, stage in pairs([BASE, own, other, TRAINED])]
    assert found == [("base", "tiny_2k"), ("base_with_yarn_x4", "tiny_2k")]


@pytest.fixture
def run(tmp_path):
    """Return a run of which one stage was evaluated, next to the base model with two rotations."""
    folder = make_run(tmp_path / "run")
    for name in ("tiny_512", "tiny_8k"):
        (folder / "eval" / f"{name}.json").unlink()
    for each in (TRAINED, STRETCHED, BASE):
        write_evaluation(folder, each)
    return folder


def test_the_base_models_are_read_with_their_own_rotation_first(run):
    (run / "eval" / "base.gate.json").write_text("{}")
    assert [each.stage for each in base_evaluations(run)] == ["base", "base_with_yarn_x4"]
    assert base_evaluations(run)[1].base == BaseRecord("models/tiny", YARN)
    rows = range_rows(base_evaluations(run))
    assert rows[0].errors == pytest.approx([1 / math.sqrt(3)] * 2)


def test_the_page_shows_the_base_model_and_what_training_adds_to_the_rotation(run):
    text = built(run)
    assert Page(text).open == []
    said = words(text)
    assert "base_with_yarn_x4: the weights of models/tiny, not trained further" in said
    assert "RoPE yarn factor 4, base 10,000" in said
    assert f"is 2.133 {PLUS_MINUS} 0.033 nats below that of base, document by document." in said
    assert "5.00 \N{PLUS-MINUS SIGN} 0.58" in said
    assert (run / "against_base.svg").read_bytes().startswith(b"<?xml")
    assert "nothing to compare it with" not in said


def test_the_figure_has_a_curve_and_a_row_of_cells_for_each(run):
    shown = [*base_results(run), *load(run)[1]]
    losses, passkeys = against_base(shown).axes
    assert len(losses.containers) == 3
    assert [text.get_text() for text in passkeys.texts].count("1/1") == 3
    assert [text.get_text() for text in passkeys.texts].count("0/1") == 3
    assert against_base(load(run)[1]) is None


def test_report_prints_the_base_model_and_the_gains(run, capsys):
    show_report(run=run)
    out = capsys.readouterr().out
    assert "base_with_yarn_x4" in out
    assert "+- 0.033 nats below that of base_with_yarn_x4" in out
    assert "standard errors of these means, over documents: 0.58 to " in out


def test_a_page_without_base_models_has_no_such_section(tmp_path):
    run = make_run(tmp_path)
    assert "Compared with the base model" not in built(run)
    assert not (run / "against_base.svg").exists()


def test_other_prompts_are_another_setting(run):
    other = replace(GRID, depths=(0.7,))
    write_evaluation(run, replace(BASE, passkey=other))
    kept = list((run / "eval" / "other" / "base").glob("*.json"))
    assert len(kept) == 1
    assert json.loads(kept[0].read_text())["passkey"]["depths"] == [0.2]
    write_evaluation(run, BASE)  # the first settings again: what was kept of them goes
    [left] = (run / "eval" / "other" / "base").glob("*.json")
    assert json.loads(left.read_text())["passkey"]["depths"] == [0.7]


def test_differences_of_the_same_documents_are_in_the_report_and_in_the_table(run, capsys):
    rows = difference_rows([BASE, STRETCHED, TRAINED])
    assert [row.name for row in rows] == ["tiny_2k minus base", "tiny_2k minus base_with_yarn_x4"]
    last = rows[1].gains[1]
    assert last.difference == pytest.approx((2.9 + 1.8 + 3.9 - 9) / 3)
    assert last.standard_error == pytest.approx(np.std([0.1, 0.2, 0.1], ddof=1) / 3**0.5)
    assert difference_text(last) == "-0.133 +- 0.033"
    assert difference_text(last, PLUS_MINUS) in words(built(run))
    show_evaluations([BASE, TRAINED, replace(TRAINED, stage="tiny_8k", ranges=BASE.ranges)])
    shown = capsys.readouterr().out
    assert "Differences of the same documents" in shown
    assert "tiny_8k minus tiny_2k" in shown
    assert "+2.133 +- 0.033" in shown
    assert difference_rows([TRAINED, replace(TRAINED, stage="tiny_8k", store="two")]) == []


def test_the_last_stage_is_compared_with_the_first_document_by_document():
    later = replace(TRAINED, stage="tiny_8k", ranges=means((3.1, 2.1, 4.1), (2.8, 1.8, 4.0)))
    said = page.verdict([TRAINED, later])
    assert said.endswith(
        "document by document: within two standard errors, so no difference is shown."
    )
    assert "0.000 +- 0.058 nats" in said


def test_standard_errors_over_documents_are_shaded_where_they_are_known():
    bins = ByPosition((0, 512, 1024), (3.0, 2.5), (1024, 1024))
    shaded = replace(bins, bands=bands_of(bins.edges, [(3.1, 2.6), (2.9, 2.4)]))
    for by_position, count in ((bins, 0), (shaded, 1)):
        stage = StageResults("a", None, (), None, replace(TRAINED, by_position=by_position))
        [axes] = plots.by_position([stage]).axes
        assert len(axes.collections) == count


def test_shares_of_passkeys_have_their_interval(capsys):
    text = passkey_sentence(GRID)
    assert text.startswith("1 of 2 prompts are answered exactly (a share of 9% to 91%, with 95%")
    show_evaluations([BASE])
    assert "100% (21%-100%)" in capsys.readouterr().out


def test_prompts_of_another_version_are_not_compared_and_their_version_is_shown(run):
    now = replace(BASE, passkey=replace(GRID, prompt_version=2))
    assert not Settings.of(now).same_as(Settings.of(BASE))
    assert Settings.of(now).file_name != Settings.of(BASE).file_name
    assert in_words(now, among=(BASE,)).endswith("prompts of version 2")
    assert in_words(BASE, among=(now,)).endswith("prompts of version 1")
    assert "version" not in in_words(now, among=(now, replace(BASE, passkey=None)))
    content = json.loads((run / "eval" / "base.json").read_text())
    del content["passkey"]["prompt_version"]  # as earlier versions wrote it
    (run / "eval" / "base.json").write_text(json.dumps(content))
    assert read_evaluation(run, "base").passkey == GRID


def test_an_evaluation_is_there_only_with_the_same_settings_ranges_and_step(run):
    settings, ends = Settings.of(BASE), [512, 1024]
    assert evaluated_with(run, "base", settings, 0, ends)
    assert not evaluated_with(run, "base", settings, 5, ends)
    assert not evaluated_with(run, "base", settings, 0, [1024])
    assert not evaluated_with(run, "base", replace(settings, documents=4), 0, ends)
    assert not evaluated_with(run, "base", replace(settings, depths=(0.7,)), 0, ends)
    assert not evaluated_with(run, "base_with_ntk_x2", settings, 0, ends)
    (run / "eval" / "base.json").write_text("{")
    assert not evaluated_with(run, "base", settings, 0, ends)


def test_a_base_model_is_compared_with_the_stages_of_earlier_evaluations_too(run):
    name, settings, ends = STRETCHED.stage, Settings.of(STRETCHED), [512, 1024]
    first = STRETCHED.base
    second = replace(first, stages=("tiny_8k",)).with_stages_of(base_record(run, name))
    assert second.stages == (*first.stages, "tiny_8k")
    assert evaluated_with(run, name, settings, STRETCHED.step, ends, second)
    write_record(run, name, second)
    assert base_record(run, name) == second
    other = replace(second, checkpoint="another")
    assert not evaluated_with(run, name, settings, STRETCHED.step, ends, other)
    assert other.with_stages_of(second) == other
    own = replace(first, stages=())
    assert own.with_stages_of(second) == own  # every stage is compared with it


def test_settings_name_the_lengths_of_prompts_that_are_not_those_of_the_documents():
    assert page.in_words(replace(BASE, eval_length=2048)).endswith("1 trial of 512, 1,024 tokens")
    assert page.in_words(BASE) == "3 documents to 1,024 tokens, 1 trial"


def test_the_price_at_short_length_is_told_document_by_document(run, capsys):
    def whole(*losses: float) -> ShortLoss:
        mean = sum(losses) / len(losses)
        return ShortLoss(256, mean, standard_error(losses), mean, losses, (40, 200, 90))

    for each, losses in ((BASE, (2.0, 3.0, 4.0)), (TRAINED, (2.2, 3.25, 4.15))):
        write_json(evaluation_path(run, each.stage), replace(each, short=whole(*losses)))
    text = page.build(run).read_text()
    assert "Price at short length" in text
    assert f"<td>3.200 {PLUS_MINUS} 0.563</td>" in text
    said = (
        f"{TRAINED.stage}: the loss of short documents is +0.200 +- 0.029 nats from base, "
        "document by document."
    )
    assert said.replace("+-", PLUS_MINUS) in text
    show_report(run=run)
    assert said in capsys.readouterr().out
    unlike = replace(whole(2.0, 3.0, 4.0), tokens=(40, 200, 91))
    write_json(evaluation_path(run, "base"), replace(BASE, short=unlike))
    assert "the loss of short documents is" not in page.build(run).read_text()
