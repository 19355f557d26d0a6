# SPDX-License-Identifier: Apache-2.0
"""A rank that trains asks no other machine for anything."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import TREE

pytestmark = pytest.mark.slow

HERE = ("localhost", "127.0.0.1", "::1", socket.gethostname())


def elsewhere(path: Path) -> list[str]:
    """Return the recorded connections that are not to this machine."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line != "None" and not any(host in line for host in HERE)]


def test_a_rank_connects_to_no_other_machine(training_run, tmp_path):
    path = tmp_path / "connections"
    run = training_run("run", ranks=1, layout={}, steps=1, connections=str(path))
    assert len(run.finish()) == 1
    assert elsewhere(path) == []


def test_a_connection_elsewhere_would_be_seen(tmp_path):
    path = tmp_path / "connections"
    code = (
        "import socket\n"
        "from tests.runs.train import _record_connections\n"
        f"_record_connections({str(path)!r})\n"
        "socket.create_connection(('192.0.2.1', 9), timeout=0.01)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=TREE, stderr=subprocess.DEVNULL, check=False)
    assert elsewhere(path) == ["'192.0.2.1'", "'192.0.2.1'"]
