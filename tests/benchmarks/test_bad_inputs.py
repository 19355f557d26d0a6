# SPDX-License-Identifier: Apache-2.0
"""Wrong inputs that are refused before NeMo is imported, all in this process."""

from collections import Counter

import pytest

from benchmarks.reliability.bad_inputs import (
    SHORTEST,
    Answered,
    Case,
    light,
    outcomes,
    problems,
    with_nemo,
)
from longhaul import cli


def test_every_wrong_input_is_one_sentence_with_its_value_and_a_remedy():
    found = list(outcomes(light(), cli.main))
    assert len(found) >= 300
    wrong = [str(one) for one in found if one.problems]
    assert not wrong, "\n".join(wrong)


def test_every_command_has_wrong_inputs():
    counts = Counter(case.command for case in light())
    assert {name for name in cli.COMMANDS if counts[name] < 5} == set()


def test_what_an_answer_has_to_name_is_long_enough_to_be_found_by_its_name_alone():
    cases = [*light(), *with_nemo()]
    assert [case for case in cases if len(case.named) < SHORTEST] == []


USAGE = (
    "Usage: longhaul run [OPTIONS]\nTry 'longhaul run -h' for help.\n"
    "\N{BOX DRAWINGS LIGHT HORIZONTAL} Error \N{BOX DRAWINGS LIGHT HORIZONTAL}\n{said}\n"
)


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        (Answered(2, "error: seq is 300; it is at least 4", "", []), None),
        (Answered(2, "note: one rank\nerror: seq is 300; name another", "", []), None),
        (Answered(2, USAGE.format(said="'--seq': 300 is not in the range x>=512."), "", []), None),
        (Answered(1, "", "Traceback: seq is 300; it is at least 4", []), "traceback"),
        (Answered(0, "error: seq is 300; it is at least 4", "", []), "exit code"),
        (Answered(2, "error: seq is 300; it is at least 4", "", ["x.tmp"]), "leftover"),
        (Answered(2, "error: it is at least 4", "", []), "not named"),
        (Answered(2, "error: seq is 3000; it is at least 4", "", []), "not named"),
        (Answered(2, "seq is 300\nerror: it is at least 4", "", []), "not named"),
        (Answered(2, USAGE.replace("run", "seq300 300").format(said="No such command"), "", []),
         "not named"),
        (Answered(2, "error: 300 must not run with use of the name that is set", "", []),
         "no remedy"),
        (Answered(2, USAGE.format(said="300 is wrong"), "", []), "no remedy"),
    ],
)  # fmt: skip
def test_an_answer_is_judged(end, problem):
    assert [*problems(Case("batch --seq 300", "300"), end)][:1] == ([problem] if problem else [])
