# SPDX-License-Identifier: Apache-2.0
"""What a rank of a job runs: its place in the job, its task, and how it ended.

torchrun tells a rank its place; srun does in variables of its own, which are read here, so that
ranks are started one by one and a signal reaches each of them, with no agent between. Imports NeMo
when a stage is trained.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.finished import steps_taken
from recipes.gate import GateShutError
from slurm.outcome import blame, leave
from slurm.preflight.check import PreflightError, failures
from slurm.preflight.expected import Expected
from slurm.preflight.job import SECONDS, preflight
from slurm.preflight.machine import Machine, rank_of

STOPPED = 85
"""Exit code of ranks that saved and stopped before their stage's end."""


def join() -> None:
    """Set torchrun's variables from srun's where torchrun did not.

    A scheduler signals every process of a step. What asks a rank to stop would end the processes
    that it saves with, Megatron's queue of results among them: so it is blocked here, which those
    inherit, and the training callback looks at what is pending.
    """
    given = os.environ
    place = rank_of(Machine())
    if "RANK" in given or place is None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    given["RANK"] = str(place.rank)
    given["LOCAL_RANK"] = str(place.local_rank)
    given["WORLD_SIZE"] = str(place.world_size)
    given["LOCAL_WORLD_SIZE"] = given["SLURM_NTASKS_PER_NODE"].partition("(")[0]
    given["GROUP_RANK"] = given["SLURM_NODEID"]
    # Lightning then takes these and not Slurm's, whose environment requeues jobs by itself.
    given["TORCHELASTIC_RUN_ID"] = f"{given['SLURM_JOB_ID']}.{given.get('SLURM_RESTART_COUNT', 0)}"


def is_first() -> bool:
    """Whether this rank speaks for the job."""
    return os.environ.get("RANK", "0") == "0"


def run(task: Callable[[], Any]) -> None:
    """Run a task and say that it finished; a refusal of its own ends the chain."""
    join()
    try:
        task()
    except GateShutError as error:
        leave("refused", str(error))
        raise
    if is_first():
        leave("finished", "")


def train(config: str, expected: Expected | None = None, seconds: float = SECONDS) -> None:
    """Train the stage of a recipe file to its end, or to where it is told to stop.

    What the job expects of its machines is looked at first, links for so many seconds. Raises
    PreflightError, on all ranks alike; nodes that failed by themselves are blamed.
    """
    join()
    if expected is not None:
        _look(expected, seconds)
    import fiddle as fdl

    from custom_modules.callbacks.loss_guard import LossBrokeError
    from recipes import yaml_file

    recipe = yaml_file.read(Path(config))
    folder, steps = Path(recipe.resume.resume_from_directory), int(recipe.trainer.max_steps)
    before = steps_taken(folder)
    try:
        fdl.build(recipe)()
    except LossBrokeError as error:
        if is_first():
            leave("continue" if error.again else "refused", str(error))
        raise
    taken = steps_taken(folder)
    if taken >= steps:
        _end("finished", f"{recipe.log.name} has all its {steps} steps", 0)
    elif taken > before:
        _end("continue", f"{recipe.log.name} saved at step {taken} of {steps}", STOPPED)
    else:
        said = f"{recipe.log.name} took no step to its end before it was told to stop"
        _end("refused", f"{said}; raise slurm.time, or lower slurm.save_seconds", STOPPED)


def _look(expected: Expected, seconds: float) -> None:
    try:
        preflight(expected, seconds=seconds)
    except PreflightError as error:
        if is_first():
            sys.stderr.write(f"{error}\n")
            for node in sorted({node for check in failures(error.checks) for node in check.nodes}):
                blame(node)
        sys.exit(error.exit_code)


def _end(state: Any, said: str, code: int) -> None:
    if is_first():
        leave(state, said)
    if code:
        sys.exit(code)
