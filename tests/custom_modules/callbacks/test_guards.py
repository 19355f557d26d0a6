# SPDX-License-Identifier: Apache-2.0
"""What ends a run: a hang with its stacks, a loss that breaks, a signal; each alone."""

import json
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from custom_modules.callbacks import loss_guard, stack_dumper
from custom_modules.callbacks.hang_guard import HangGuard
from custom_modules.callbacks.loss_guard import LossBrokeError, LossGuard
from custom_modules.callbacks.stop_in_time import StopInTime
from custom_modules.cpu.backend import cpu_backend
from slurm.entrypoint import _how_it_ended
from tests.ranks import TREE, Ranks, one_rank

HANGS = """
import time
from types import SimpleNamespace
from custom_modules.callbacks.hang_guard import HangGuard
guard = HangGuard({folder!r}, first_seconds=60, seconds={seconds})
guard.setup(SimpleNamespace(global_rank=3), None, "fit")
guard.on_train_batch_end()
def waits_for_a_lost_rank():
    time.sleep(60)
waits_for_a_lost_rank()
"""


def test_a_rank_that_hangs_ends_and_leaves_the_stack_it_hung_in(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", HANGS.format(folder=str(tmp_path), seconds=8)],
        cwd=TREE,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1
    assert "waits_for_a_lost_rank" in (tmp_path / "rank_3.txt").read_text()
    by_pyspy = (tmp_path / "rank_3_pyspy.txt").read_text()
    assert "waits_for_a_lost_rank" in by_pyspy or "could not read the stacks" in by_pyspy


def test_where_ptrace_is_not_permitted_the_file_of_py_spy_says_so(tmp_path):
    refuses = tmp_path / "py-spy"
    refuses.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2; exit 1\n")
    refuses.chmod(0o755)
    text = stack_dumper.stacks(1, str(refuses))
    assert text.startswith(
        "py-spy could not read the stacks of this rank: Error: Permission Denied"
    )
    assert "SYS_PTRACE" in text


def test_the_process_beside_a_rank_ends_with_it(tmp_path):
    code = (
        "import time; from pathlib import Path; "
        "from custom_modules.callbacks.hang_guard import dumper; "
        f"print(dumper(Path({str(tmp_path)!r}) / 'x').pid, flush=True); time.sleep(60)"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", code], cwd=TREE, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    beside = psutil.Process(int(rank.stdout.readline()))
    rank.kill()
    rank.wait()
    beside.wait(timeout=30)


@pytest.mark.parametrize("ends", ["teardown", "on_exception"])
def test_a_rank_that_ends_by_itself_leaves_no_file(tmp_path, ends):
    guard = HangGuard(str(tmp_path), first_seconds=60, seconds=60)
    guard.setup(SimpleNamespace(global_rank=0), SimpleNamespace(), "fit")
    assert (tmp_path / "rank_0.txt").exists()
    getattr(guard, ends)(*[SimpleNamespace()] * 3)
    assert list(tmp_path.iterdir()) == []


class Run:
    """A trainer as far as the guard of the loss looks at it."""

    def __init__(self, saved: int = 0) -> None:
        self.global_step, self.is_global_zero, self.callback_metrics = 0, True, {}
        self.passed_over: tuple = ()
        self.datamodule = SimpleNamespace(global_batch_size=4, pass_over=self._pass_over)
        self.checkpoint_callback = SimpleNamespace(newest_step=lambda: saved)

    def _pass_over(self, windows: tuple) -> None:
        self.passed_over = windows

    def step(self, guard: LossGuard, loss: float, norm: float = 1.0) -> None:
        self.global_step += 1
        self.callback_metrics["grad_norm"] = norm
        self.callback_metrics["reduced_train_loss"] = torch.tensor(loss)
        guard.on_train_batch_end(self)


def steps(guard: LossGuard, run: Run, losses: list[float]) -> None:
    guard.on_train_start(run, SimpleNamespace())
    for loss in losses:
        run.step(guard, loss)


def test_a_spike_ends_the_run_and_the_next_one_passes_its_batches_over(tmp_path):
    path = tmp_path / "rewinds.jsonl"
    guard = LossGuard(str(path), warmup_steps=2)
    with pytest.raises(LossBrokeError, match=r"step 13: the loss is 5.000, 2.90 nats above") as why:
        steps(guard, Run(saved=10), [2.1] * 12 + [5.0])
    assert why.value.again
    (kept,) = loss_guard.read(path)
    assert (kept["from_step"], kept["samples"]) == (10, [40, 12])
    again = Run(saved=10)
    steps(LossGuard(str(path), warmup_steps=2), again, [2.1] * 10)
    assert again.passed_over == ((40, 12),)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run_even_in_the_warm_up(tmp_path, loss):
    guard = LossGuard(str(tmp_path / "rewinds.jsonl"), warmup_steps=100)
    with pytest.raises(LossBrokeError, match=f"step 2: the loss is {loss}"):
        steps(guard, Run(), [2.1, loss])


def test_a_gradient_that_is_no_number_ends_the_run_before_it_is_saved(tmp_path):
    guard, run = LossGuard(str(tmp_path / "rewinds.jsonl"), warmup_steps=100), Run()
    steps(guard, run, [2.1])
    with pytest.raises(LossBrokeError, match="step 2: the norm of the gradient is nan"):
        run.step(guard, 2.1, math.nan)


def test_the_jump_at_the_start_of_a_stage_is_no_spike(tmp_path):
    guard = LossGuard(str(tmp_path / "rewinds.jsonl"), warmup_steps=10)
    steps(guard, Run(), [2.0] * 8 + [5.5, 4.0, 2.5, 2.1, 2.1])


def test_after_so_many_rewinds_it_is_no_batch_s_fault(tmp_path):
    path = tmp_path / "rewinds.jsonl"
    for attempt in range(3):
        with pytest.raises(LossBrokeError) as why:
            steps(LossGuard(str(path), warmup_steps=0, most=2), Run(), [math.nan])
        assert why.value.again == (attempt < 2)
    assert len(loss_guard.read(path)) == 2


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: LossGuard("x", warmup_steps=0, rise=0), "rise is 0 nats"),
        (lambda: LossGuard("x", warmup_steps=0, most=-1), "most is -1"),
        (lambda: HangGuard("x", first_seconds=0, seconds=1), "first_seconds is 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(made, said):
    with pytest.raises(ValueError, match=said):
        made()


def _told_on_one_rank(rank_told: int, blocked: bool) -> tuple[int | None, int, bool]:
    """Signal one rank in its second step; return where this rank stopped, and what it left."""
    import torch.distributed as dist

    before = signal.getsignal(signal.SIGUSR1)
    guard, trainer = StopInTime(), SimpleNamespace(max_steps=5, should_stop=False, global_step=0)
    if blocked:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    guard.on_train_start(trainer, SimpleNamespace())
    with cpu_backend(force=True):
        while not trainer.should_stop and trainer.global_step < trainer.max_steps:
            trainer.global_step += 1
            if trainer.global_step == 2 and dist.get_rank() == rank_told:
                # To this thread: gloo's have not blocked it, and would take it at any moment.
                signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            guard.on_train_batch_end(trainer)
    guard.teardown(trainer, SimpleNamespace(), "fit")
    handed_back = signal.getsignal(signal.SIGUSR1) == before
    return guard.stopped, trainer.limit_val_batches, handed_back


@pytest.mark.parametrize("blocked", [False, True], ids=["handled", "blocked"])
def test_all_ranks_stop_after_the_step_in_which_one_was_told(blocked):
    with Ranks(_told_on_one_rank, 2, 1, blocked) as ranks:
        assert ranks.results(timeout_seconds=400) == [(2, 0, True)] * 2


def _asked_by_files(run: str) -> tuple[list[int], int | None, str]:
    """Ask for a save in step 2 and a stop in step 4; return steps saved, where it stopped, why."""
    import torch.distributed as dist

    stage = Path(run) / "stages" / "tiny"
    saves = SimpleNamespace(dirpath=str(stage / "checkpoints"), save_asked=False)
    guard, saved = StopInTime(), []
    trainer = SimpleNamespace(
        max_steps=6, should_stop=False, global_step=0, checkpoint_callback=saves
    )
    with cpu_backend(force=True):
        while not trainer.should_stop and trainer.global_step < trainer.max_steps:
            trainer.global_step += 1
            file = {2: Path(run) / "save", 4: stage / "stop"}.get(trainer.global_step)
            if file is not None and dist.get_rank() == 0:
                file.touch()
            guard.on_train_batch_end(trainer)
            if saves.save_asked:
                saved.append(trainer.global_step)
                saves.save_asked = False
    return saved, guard.stopped, guard.stopped_by


def test_files_ask_all_ranks_for_a_save_and_for_a_stop_and_are_removed(tmp_path):
    stage = tmp_path / "stages" / "tiny"
    stage.mkdir(parents=True)
    with Ranks(_asked_by_files, 2, str(tmp_path)) as ranks:
        first, other = ranks.results(timeout_seconds=400)
    assert first == ([2], 4, str(stage / "stop"))
    assert other == ([2], 4, "")
    assert [path.name for path in (*tmp_path.iterdir(), *stage.iterdir())] == ["stages"]
    ended = _how_it_ended("tiny", 0, 4, 6, first[2])
    assert ended == ("stopped", f"tiny saved at step 4 of 6 and stopped, as {stage / 'stop'} asked")


def test_a_pending_signal_that_another_thread_takes_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(signal, "sigpending", lambda: {signal.SIGUSR1})
    guard, trainer = StopInTime(), SimpleNamespace(max_steps=5, should_stop=False, global_step=2)
    with one_rank(), cpu_backend(force=True):
        guard.on_train_batch_end(trainer)
    assert (guard.told, guard.stopped) == ("SIGUSR1", 2)


@pytest.mark.parametrize("name", ["stop", "save"])
def test_a_file_that_asks_for_a_stop_in_the_step_of_a_signal_ends_the_chain(tmp_path, name):
    stage = tmp_path / "stages" / "tiny"
    stage.mkdir(parents=True)
    (tmp_path / name).touch()
    guard, saves = StopInTime(), SimpleNamespace(dirpath=str(stage / "checkpoints"))
    trainer = SimpleNamespace(
        max_steps=5, should_stop=False, global_step=2, checkpoint_callback=saves
    )
    guard._hear(signal.SIGUSR1, None)
    with one_rank(), cpu_backend(force=True):
        guard.on_train_batch_end(trainer)
    assert guard.stopped == 2
    assert guard.stopped_by == (str(tmp_path / "stop") if name == "stop" else "")
    assert not (tmp_path / name).exists()


def test_rewinds_are_lines_of_json(tmp_path):
    path = tmp_path / "rewinds.jsonl"
    with pytest.raises(LossBrokeError):
        steps(LossGuard(str(path), warmup_steps=0), Run(), [math.nan])
    assert json.loads(path.read_text())["loss"] is None
