# SPDX-License-Identifier: Apache-2.0
"""Program that imports NeMo once, and forks from that torchrun's agents and they their ranks.

A rank that starts as a Python of its own imports NeMo and Megatron-Core first, which takes 15 to 25
seconds of a core. This program does so once for all ranks of all jobs of a command.

    stdin    {"words": [...], "variables": {...}, ...}    a job, as `slurm.forked_agents` writes it
    stdout   4711                                         the process number of its agent
             0                                            its exit code, when it has ended

The agent is torchrun's with the same words, except that a rank is a fork of it, set back to what a
new process has: handlers of signals, streams, threads and random numbers. The program ends with its
input, that is with the command. It uses no GPU: CUDA does not work in a fork of what has used it.
"""

import atexit
import gc
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

if sys.path[:1] == [str(Path(__file__).resolve().parent)]:
    del sys.path[0]

from slurm.starter import end_with_starter

LIBRARIES = ("nemo_run.core.runners.fdl_runner", "torch.distributed.run", "recipes.pretrain")
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the agent handles and a new process does not."""


def import_libraries() -> None:
    """Import what every rank needs; collections of garbage leave it alone from then on."""
    from data.cuda_extension import prepare_process

    prepare_process()
    for name in LIBRARIES:
        import_module(name)

    gc.collect()
    gc.freeze()


def next_job() -> dict[str, Any] | None:
    """Return a job in the process that is forked for it; None when the command has ended."""
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            job: dict[str, Any] = json.loads(line)
            return job
        os.setpgid(process, process)  # torchx signals the group
        os.write(1, f"{process}\n".encode())
        os.write(1, f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n".encode())
    return None


def run_agent(job: dict[str, Any]) -> None:
    """Run a job's ranks to their end, as torchrun does."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args
    from torch.multiprocessing import _set_thread_name

    os.environ.clear()
    os.environ.update(job["variables"])
    os.chdir(job["folder"])
    for number, path in enumerate((os.devnull, job["stdout"], job["stderr"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    _set_thread_name("pt_elastic")
    words = parse_args(job["words"])
    config, _, _ = config_from_args(words)
    config.start_method = "fork"
    elastic_launch(config, run_rank)(*words.training_script_args)


def run_rank(*words: str) -> None:
    """Run nemo-run's runner in a process that has just been forked from the agent."""
    import numpy as np
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from nemo_run.core.runners.fdl_runner import fdl_runner_app
    from torch.multiprocessing import _prctl_pr_set_pdeathsig, _set_thread_name  # type: ignore[attr-defined]

    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _prctl_pr_set_pdeathsig(0)  # torch's SIGINT; a rank whose agent has ended saves first
    end_with_starter()
    rank_zero_only.rank = int(os.environ["RANK"])
    _set_thread_name(f"rank {rank_zero_only.rank}")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    np.random.seed()  # the same numbers in every rank otherwise
    try:
        fdl_runner_app(words)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which a process that multiprocessing forks leaves out


def main() -> None:
    """Import, and run what is forked to its end; a large process takes long to end by itself."""
    import_libraries()
    job, code = next_job(), 0
    if job is not None:
        try:
            run_agent(job)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
