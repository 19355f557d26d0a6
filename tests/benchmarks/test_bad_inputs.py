# SPDX-License-Identifier: Apache-2.0
"""Wrong inputs that are refused before NeMo is imported, all in this process."""

from collections import Counter

import pytest

from benchmarks.reliability.bad_inputs import Answered, Case, light, outcomes, problems
from longhaul import cli


def test_every_wrong_input_is_one_sentence_with_its_value_and_a_remedy():
    found = list(outcomes(light(), cli.main))
    assert len(found) >= 300
    wrong = [str(one) for one in found if one.problems]
    assert not wrong, "\n".join(wrong)


def test_every_command_has_wrong_inputs():
    counts = Counter(case.command for case in light())
    assert {name for name in cli.COMMANDS if counts[name] < 5} == set()


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        (Answered(2, "error: x is 3; it is at least 4", "", []), None),
        (Answered(1, "", "Traceback: x is 3; it is at least 4", []), "traceback"),
        (Answered(0, "x is 3; it is at least 4", "", []), "exit code"),
        (Answered(2, "x is 3; it is at least 4", "", ["x.tmp"]), "leftover"),
        (Answered(2, "it is at least 4", "", []), "not named"),
        (Answered(2, "error: 3", "", []), "no remedy"),
    ],
)
def test_an_answer_is_judged(end, problem):
    assert [*problems(Case("batch --seq 3", "3"), end)][:1] == ([problem] if problem else [])
