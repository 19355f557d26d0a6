# SPDX-License-Identifier: Apache-2.0
"""The contexts that are read, and how the gain from them is reported."""

from dataclasses import replace

import pytest

from eval.loss.context_gain import contexts, gain_of, scored_tokens
from eval.measurements import ContextGain
from eval.report.context_tables import context_figure, context_sentences
from eval.report.evaluations import Settings, evaluated_with
from eval.run_folder import Evaluation, evaluation_path, load, read_evaluation, write_json
from longhaul.pages.evaluation_tables import show_evaluations
from tests.eval.report.test_page import built, cells, make_run, words

BETTER = gain_of(1024, [2048, 4096, 8192], [[3.0, 2.9, 2.8], [2.0, 1.9, 1.78], [4.0, 3.9, 3.78]])
EVALUATION = Evaluation(stage="tiny_512", seq_length=512, eval_length=512, documents=1, tokens=512)
SAME = gain_of(1024, [4096, 8192], [[3.0, 3.1], [2.0, 1.9], [4.0, 4.01]])


@pytest.mark.parametrize(
    ("length", "scored", "read"),
    [
        (8192, 1024, [2048, 4096, 8192]),
        (12 * 1024, 1024, [2048, 4096, 8192, 12 * 1024]),
        (512, 128, [256, 512]),
        (200, 32, [64, 128, 200]),
    ],
)
def test_contexts_double_up_to_the_whole_window(length, scored, read):
    assert scored_tokens(length) == scored
    assert contexts(length) == read


def test_a_context_that_ranks_cannot_share_is_left_out():
    assert contexts(512, ranks=512) == [512]
    assert contexts(8192, ranks=16) == [2048, 4096, 8192]


@pytest.fixture
def run(tmp_path):
    folder = make_run(tmp_path)
    for name, gain in (("tiny_2k", SAME), ("tiny_8k", BETTER)):
        before = read_evaluation(folder, name)
        write_json(evaluation_path(folder, name), replace(before, context_gain=gain))
    return folder


def test_the_report_has_the_curve_with_its_errors_and_what_the_longer_context_adds(run):
    page = built(run)
    text = words(page)
    assert "Gain from context" in text
    assert "2.787 \N{PLUS-MINUS SIGN} 0.577" in cells(page)
    assert (
        "tiny_8k: reading 8,192 tokens instead of 4,096 lowers the loss of the last 1,024 by "
        "0.113 \N{PLUS-MINUS SIGN} 0.007 nats."
    ) in text
    assert "tiny_2k: " in text
    assert "within two standard errors, so no difference is shown." in text
    [axes] = context_figure(load(run)[1]).axes
    assert [len(line.get_xdata()) for line in axes.lines] == [2, 3]


def test_evaluations_without_it_have_no_such_section(tmp_path):
    assert "Gain from context" not in built(make_run(tmp_path))
    assert context_figure(load(tmp_path)[1]) is None


def test_the_command_prints_what_the_longer_context_adds(run, capsys):
    show_evaluations([read_evaluation(run, "tiny_8k")])
    assert "instead of 4,096 lowers the loss of the last 1,024 by" in capsys.readouterr().out


def test_one_document_has_no_error():
    one = gain_of(128, [256, 512], [[3.0, 3.5]])
    found = replace(EVALUATION, context_gain=one)
    [sentence] = context_sentences([found])
    assert sentence.endswith("raises the loss of the last 128 by 0.500 nats, on one document.")


def test_an_evaluation_without_it_is_made_again_if_it_is_asked_for(run):
    for name, there in (("tiny_512", False), ("tiny_2k", True)):
        latest = read_evaluation(run, name)
        asked = (run, name, Settings.of(latest), latest.step, [512, 2048, 8192])
        assert evaluated_with(*asked)
        assert evaluated_with(*asked, context_gain=True) is there


def test_a_curve_that_does_not_fit_its_contexts_is_refused():
    with pytest.raises(ValueError, match="2 contexts have 1 numbers"):
        ContextGain(128, (256, 512), (1.0,), (0.1, 0.1), ())
