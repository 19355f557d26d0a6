# SPDX-License-Identifier: Apache-2.0
"""Thresholds of scores: least and drop are judged with their errors, and no score never passes."""

import json
import math
from dataclasses import replace

import pytest

from eval.gates.scores import judge_scores, pass_scores
from eval.suite_results import Group, Metric, SuiteResult, SuiteSettings, write_result
from recipes.spec.gate import GateShutError, SuiteThreshold


def result(model: str, *metrics: Metric, task="words", samples=100, length=None) -> SuiteResult:
    settings = SuiteSettings(
        task=task, task_sha256="a", length=length, limit=None, longest=512, weights_sha256=model,
        tokenizer_sha256="b", backend="megatron", precision="fp32", harness="0.4",
    )  # fmt: skip
    return SuiteResult(
        model=model, weights=model, step=3, settings=settings, version="1", few_shot=0,
        samples=samples, available=samples, most_tokens=9, metrics=metrics,
    )  # fmt: skip


def share(value: float, samples: int = 100, name: str = "acc") -> Metric:
    """Return a share of samples with the harness's standard error."""
    error = math.sqrt(value * (1 - value) / (samples - 1))
    return Metric(name, "none", value, error, higher_is_better=True)


def judged(threshold, now=(), then=(), groups=()):
    return list(judge_scores([threshold], "long", now, "base", then, groups))


# Wilson's interval of 80 of 100 is 0.711 to 0.867; 1.96^2 * 0.75 * 0.25 / 0.05^2 = 288.1.
@pytest.mark.parametrize(
    ("least", "passed", "state", "would_do"),
    [
        (0.70, True, "met", None),
        (0.75, True, "too few samples to tell", 289),
        (0.85, False, "too few samples to tell", 196),
        (0.90, False, "not met", None),
    ],
)
def test_a_least_share_is_judged_by_wilson_s_interval(least, passed, state, would_do):
    [one] = judged(SuiteThreshold(task="words", least=least), [result("long", share(0.8))])
    assert (one.passed, one.state, one.would_do) == (passed, state, would_do)
    assert one.standard_error == pytest.approx(0.0402015, abs=1e-7)  # sqrt(0.16 / 99)
    assert f"acc 0.800 +- 0.040 of words over 100 samples, at least {least:g}" in one.said


# 0.9 to 0.8 of 100 samples: errors 0.03015 and 0.04020, together 0.05025; Student's t(99) is 1.984.
@pytest.mark.parametrize(
    ("allowed", "passed", "state"),
    [
        (0.25, True, "met"),
        (0.15, True, "too few samples to tell"),
        (0.05, False, "too few samples to tell"),
        (0.0, False, "not met"),
    ],
)
def test_a_drop_is_judged_with_the_errors_of_both_scores(allowed, passed, state):
    [one] = judged(
        SuiteThreshold(task="words", drop=allowed),
        [result("long", share(0.8))],
        [result("base", share(0.9))],
    )
    assert (one.passed, one.state) == (passed, state)
    assert one.measured == pytest.approx(0.1)
    assert one.standard_error == pytest.approx(0.0502519, abs=1e-7)


def test_a_score_that_is_better_if_lower_may_rise_by_the_drop_and_has_no_least():
    def perplexity(model: str, value: float) -> SuiteResult:
        metric = Metric("perplexity", "none", value, 0.5, higher_is_better=False)
        return result(model, metric, samples=50)

    threshold = SuiteThreshold(task="words", least=1, drop=0.5)
    least, drop = judged(threshold, [perplexity("long", 12)], [perplexity("base", 10)])
    assert not least.passed
    assert "better if lower" in least.said
    # 1.5 above what is allowed, and t(49) * sqrt(0.5^2 + 0.5^2) is 1.42
    assert (drop.measured, drop.passed, drop.state) == (2, False, "not met")
    [better] = judged(
        SuiteThreshold(task="words", drop=0.5), [perplexity("long", 8)], [perplexity("base", 10)]
    )
    assert better.passed
    assert better.measured == -2


def test_a_group_has_the_mean_of_its_tasks_and_needs_them_all():
    group = Group("both", ("one", "two"), ("acc",), by_size=True)
    one = result("long", share(0.5, 10), task="one", samples=10)
    two = result("long", share(1.0, 30), task="two", samples=30)
    threshold = SuiteThreshold(task="both", least=0.8)
    [mean] = judged(threshold, [one, two], groups=[group])
    assert mean.measured == pytest.approx(35 / 40)
    assert mean.passed
    [part] = judged(threshold, [two], groups=[group])
    assert not part.passed
    assert part.said == "long has no score of one, which both is the mean of"


LONG = [result("long", share(0.8), share(0.7, name="acc_norm"))]


@pytest.mark.parametrize(
    ("threshold", "now", "then", "said"),
    [
        ({"least": 0}, [], [], "long has no result of words"),
        ({"least": 0, "length": 512}, LONG, [], "long has no result of words at 512 tokens"),
        ({"least": 0, "metric": "f1"}, LONG, [], "no score f1 of words; its scores are acc, acc_n"),
        (
            {"least": 0},
            [result("long", Metric("acc", "none", math.nan))],
            [],
            "a score acc of words that is not a number",
        ),
        ({"drop": 1}, LONG, [], "base, the model before long, has no result of words, so there"),
        (
            {"drop": 1},
            LONG,
            [replace(LONG[0], few_shot=5)],
            "has results under other settings only, so there is no drop to judge",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_missing_result_is_said_and_never_passes(threshold, now, then, said):
    [one] = judged(SuiteThreshold(task="words", **threshold), now, then)
    assert not one.passed
    assert math.isnan(one.measured)
    assert said in one.said


def test_a_threshold_of_another_metric_judges_that_one():
    [one] = judged(SuiteThreshold(task="words", least=0.1, metric="acc_norm,none"), LONG)
    assert one.measured == 0.7


def test_the_judgement_of_a_stage_is_kept_and_a_shut_gate_raises(tmp_path):
    write_result(tmp_path, result("base", share(0.9)))
    pass_scores(tmp_path, "long", "base", [SuiteThreshold(task="words", drop=0.25)], LONG, [])
    path = tmp_path / "eval" / "long.suites.gate.json"
    assert json.loads(path.read_text())["open"] is True
    with pytest.raises(GateShutError, match=r"after long is shut: suites words: .*not met"):
        pass_scores(tmp_path, "long", "base", [SuiteThreshold(task="words", least=0.9)], LONG, [])
    kept = json.loads(path.read_text())
    assert kept["open"] is False
    assert kept["thresholds"][0]["least"] == 0.9
