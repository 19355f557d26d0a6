# SPDX-License-Identifier: Apache-2.0
"""The record of findings takes a line that was cut, and its reader only what is whole."""

from recipes.spec.finding import FILE, Finding, RecordTail, append, begins, read, recorded


def finding(step: int) -> Finding:
    """Return a finding that begins at a step."""
    return Finding(kind="straggler", step=step, said="rank 3 is slow", ranks=(3,))


def test_a_line_that_was_cut_does_not_take_the_next_finding_with_it(tmp_path):
    append(tmp_path, [begins(finding(1))])
    tail = RecordTail(tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time": 1780000000.0, "state": "beg')
    assert tail.poll() == []
    append(tmp_path, [begins(finding(2)), begins(finding(3))])
    append(tmp_path, [begins(finding(4))])
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 3, 4]
    assert [line["step"] for line in tail.poll()] == [2, 3, 4]
    assert (tmp_path / FILE).read_text().count("\n") == 5


def test_each_of_two_trackers_that_are_down_is_in_the_record():
    said = [f"{name} does not take metrics from step 1 on" for name in ("wandb", "mlflow")]
    lines = [begins(Finding(kind="tracker_down", step=1, said=one)) for one in said]
    current, past = recorded(lines)
    assert [one.said for one in current] == said
    assert past == []
