# SPDX-License-Identifier: Apache-2.0
"""Runs on this machine: nemo-run's local executor with torchrun."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nemo_run as run
import psutil
from torchx.specs import Role

from data.cuda_extension import FOLDER as EXTENSIONS
from data.cuda_extension import architecture
from recipes.planner import timeouts
from slurm import starter

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
TREE = Path(__file__).resolve().parents[1]
RANK = Path(__file__).resolve().with_name("local_rank.py")
OF_EVERY_RANK = {
    "HF_HUB_OFFLINE": "1",  # a run reads the tokenizer of its store, never the hub
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",  # imports of NeMo and Megatron print pages of them
}
"""Variables of ranks on every executor."""
OF_DEBUGGED_RANKS = {
    "NCCL_DEBUG": "INFO",
    # Groups and rings, variables in effect, network cards, and each call with its number.
    "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,COLL",
    "NCCL_DEBUG_FILE": "nccl_%h_%p.log",  # one of each rank: its host and process
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",  # ranks compare each collective before it runs
    "TORCH_NCCL_DESYNC_DEBUG": "1",  # which ranks have called what, where a collective times out
}
"""Variables of ranks whose communication is debugged, on every executor. PyTorch's flight recorder
is on without them (`slurm.flight_recorder`)."""


def of_debugged_ranks(folder: Path) -> dict[str, str]:
    """Return the variables of ranks that log their communication, NCCL's into files of `folder`."""
    file = str(folder.absolute() / OF_DEBUGGED_RANKS["NCCL_DEBUG_FILE"])
    return {**OF_DEBUGGED_RANKS, "NCCL_DEBUG_FILE": file}


def local_executor(
    ranks: int, seconds: float = starter.SECONDS, debugged: Path | None = None
) -> run.LocalExecutor:
    """Return an executor of `ranks` processes on this machine, with its cores split among them.

    Ranks that still run `seconds` after this process has ended are killed. They log their
    communication into the folder `debugged`, if there is one, as far as this process's environment
    does not state otherwise.
    Raises ValueError if there is no torchrun to start them.
    """
    if shutil.which("torchrun") is None:
        raise ValueError(
            f"torchrun, which starts ranks, is neither in {os.path.dirname(sys.executable)} nor on "
            "PATH; install torch in this environment"
        )
    threads = max(1, (os.cpu_count() or 1) // ranks)
    said = os.environ.get(ALLOCATOR, "")
    debug = {} if debugged is None else of_debugged_ranks(debugged)
    return run.LocalExecutor(
        ntasks_per_node=ranks,
        launcher="torchrun",
        env_vars={
            "OMP_NUM_THREADS": str(threads),
            ALLOCATOR: allocator_settings(said),
            **_python_path(),
            **architecture(),
            **OF_EVERY_RANK,
            **{name: value for name, value in debug.items() if name not in os.environ},
            **starter.variables(seconds),
        },
    )


def _python_path() -> dict[str, str]:
    """Return the variables by which ranks import the same packages as this process.

    A user's file with the name of a package does not shadow it: neither the working folder nor that
    of the script comes first.
    """
    found = {
        "PYTHONSAFEPATH": "1"
    }  # from Python 3.11 on, also for processes that ranks start with -c or -m
    if (TREE / "pyproject.toml").is_file():  # in a clone, which may not be the installed one
        before = os.environ.get("PYTHONPATH")
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TREE), before)))
    return found


def started_without_shell(role: Role, job_folder: Path) -> None:
    """Rewrite nemo-run's command line of a local job for torchx, which starts it without a shell.

    nemo-run quotes the words for a shell, so a path with a blank or an umlaut would keep its
    quotes; torchx itself substitutes only `$`. The ranks run a file instead of `-m` and a name,
    which would put the working folder first on Python's path; it is nemo-run's runner, and ends
    with this process.
    """
    if role.entrypoint != "torchrun":
        return
    words = ["".join(shlex.split(word)) for word in role.args]
    at = words.index("-m")
    words[at : at + 2] = [str(RANK)]
    role.args = [word.replace("$", "$$") for word in words]
    if EXTENSIONS not in os.environ:
        role.env.setdefault(EXTENSIONS, str(job_folder / "extensions").replace("$", "$$"))


def allocator_settings(said: str) -> str:
    """Return the settings of torch's CUDA allocator: the user's own, and expandable segments.

    An expandable segment serves tensors of any size; fixed segments fragment, and with the
    gigabyte-sized tensors of long sequences the holes waste memory.
    """
    if "expandable_segments:" in said:
        return said
    return ",".join(filter(None, (said, timeouts.ALLOCATOR)))


def stop_ranks(tell: Callable[[str], Any]) -> None:
    """Ask the ranks that this process started to stop, and wait until they have.

    A rank in training saves at the end of its step. An agent would not wait for that, and a killed
    agent leaves its ranks behind, so agents are signalled only after their ranks exit. Another
    SIGINT in the meantime kills the ranks and all processes that they started.
    """
    below = psutil.Process().children(recursive=True)
    ranks = {process.pid: process for process in below if _is_rank(process)}
    first = [process for process in ranks.values() if _parent(process) not in ranks]

    def kill(*_: Any) -> None:
        for process in below:
            if process.pid in ranks:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    before = signal.signal(signal.SIGINT, kill)
    try:
        if first:
            tell("stopping; ranks in training save first, Ctrl-C again ends them now")
        for process in first:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(first)
    finally:
        signal.signal(signal.SIGINT, before)
    kill()


def _parent(process: psutil.Process) -> int | None:
    with suppress(psutil.Error):  # it ended in the meantime
        return int(process.ppid())
    return None


def _is_rank(process: psutil.Process) -> bool:
    """Whether torchrun started a process, or one that did."""
    with suppress(psutil.Error):
        return "LOCAL_RANK" in process.environ()
    return False
