# SPDX-License-Identifier: Apache-2.0
"""The alert command: JSON on its input, no shell, a timeout, and no effect on who calls it."""

import json
import shlex
import sys
import time

import pytest

from longhaul.health.alert import Alerts, require_alert


def waited_for(condition, seconds: float = 20.0) -> bool:
    """Return whether something comes to hold within some seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_the_command_gets_each_finding_and_no_shell_reads_it(tmp_path):
    out, said = tmp_path / "out", []
    code = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"
    command = f"{shlex.quote(sys.executable)} -c \"{code}\" '{out}' '$(touch x);'"
    alerts = Alerts(command, said.append)
    for step in (1, 2):
        alerts.send({"kind": "spike", "step": step, "said": "$(touch y); `z`"})
    assert waited_for(lambda: out.exists() and len(out.read_text().splitlines()) == 2)
    assert [json.loads(line)["step"] for line in out.open()] == [1, 2]
    assert said == []


def test_a_command_that_fails_is_said_once():
    said = []
    alerts = Alerts("sh -c 'echo no route to host >&2; exit 3'", said.append)
    for _ in range(3):
        alerts.send({})
    assert waited_for(lambda: alerts._waiting.empty() and bool(said))
    alerts.close()
    (words,) = said
    assert words.endswith("failed: exit code 3; what it printed is not logged; said once")


def test_the_failure_of_a_command_is_said_without_its_words_which_may_be_secret():
    said = []
    for command in ("sh -c 'echo https://user:pa55@host >&2; exit 3; T0KEN'", "no_such/T0 T0KEN"):
        Alerts(command, said.append).send({})
    assert waited_for(lambda: len(said) == 2)
    assert not any("T0KEN" in words or "pa55" in words for words in said)
    assert not any("host" in words for words in said)


def test_the_caller_goes_on_while_the_command_runs(tmp_path):
    said, goes_on = [], tmp_path / "goes_on"
    alerts = Alerts(f"sh -c 'until test -e {goes_on}; do sleep 0.05; done'", said.append)
    alerts.send({"large": "x" * 10_000})
    goes_on.touch()  # were the command waited for, it would be killed before
    alerts.close()
    assert said == []


def test_a_command_that_hangs_is_killed():
    said = []
    alerts = Alerts("sleep 60", said.append, seconds=0.3)
    alerts.send({"large": "x" * 10_000})
    assert waited_for(lambda: bool(said))
    assert "did not end within 0.3 s" in said[0]


def test_a_finding_that_is_larger_than_a_pipe_holds_waits_for_no_command_that_does_not_read(
    tmp_path,
):
    large, said, out = {"documents": ["x" * 1000] * 300}, [], tmp_path / "out"
    hangs = Alerts("sleep 60", said.append, seconds=0.3)
    hangs.send(large)
    assert waited_for(lambda: bool(said))
    assert "did not end within 0.3 s" in said[0]
    outlives = Alerts(f"sh -c 'sleep 2; cat > {out}.part; mv {out}.part {out}'", said.append)
    outlives.send(large)
    outlives.close(0.3)
    assert waited_for(outlives._idle.is_set)
    assert waited_for(out.exists)
    assert json.loads(out.read_text()) == large
    assert len(said) == 1


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_that_writes_much_to_stderr_ends_by_itself(tmp_path, code):
    said, ended = [], tmp_path / "ended"
    script = f"echo no route >&2; head -c 300000 /dev/zero >&2; touch {ended}; exit {code}"
    alerts = Alerts(f"sh -c '{script}'", said.append)
    alerts.send({})
    alerts.close(25.0)
    assert ended.exists()
    assert ["exit code 3" in words for words in said] == [True] * (code == 3)


def test_the_last_alert_is_started_before_the_caller_ends(tmp_path):
    out = tmp_path / "out"
    alerts = Alerts(f"sh -c 'sleep 0.3; cat > {out}'", print)
    alerts.send({"kind": "not_finite"})
    alerts.close()
    assert waited_for(lambda: out.exists() and out.read_text() != "")


def test_the_last_alert_that_fails_is_said_before_the_caller_ends():
    said = []
    alerts = Alerts("sh -c 'sleep 0.3; exit 3'", said.append)
    alerts.send({})
    alerts.close(20.0)
    assert "exit code 3" in said[0]


def test_alerts_behind_a_command_that_hangs_are_started_before_the_caller_ends(tmp_path):
    alerts = Alerts(f"sh -c 'mktemp -p {tmp_path}; exec sleep 20'", print)
    for _ in range(3):
        alerts.send({})
    alerts.close(1.0)
    assert waited_for(lambda: len(list(tmp_path.iterdir())) == 3)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo 'open", "cannot be split into words (No closing quotation)"),
        ("no_such_program --now", "starts no_such_program, which is not an executable file"),
        ("  ", "--alert is empty"),
    ],
)
def test_a_command_that_cannot_start_is_refused_before_training(command, said):
    with pytest.raises(ValueError, match=r"--alert") as why:
        require_alert(command)
    assert said in str(why.value)


def test_no_command_is_no_alert_and_a_job_s_program_may_be_elsewhere():
    require_alert("")
    require_alert("no_such_program", here=False)
    Alerts("", print).send({})
