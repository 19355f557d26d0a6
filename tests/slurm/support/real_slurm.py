# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of two nodes on this machine, with accounting, for the time of the tests.

munged, MariaDB, slurmdbd, slurmctld and a slurmd for each of the nodes n1 and n2, all in one
folder, on sockets and ports of their own. Programs reach it by `SLURM_CONF` in their environment,
and nothing else tells them apart from those of a cluster. It differs from a cluster in what makes
tests wait: a dead node is noticed within half a minute, and a requeued job waits 10 seconds to
begin again, where Slurm's defaults are five minutes and two.

A second partition has 128 nodes of 8 GPUs that are always asleep: `sbatch --test-only` takes them
for nodes, so that it says whether such a cluster would accept a script. Nothing may run there.
"""

import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.slurm.support import processes
from tests.slurm.support.packages import PATH

TREE = Path(__file__).resolve().parents[3]
ACCOUNT = "tests"
PARTITION = "tests"
GPU_PARTITION = "gpus"
NODES = ("n1", "n2")
CPUS_PER_NODE = 4

ENDED = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
)
FREE_PORTS = range(10_000, 20_000)  # below those of the jobs' ranks (slurm.executors)
FIRST_JOBS = range(1, 1_000_000)
"""A job's number says which port its ranks meet on: another Slurm of this machine has others."""

SLURM_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
JobRequeue=1
FirstJobId={first_job}
KillWait=5
SlurmdTimeout=10
ReturnToService=2
MinJobAge=600
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=60
SuspendExcNodes=n1,n2
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={slurmdbd}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs={cpus}
NodeName=g[1-128] NodeHostname=asleep Port=9 CPUs=224 RealMemory=2000000 Gres=gpu:8 State=CLOUD
PartitionName=gpus Nodes=g[1-128] MaxTime=INFINITE State=UP
PartitionName=tests Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
SLURMDBD_CONF = """\
DbdHost=localhost
DbdPort={slurmdbd}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
"""


class SlurmError(RuntimeError):
    """A daemon, a command or a job did not do what was asked of it."""


class RealSlurm:
    """A Slurm that lives as long as the context."""

    def __init__(self) -> None:
        # Not pytest's folder: the name of a Unix socket may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=parent_folder()))
        self.jobs = self.folder / "jobs"
        self.environment = {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), PATH]),
        }
        """What a program needs to use this Slurm; `python` is then the one that runs the tests."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._marker = f"SLURM_CONF={self.environment['SLURM_CONF']}"
        self._after_us = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm.support.processes", str(self.folder), self._marker],
            cwd=TREE,
            stdin=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the keyboard is for the tests
        )

    def __enter__(self) -> "RealSlurm":
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill every process that was started with this Slurm's environment; remove the folder."""
        processes.kill(self._marker)
        for daemon in self._daemons.values():
            daemon.wait()
        self._after_us.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self,
        *command: str | Path,
        cwd: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        **keywords: Any,
    ) -> str:
        """Run a program against this Slurm, in `jobs` unless told; return its standard output.

        Raises SlurmError with what it said if it fails.
        """
        done = subprocess.run(
            list(map(str, command)),
            check=False,
            cwd=cwd or self.jobs,
            env={**self._outer_environment(), **variables},
            text=True,
            capture_output=True,
            **keywords,
        )
        if done.returncode:
            raise SlurmError(f"{' '.join(map(str, command))}: {done.stderr or done.stdout}")
        return str(done.stdout)

    def sbatch(self, script: str | Path, *args: str) -> int:
        """Submit a script, by its text or its path; return the number of the job.

        It runs in the folder `jobs` and writes its log there unless `args` say otherwise.
        """
        if isinstance(script, Path):
            said = self.run("sbatch", "--parsable", *args, script)
        else:
            text = script if script.startswith("#!") else f"#!/bin/bash\n{script}"
            said = self.run("sbatch", "--parsable", *args, input=text)
        return int(said.partition(";")[0])

    def state(self, job_id: int) -> str:
        """Return a job's state as the controller has it, else as accounting has it."""
        try:
            return self.job(job_id)["JobState"]
        except SlurmError:
            return self.accounted_state(job_id)

    def accounted_state(self, job_id: int) -> str:
        """Return a job's state as sacct has it, or an empty string.

        It is late by some seconds: that of a new job is not there yet, and that of a job which was
        requeued is the end of its last run, such as NODE_FAIL, until the next one has begun.
        """
        said = self.run("sacct", "-X", "-n", "-P", "-o", "State", "-j", str(job_id)).split()
        return said[0] if said else ""

    def wait(self, job_id: int, states: Collection[str] = ENDED, timeout_seconds: int = 240) -> str:
        """Wait until a job is in one of the states; return which.

        Raises SlurmError with the job's log and what the controller knows of it on timeout.
        """
        states = {states} if isinstance(states, str) else states
        end = time.monotonic() + timeout_seconds
        while (state := self.state(job_id)) not in states:
            if time.monotonic() > end:
                raise SlurmError(
                    f"job {job_id} is {state} after {timeout_seconds} s, not {sorted(states)}\n"
                    f"{self.run('scontrol', 'show', 'job', str(job_id))}\n{self.log(job_id)}"
                )
            time.sleep(0.3)
        return state

    def job(self, job_id: int) -> dict[str, str]:
        """Return the controller's fields of a job."""
        said = self.run("scontrol", "--oneliner", "show", "job", str(job_id)).strip()
        return dict(re.findall(r"(\S+?)=(.*?)(?= [A-Z][\w:/]*=|$)", said))

    def log(self, job_id: int) -> str:
        """Return what a job has written so far."""
        log = Path(self.job(job_id)["StdOut"])
        return log.read_text(errors="replace") if log.exists() else ""

    def restarts(self, job_id: int) -> int:
        """Return how often a job has been requeued."""
        return int(self.job(job_id)["Restarts"])

    def limit_soon(self, job_id: int) -> None:
        """Set a running job's time limit to the minute that ends in half a minute or later."""
        hours, minutes, seconds = map(int, self.job(job_id)["RunTime"].split(":"))
        limit = hours * 60 + minutes + (seconds + 30) // 60 + 1
        self.run("scontrol", "update", f"JobId={job_id}", f"TimeLimit={limit}")

    def signal(self, job_id: int, name: str, *args: str) -> None:
        """Send a signal to the steps of a job: not to its script, unless `args` say so."""
        self.run("scancel", f"--signal={name}", *args, str(job_id))

    def cancel(self, job_id: int) -> None:
        """End a job."""
        self.run("scancel", str(job_id))

    def node_state(self, name: str) -> str:
        """Return a node's state, such as IDLE, MIXED, ALLOCATED, DOWN or DOWN*."""
        said = self.run("scontrol", "--oneliner", "show", "node", name)
        return said.partition(" State=")[2].split()[0].partition("+")[0]

    def kill_node(self, name: str) -> None:
        """Kill a node's slurmd and all that runs on it, as a machine that loses its power does."""
        processes.kill(self._marker, f"SLURMD_NODENAME={name}")
        self._daemons.pop(name).wait()

    def start_node(self, name: str) -> None:
        """Start a node's slurmd; return when the controller takes the node for a live one."""
        self._start_daemon(name, "slurmd", "-D", "-N", name, SLURMD_NODENAME=name)
        self._until(lambda: self.node_state(name) in ("IDLE", "MIXED", "ALLOCATED"))

    def _start(self) -> None:
        """Start the daemons, each when those that it needs answer."""
        ports = dict(zip(("slurmctld", "slurmdbd", *NODES), free_ports(4), strict=True))
        facts = {"folder": self.folder, "host": short_hostname(), "cpus": CPUS_PER_NODE, **ports}
        facts["first_job"] = random.choice(FIRST_JOBS)
        for name in ("jobs", "state", *NODES):
            (self.folder / name).mkdir()
        self._write("munge.key", secrets.token_bytes(64))
        self._write("slurm.conf", SLURM_CONF.format(**facts).encode())
        self._write("slurmdbd.conf", SLURMDBD_CONF.format(**facts).encode())

        self._start_munge()
        self._start_database()
        self._start_daemon(
            "slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=str(self.folder / "db.socket")
        )
        self._until(lambda: self._says("sacctmgr", "-n", "-P", "list", "cluster") is not None)
        for what in (
            ("cluster", "tests"),
            ("account", ACCOUNT),
            ("user", "root", f"account={ACCOUNT}"),
        ):
            self.run("sacctmgr", "-i", "add", *what)
        self.run("sacctmgr", "-i", "modify", "user", "root", "set", f"defaultaccount={ACCOUNT}")
        self._start_daemon("slurmctld", "slurmctld", "-D", "-i")
        self._until(lambda: "UP" in (self._says("scontrol", "ping") or ""))
        for name in NODES:
            self.start_node(name)

    def _start_munge(self) -> None:
        own = {
            name: f"{self.folder}/munge.{name}" for name in ("socket", "pid", "key", "seed", "log")
        }
        self._start_daemon(
            "munged",
            "munged",
            "--foreground",
            "--force",  # it mistrusts a folder below one that others may write to
            "--num-threads=4",
            f"--socket={own['socket']}",
            f"--pid-file={own['pid']}",
            f"--key-file={own['key']}",
            f"--seed-file={own['seed']}",
        )
        self._until(lambda: Path(own["socket"]).exists())

    def _start_database(self) -> None:
        self.run(
            "mariadb-install-db",
            "--no-defaults",
            "--user=root",
            "--skip-test-db",
            f"--datadir={self.folder}/db",
        )
        socket_name = self.folder / "db.socket"
        self._start_daemon(
            "mariadbd",
            "mariadbd",
            "--no-defaults",
            "--user=root",
            "--skip-networking",  # slurmdbd comes by the socket, where being root is the password
            "--performance-schema=off",
            "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=16M",
            "--innodb-lock-wait-timeout=900",  # slurmdbd asks for it
            "--innodb-flush-log-at-trx-commit=0",
            f"--datadir={self.folder}/db",
            f"--socket={socket_name}",
            f"--pid-file={self.folder}/db.pid",
        )
        self._until(socket_name.exists)

    def _start_daemon(self, name: str, program: str, *args: str, **variables: str) -> None:
        with self._daemon_log(name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [str(shutil.which(program, path=PATH)), *args],
                cwd=self.folder,
                env=self._outer_environment() | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _until(self, condition: Callable[[], bool], timeout_seconds: int = 240) -> None:
        """Wait for the daemon started last; on its end or on timeout show the end of its log."""
        name, daemon = list(self._daemons.items())[-1]
        end = time.monotonic() + timeout_seconds
        while not condition():
            late = time.monotonic() > end
            if late or daemon.poll() is not None:
                how = f"does not answer after {timeout_seconds} s" if late else "has ended"
                tail = self._daemon_log(name).read_text(errors="replace").splitlines()[-30:]
                raise SlurmError("\n".join([f"{name} {how}; the end of its log:", *tail]))
            time.sleep(0.1)

    def _says(self, *command: str) -> str | None:
        """Return what a command says, or None if it fails."""
        try:
            return self.run(*command, timeout=20)
        except (SlurmError, subprocess.TimeoutExpired):
            return None

    def _daemon_log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _outer_environment(self) -> dict[str, str]:
        """Return our environment without the traces of a job that we may run in."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        return own | self.environment

    def _write(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.touch(mode=0o600)  # munged and slurmdbd refuse a secret that others can read
        path.write_bytes(content)


def parent_folder() -> str:
    """Return a folder in memory if it has room: the database waits for the disk at each step."""
    in_memory = Path("/dev/shm")
    roomy = in_memory.is_dir() and shutil.disk_usage(in_memory).free > 1 << 30
    return str(in_memory) if roomy else "/tmp"


def short_hostname() -> str:
    """Return the name by which slurmctld and slurmd recognise their machine."""
    return socket.gethostname().partition(".")[0]


def free_ports(number: int) -> list[int]:
    """Return ports that nobody listens on."""
    found: list[int] = []
    while len(found) < number:
        port = random.choice(FREE_PORTS)
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port not in found and trial.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found
