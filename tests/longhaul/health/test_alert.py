# SPDX-License-Identifier: Apache-2.0
"""The alert command: JSON on its input, no shell, a timeout, and no effect on who calls it."""

import json
import resource
import shlex
import sys

import psutil
import pytest

from longhaul.health import alert
from longhaul.health.alert import Alerts, require_alert
from tests.conditions import until


def failures(command: str, content: dict) -> list[str]:
    """Return what is said of a command that fails."""
    said: list[str] = []
    alerts = Alerts(command, said.append)
    alerts.send(content)
    until(lambda: alerts.poll() or not alerts._running)
    return said


def test_the_command_gets_each_finding_and_no_shell_reads_it(tmp_path):
    out, said = tmp_path / "out", []
    code = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"
    command = f"{shlex.quote(sys.executable)} -c \"{code}\" '{out}' '$(touch x);'"
    alerts = Alerts(command, said.append)
    for step in (1, 2):
        alerts.send({"kind": "spike", "step": step, "said": "$(touch y); `z`"})
    until(lambda: out.exists() and len(out.read_text().splitlines()) == 2)
    assert {json.loads(line)["step"] for line in out.open()} == {1, 2}
    alerts.close()
    assert said == []


def test_the_failure_of_a_command_is_said_without_its_words_which_may_be_secret():
    (said,) = failures("sh -c 'echo https://user:pa55@host >&2; exit 3; T0KEN'", {})
    assert said.endswith("(sh ...) failed: exit code 3; what it printed is not logged")
    (said,) = failures("sh -c 'kill -SEGV $$'", {})
    assert "signal 11;" in said
    (said,) = failures("no_such/program T0KEN", {})
    assert "(no_such/program ...) failed: exit code 127;" in said


def test_a_command_that_hangs_is_killed_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(alert, "SECONDS", 1.0)
    large = {"documents": ["x" * 1000] * 300}  # a pipe would hold a part of it
    (said,) = failures(f"sh -c 'sleep 600 & echo $! > {tmp_path}/started; sleep 600'", large)
    assert "it was killed after 1 s" in said
    started = int((tmp_path / "started").read_text())
    until(lambda: not psutil.pid_exists(started) or psutil.Process(started).status() == "zombie")


def test_the_caller_goes_on_and_the_command_outlives_it(tmp_path, monkeypatch):
    monkeypatch.setattr(alert, "CLOSING_SECONDS", 0.0)
    said, out, large = [], tmp_path / "out", {"documents": ["x" * 1000] * 300}
    goes_on = tmp_path / "goes_on"
    waits = f"until test -e {goes_on}; do sleep 0.05; done"
    alerts = Alerts(f"sh -c '{waits}; cat > {out}'", said.append)
    alerts.send(large)
    alerts.close()
    goes_on.touch()
    until(lambda: out.exists() and out.read_text().endswith("\n"))
    assert json.loads(out.read_text()) == large
    assert said == []


def test_the_last_alert_that_fails_is_said_before_the_caller_ends(monkeypatch):
    monkeypatch.setattr(alert, "CLOSING_SECONDS", 20.0)
    said = []
    alerts = Alerts("sh -c 'head -c 300000 /dev/zero >&2; sleep 0.3; exit 3'", said.append)
    alerts.send({})
    alerts.close()
    assert "exit code 3" in said[0]


def test_alerts_that_cannot_start_or_do_not_end_hold_no_training_up(monkeypatch):
    monkeypatch.setattr(alert, "CLOSING_SECONDS", 0.2)
    said = []
    alerts = Alerts("sleep 5", said.append)
    for _ in range(4):
        alerts.send({})
    alerts.close()
    assert len(alerts._running) == 4  # they outlive it
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        alerts.send({})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "Too many open files" in said[-1]


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
