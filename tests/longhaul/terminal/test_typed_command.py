# SPDX-License-Identifier: Apache-2.0
"""The command line that files of a run state has no secret of its words."""

import json

import pytest

from longhaul.jobs.origin import origin
from longhaul.run_folder.lock import FILE, in_use

HOOK = "sh -c 'curl -d @- https://hooks.example.com/T0KEN'"


@pytest.mark.parametrize("alert", [("--alert", HOOK), (f"--alert={HOOK}",)])
def test_the_command_of_an_alert_is_neither_in_the_lock_nor_in_a_result(
    tmp_path, monkeypatch, alert
):
    monkeypatch.setattr("sys.argv", ["longhaul", "run", *alert, "--ladder", "a ladder"])
    with in_use(tmp_path):
        command = json.loads((tmp_path / FILE).read_text())["command"]
    assert (
        command == f"longhaul run --alert{'=' if len(alert) == 1 else ' '}... --ladder 'a ladder'"
    )
    assert origin()["command"] == command
