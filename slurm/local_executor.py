# SPDX-License-Identifier: Apache-2.0
"""This machine as a place to run: nemo-run's local executor with torchrun."""

import os
import shlex
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nemo_run as run
import psutil
from nemo_run.core.runners import fdl_runner
from torchx.specs import Role

from data.cuda_extension import FOLDER as EXTENSIONS
from data.cuda_extension import architecture
from recipes.planner import timeouts

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
TREE = Path(__file__).resolve().parents[1]
OF_EVERY_RANK = {
    "HF_HUB_OFFLINE": "1",  # a run reads the tokenizer of its store, never the hub
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",  # NeMo's and Megatron's imports print pages of them
}
"""Variables of ranks wherever they run."""


def local_executor(ranks: int) -> run.LocalExecutor:
    """Return an executor of `ranks` processes on this machine, its cores shared out among them."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    said = os.environ.get(ALLOCATOR, "")
    return run.LocalExecutor(
        ntasks_per_node=ranks,
        launcher="torchrun",
        env_vars={
            "OMP_NUM_THREADS": str(threads),
            ALLOCATOR: allocator_settings(said),
            **_python_path(),
            **architecture(),
            **OF_EVERY_RANK,
        },
    )


def _python_path() -> dict[str, str]:
    """Return the variables by which ranks import the packages that this process does.

    A file of the user's that has the name of one is not imported for it: neither the working
    folder nor that of the script comes first.
    """
    found = {"PYTHONSAFEPATH": "1"}  # from Python 3.11 on, for what ranks start with -c or -m too
    if (TREE / "pyproject.toml").is_file():  # in a clone, which need not be the one installed
        before = os.environ.get("PYTHONPATH")
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TREE), before)))
    return found


def started_without_shell(role: Role, job_folder: Path) -> None:
    """Change what nemo-run has made of a local job into what torchx starts as it is meant.

    nemo-run quotes the words for a shell and torchx starts torchrun without one, so that a path
    with a blank or an umlaut kept its quotes; what torchx does look for is `$`. The ranks run the
    file of nemo-run's runner instead of `-m` and its name, which would put the working folder first
    on Python's path.
    """
    if role.entrypoint != "torchrun":
        return
    words = ["".join(shlex.split(word)) for word in role.args]
    at = words.index("-m")
    words[at : at + 2] = [str(fdl_runner.__file__)]
    role.args = [word.replace("$", "$$") for word in words]
    if EXTENSIONS not in os.environ:
        role.env.setdefault(EXTENSIONS, str(job_folder / "extensions").replace("$", "$$"))


def allocator_settings(said: str) -> str:
    """Return torch's settings of its CUDA allocator: the user's own, and expandable segments.

    A segment that grows serves tensors of any size; fixed ones are left with holes, which at long
    sequences, whose tensors are gigabytes, cost memory that nothing can use.
    """
    if "expandable_segments:" in said:
        return said
    return ",".join(filter(None, (said, timeouts.ALLOCATOR)))


def stop_ranks(tell: Callable[[str], Any]) -> None:
    """Ask the ranks that this process started to stop, and wait until they have.

    A rank in training saves at the end of its step. The agents between do not wait for that, and
    one that is killed leaves its ranks behind: so they are told of nothing until the ranks ended.
    Another SIGINT meanwhile kills the ranks and all that they started.
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
    with suppress(psutil.Error):  # it has ended meanwhile
        return int(process.ppid())
    return None


def _is_rank(process: psutil.Process) -> bool:
    """Whether torchrun started a process, or one that did."""
    with suppress(psutil.Error):
        return "LOCAL_RANK" in process.environ()
    return False
