# SPDX-License-Identifier: Apache-2.0
"""A stage with a mix trains the same model on any ranks, and after a kill."""

import pytest

pytestmark = pytest.mark.slow

OPTIONS = {
    "documents": "within",
    "steps": 10,
    "sequences": 4,
    "mix": {
        "long_from": "1K",
        "long_share": 0.7,
        "documents_per_row": 8,
        "other_lengths": [{"seq_length": 128, "steps": 0.3}],
    },
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, small_store):
    from tests.runs.conftest import TrainingRun

    run = TrainingRun(tmp_path_factory.mktemp("one"), small_store, ranks=1, layout={}, **OPTIONS)
    return run.finish()


def data_of(step: dict) -> tuple:
    sums = [step[name] for name in ("documents", "sum_squared_lengths", "padding_tokens")]
    return step["rows_by_source"], step.get("seq_length"), step["samples"], sums


def test_the_log_says_what_each_step_was_made_of(one_rank):
    assert [step["samples"] for step in one_rank] == [[4 * n, 4 * n + 3] for n in range(10)]
    assert [step["step"] for step in one_rank if step.get("seq_length") == 128] == [2, 5, 9]
    rows: dict[str, int] = {}
    for step in one_rank:
        assert sum(step["rows_by_source"].values()) == 4
        assert step["work_max_over_mean"] == 1  # one data rank
        assert step["micro_batch_loss_std"] > 0
        assert step["data_wait_seconds"] >= 0
        assert step["documents"] >= 4
        assert step["sum_squared_lengths"] <= 4 * step.get("seq_length", 512) * 512
        assert step["loss_by_source"]["documents"] == pytest.approx(step["loss"], rel=1e-5)
        if "seq_length" not in step:
            for words, count in step["rows_by_source"].items():
                rows[words] = rows.get(words, 0) + count
    assert rows["documents from 1,024"] / sum(rows.values()) == pytest.approx(0.7, abs=0.06)
    assert one_rank[-1]["loss"] < one_rank[0]["loss"] - 0.3


@pytest.mark.nightly  # what ranks are given is tested without training, in tests/data
def test_two_context_ranks_give_the_losses_of_one(training_run, one_rank):
    steps = training_run("two", ranks=2, layout={"cp": 2, "kind": "ring"}, **OPTIONS).finish()
    for ours, reference in zip(steps, one_rank, strict=True):
        assert data_of(ours) == data_of(reference)
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-5), ours["step"]


def test_a_killed_run_goes_on_with_the_rows_that_were_next(training_run, one_rank):
    run = training_run("killed", ranks=2, layout={"dp": 2}, every=5, **OPTIONS)
    run.kill_after(6)
    for ours, reference in zip(run.finish(), one_rank, strict=True):
        assert data_of(ours) == data_of(reference)
        assert ours["loss"] == pytest.approx(reference["loss"], rel=1e-4), ours["step"]
        assert 1 <= ours["work_max_over_mean"] < 1.5
