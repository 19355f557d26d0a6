# SPDX-License-Identifier: Apache-2.0
"""The agents of local jobs, forked from one process that has imported NeMo (`slurm.local_agents`).

nemo-run's local executor says what a job runs, with which variables, and where its output goes;
torchx, which it hands a job to, would start a torchrun for it.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torchx.schedulers.local_scheduler import LocalScheduler, ReplicaParam, _LocalReplica

PROGRAM = Path(__file__).resolve().with_name("local_agents.py")
END_SECONDS = 10.0


class Agent:
    """An agent, with what torchx asks of a `subprocess.Popen`."""

    def __init__(self, program: "subprocess.Popen[bytes]") -> None:
        """Take the program that has been told the job."""
        assert program.stdout is not None
        self._told = program.stdout
        self.returncode: int | None = None
        number = self._told.readline()
        self.pid = int(number or program.pid)  # torchx signals its group
        if not number:
            self.returncode = program.wait()  # its error is in the output of the job

    def poll(self) -> int | None:
        """Return the exit code, None while the agent runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once there is one; raise TimeoutExpired before that."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("torchrun", timeout or 0)
            self.returncode = int(self._told.readline() or -signal.SIGKILL)
        return self.returncode

    def kill(self) -> None:
        """Kill the agent."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Agents:
    """The agents of one command, one after another, and the program that forks them."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._program: subprocess.Popen[bytes] | None = None
        self._agent: Agent | None = None

    @property
    def running(self) -> list[int]:
        """Process numbers of agents that have not ended."""
        return [agent.pid for agent in (self._agent,) if agent and agent.poll() is None]

    def start(self, job: ReplicaParam, variables: dict[str, str]) -> Agent:
        """Start the agent of a job; the first one waits until NeMo has been imported."""
        if self._program is None:
            assert job.stderr is not None
            with open(job.stderr, "ab") as said:
                self._program = subprocess.Popen(
                    [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=said, bufsize=0, env=variables | {"OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )  # fmt: skip
        told = {
            "words": job.args[1:], "variables": variables, "folder": job.cwd or os.getcwd(),
            "stdout": job.stdout, "stderr": job.stderr,
        }  # fmt: skip
        assert self._program.stdin is not None
        with suppress(BrokenPipeError):
            self._program.stdin.write(f"{json.dumps(told)}\n".encode())
        self._agent = Agent(self._program)
        return self._agent

    def start_for(self, scheduler: LocalScheduler) -> None:
        """Have torchx's scheduler start every torchrun here."""
        usual = scheduler._popen

        def start(role: str, replica: int, job: ReplicaParam) -> _LocalReplica:
            if job.args[0] != "torchrun":
                return usual(role, replica, job)
            stdout, stderr, combined = scheduler._get_replica_output_handles(job)
            variables = scheduler._get_replica_env(job)
            agent: Any = self.start(job, variables)
            return _LocalReplica(
                role, replica, agent, stdout=stdout, stderr=stderr, combined=combined,
                error_file=variables.get("TORCHELASTIC_ERROR_FILE", "<N/A>"),
            )  # fmt: skip

        scheduler._popen = start

    def end(self) -> None:
        """End the program, which waits for an agent that still runs."""
        if self._program is not None:
            assert self._program.stdin is not None
            self._program.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._program.wait(END_SECONDS)


@contextmanager
def forked_agents() -> Iterator[Agents | None]:
    """Yield what starts the agents of local jobs; None on a machine with GPUs."""
    import torch

    if torch.cuda.device_count():
        yield None
        return
    agents = Agents()
    try:
        yield agents
    finally:
        agents.end()
