# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import NamedTuple

import pytest

from longhaul import cli


class Answered(NamedTuple):
    """What the command line left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """Return the one line that a mistake is told in."""
        assert self.code == 2, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]


@pytest.fixture
def answer(monkeypatch, capfd, tmp_path) -> Callable[..., Answered]:
    """Return a function that runs the command line in this process, in a folder of the test's."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):  # the pipe is no terminal
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it for its ranks

    def run(*words: object) -> Answered:
        monkeypatch.setattr("sys.argv", ["longhaul", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Answered(ended.value.code, *capfd.readouterr())

    return run
