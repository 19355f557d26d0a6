# SPDX-License-Identifier: Apache-2.0
"""Files of the scores of lm-evaluation-harness, and the averages of groups."""

import math
from dataclasses import replace

import pytest

from eval.run_folder import BrokenResultError
from eval.suite_results import (
    Group,
    Metric,
    SuiteResult,
    SuiteSettings,
    group_metrics,
    read_result,
    result_path,
    write_result,
)

SETTINGS = SuiteSettings(
    task="one", task_sha256="t", length=None, limit=None, longest=512, weights_sha256="w",
    tokenizer_sha256="k", backend="megatron", precision="fp32", harness="0.4.13",
)  # fmt: skip


def result(task: str, samples: int, length: int | None, *metrics: Metric) -> SuiteResult:
    settings = replace(SETTINGS, task=task, length=length)
    return SuiteResult("m", "w", 1, settings, "1.0", 0, samples, samples, 10, metrics)


def test_a_group_is_averaged_at_every_length():
    group = Group("ruler", ("a", "b"), ("4096",), by_size=False)
    results = [
        result("a", 10, 8192, Metric("8192", "none", 0.5, 0.3)),
        result("b", 30, 8192, Metric("8192", "none", 1.0, 0.4)),
        result("a", 10, 262_144, Metric("262144", "none", 0.25, math.nan)),
    ]
    at_8k, at_256k = group_metrics([group], results)
    assert (at_8k.length, at_8k.value, at_8k.samples, at_8k.missing) == (8192, 0.75, 40, ())
    assert at_8k.standard_error == pytest.approx(0.25)
    assert (at_256k.length, at_256k.value, at_256k.missing) == (262_144, 0.25, ("b",))


def test_the_error_of_a_group_by_size_is_that_of_the_harness():
    pytest.importorskip("lm_eval")
    from lm_eval.api.metrics import aggregate_subtask_metrics, pooled_sample_stderr

    group = Group("g", ("a", "b"), ("acc",), by_size=True)
    results = [
        result("a", 10, None, Metric("acc", "none", 0.5, 0.3)),
        result("b", 30, None, Metric("acc", "none", 1.0, 0.4)),
    ]
    (found,) = group_metrics([group], results)
    assert found.value == pytest.approx(aggregate_subtask_metrics([0.5, 1.0], [10, 30]))
    assert found.standard_error == pytest.approx(pooled_sample_stderr([0.3, 0.4], [10, 30]))


def test_a_result_is_read_for_the_same_settings_only(tmp_path):
    made = result("g::a b", 10, 8192, Metric("acc", "none", 0.5))
    write_result(tmp_path, made)
    path = result_path(tmp_path, "m", "g::a b", 8192, None)
    assert path.name == "g_a_b_at_8192.json"
    found = read_result(tmp_path, "m", made.settings)
    assert found is not None
    assert math.isnan(found.metrics[0].standard_error)
    assert read_result(tmp_path, "m", replace(made.settings, weights_sha256="other")) is None
    assert read_result(tmp_path, "m", replace(made.settings, limit=10)) is None
    in_chat = replace(made.settings, chat_template="c", other_end_tokens=(7, 9))
    assert read_result(tmp_path, "m", in_chat) is None
    write_result(tmp_path, replace(made, settings=in_chat))
    assert path.with_name("g_a_b_at_8192_chat.json").is_file()
    for settings in (in_chat, made.settings):
        assert read_result(tmp_path, "m", settings).settings == settings
    path.write_text("{")
    with pytest.raises(BrokenResultError, match="is not JSON"):
        read_result(tmp_path, "m", made.settings)
