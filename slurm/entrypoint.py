# SPDX-License-Identifier: Apache-2.0
"""Entry point of a rank: its place in the job, its task, and its outcome.

torchrun passes a rank its place; srun does so in its own variables, which are read here, so that
ranks are started one by one and a signal reaches each of them, without an agent in between. NeMo is
imported only to train a stage.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from custom_modules.checkpoints.index import CheckpointError
from data.cuda_extension import prepare_process
from recipes.checkpoints.marker import steps_taken
from recipes.spec.gate import GateShutError
from slurm.flight_recorder import record_collectives
from slurm.outcome import State, exclude_node, record_start, wait_for_outcome, write_outcome
from slurm.preflight.check import PreflightError, blamed
from slurm.preflight.machine import Machine, rank_of
from slurm.preflight.requirements import Expected
from slurm.preflight.run import SECONDS, preflight

TOLD = {signal.SIGTERM, signal.SIGUSR1}
"""Signals that ask a rank in training to stop."""
_AGAIN = "LONGHAUL_SIGNALS_BLOCKED"


def join(*, blocked: bool = False) -> None:
    """Set torchrun's variables from srun's if torchrun did not.

    A scheduler signals every process of a step. A stop signal would end the child processes that a
    rank saves with, such as Megatron's result queue. So in training these signals are `blocked`,
    which children inherit, and the training callback reads the pending ones.
    """
    given = os.environ
    place = rank_of(Machine())
    if "RANK" in given or place is None:
        return
    if blocked:
        _block()
    given["RANK"] = str(place.rank)
    given["LOCAL_RANK"] = str(place.local_rank)
    given["WORLD_SIZE"] = str(place.world_size)
    given["LOCAL_WORLD_SIZE"] = given["SLURM_NTASKS_PER_NODE"].partition("(")[0]
    given["GROUP_RANK"] = given["SLURM_NODEID"]
    # Lightning then uses these and not Slurm's, whose environment requeues jobs by itself.
    given["TORCHELASTIC_RUN_ID"] = f"{given['SLURM_JOB_ID']}.{given.get('SLURM_RESTART_COUNT', 0)}"


def _block() -> None:
    """Block the signals in every thread.

    Libraries start threads on import (OpenBLAS, with OMP_NUM_THREADS above 1), and a signal goes to
    any thread that has not blocked it. If there are threads, this process re-executes itself and
    inherits the mask.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, TOLD)
    if len(os.listdir("/proc/self/task")) > 1 and _AGAIN not in os.environ:
        os.environ[_AGAIN] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def is_first() -> bool:
    """Whether this rank reports for the job."""
    return os.environ.get("RANK", "0") == "0"


def run(task: Callable[[], Any], expected: Expected | None = None, seconds: float = 0.0) -> None:
    """Run a task and record that it finished; if the task refuses, the chain ends.

    The machines are checked first, links for up to `seconds`. Raises SystemExit as `train` does.
    """
    join()
    if expected is not None:
        _look(expected, seconds)
    prepare_process()
    try:
        task()
    except GateShutError as error:
        _say("refused", str(error))
        raise
    if is_first():
        write_outcome("finished", "")


def train(
    config: str,
    expected: Expected | None = None,
    seconds: float = SECONDS,
    change: Callable[[Any], None] | None = None,
) -> None:
    """Train the stage of a recipe file to its end, or until it is told to stop.

    The machines are checked first, links for up to `seconds`. `change` is called with the recipe
    before it is built. Raises SystemExit with preflight's
    exit code, the same on all ranks; nodes that failed by themselves are blamed.
    """
    join(blocked=True)
    if expected is not None:
        _look(expected, seconds)
    prepare_process()
    import fiddle as fdl

    from custom_modules.callbacks.loss_guard import LossBrokeError
    from recipes.checkpoints.rotation import RotationError
    from recipes.nemo2.failed_saves import SaveFailedError
    from recipes.resolved import yaml_file
    from recipes.resolved.read import device_of

    recipe = yaml_file.read(Path(config))
    if change is not None:
        change(recipe)
    folder, steps = Path(recipe.resume.resume_from_directory), int(recipe.trainer.max_steps)
    try:
        before = steps_taken(folder)
    except CheckpointError as error:
        _say("failed", str(error))
        raise
    if is_first():
        record_start(before)
    if device_of(recipe) == "cuda":
        record_collectives(Path(config).parent)
    training = fdl.build(recipe)
    try:
        training()
    except LossBrokeError as error:
        _say("continue" if error.again else "refused", str(error))
        raise
    except RotationError as error:
        _say("refused", str(error))
        raise
    except SaveFailedError as error:
        _say("failed", str(error))
        raise
    if is_first():
        by = _stopped_by(training.keywords["trainer"])
        write_outcome(*_how_it_ended(recipe.log.name, before, steps_taken(folder), steps, by))


def _stopped_by(trainer: Any) -> str:
    """Return the file that asked the training to stop; empty if none did."""
    files = (getattr(callback, "stopped_by", "") for callback in trainer.callbacks)
    return next(filter(None, files), "")


def _how_it_ended(
    name: str, before: int, taken: int, steps: int, stopped_by: str = ""
) -> tuple[State, str]:
    if taken >= steps:
        return "finished", f"{name} has all its {steps} steps"
    if stopped_by:
        return (
            "stopped",
            f"{name} saved at step {taken} of {steps} and stopped, as {stopped_by} asked",
        )
    if taken > before:
        return "continue", f"{name} saved at step {taken} of {steps}"
    said = f"{name} finished no step before it was told to stop"
    return "refused", f"{said}; raise slurm.time, or slurm.save_seconds where a step is longer"


def _say(state: State, said: str) -> None:
    """Write the outcome on rank 0; the others wait for it, since the first to fail ends all."""
    if is_first():
        write_outcome(state, said)
    else:
        wait_for_outcome()


def _look(expected: Expected, seconds: float) -> None:
    try:
        preflight(expected, seconds=seconds)
    except PreflightError as error:
        if is_first() or not error.met:
            sys.stderr.write(f"{error}\n")
        if is_first():
            for node in blamed(error.checks, error.nodes):
                exclude_node(node)
        _say("failed", str(error))
        sys.exit(error.exit_code)
