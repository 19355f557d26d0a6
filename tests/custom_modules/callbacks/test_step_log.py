# SPDX-License-Identifier: Apache-2.0
import fcntl
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from custom_modules.callbacks import step_log
from custom_modules.callbacks.step_log import StepLog, Tally
from custom_modules.metrics.event_timers import DATA_TIMER, timed

SEQ_LENGTH, SEQUENCES = 8, 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stage" / "metrics.jsonl"


@pytest.fixture
def log(path: Path) -> StepLog:
    return StepLog(
        path=str(path),
        tokens_per_batch=SEQUENCES * SEQ_LENGTH,
        seq_length=SEQ_LENGTH,
        flops_per_token=10.0,
    )


def trainer_at(step: int) -> SimpleNamespace:
    """Return what the log reads of Lightning's trainer after that many steps."""
    return SimpleNamespace(
        global_step=step,
        max_steps=9,
        world_size=1,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        is_global_zero=True,
        datamodule=SimpleNamespace(step_facts=lambda step: {"rows_by_source": {"web": step}}),
        optimizers=[SimpleNamespace(param_groups=[{"lr": 1e-3 * step}])],
        callback_metrics={
            "reduced_train_loss": torch.tensor(2.5),
            "grad_norm": torch.tensor(0.5),
        },
    )


def module_at_start() -> SimpleNamespace:
    """Return what the log reads of a model that has not received anything."""
    return SimpleNamespace(
        tally=Tally(),
        training_loss_reduction=SimpleNamespace(spread=torch.tensor(0.25)),
        config=SimpleNamespace(
            num_layers=1, num_attention_heads=1, kv_channels=1, vocab_size=5, hidden_size=2,
            share_embeddings_and_output_weights=False,
        ),
        optim=None,
    )  # fmt: skip


def run_step(
    log: StepLog,
    step: int,
    samples: list[int],
    *,
    tokens_per_sample: int = SEQ_LENGTH,
    measured: bool = False,
    callbacks: Sequence[Any] = (),
) -> None:
    """Run the hooks of one step whose micro-batches hold one sample each."""
    module = module_at_start()
    if measured:
        log.on_fit_start(trainer_at(step - 1), module)
    log.on_train_batch_start(trainer_at(step - 1), module, None, 0)
    for sample in samples:
        module.tally.add(
            torch.zeros(1, tokens_per_sample, dtype=torch.int64), torch.tensor([sample])
        )
    trainer = trainer_at(step)
    trainer.callbacks = callbacks
    log.on_train_batch_end(trainer, module, None, None, 0)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tally_counts_the_tokens_and_samples_of_every_micro_batch():
    tally = Tally()
    tally.add(torch.zeros(2, 8), torch.tensor([4, 5]))
    tally.add(torch.zeros(1, 8), torch.tensor([6]))
    assert tally.tokens == 24
    assert tally.samples == [4, 5, 6]


def test_a_cleared_tally_is_empty():
    tally = Tally()
    tally.add(torch.zeros(2, 8), torch.tensor([4, 5]))
    tally.clear()
    assert (tally.tokens, tally.samples) == (0, [])


@pytest.mark.usefixtures("megatron_rank")
def test_a_step_as_planned_writes_its_line(log, path):
    log.on_train_start(trainer_at(0), None)
    run_step(log, 1, [0, 1, 2, 3])
    run_step(log, 2, [4, 5, 6, 7])
    written = lines(path)
    assert [line["step"] for line in written] == [1, 2]
    assert [line["samples"] for line in written] == [[0, 3], [4, 7]]
    assert [line["tokens"] for line in written] == [32, 32]
    assert [(line["loss"], line["grad_norm"]) for line in written] == [(2.5, 0.5)] * 2
    assert [line["micro_batch_loss_std"] for line in written] == [0.25] * 2
    assert [line["rows_by_source"] for line in written] == [{"web": 0}, {"web": 1}]
    assert [line["data_wait_seconds"] for line in written] == [0.0] * 2


@pytest.mark.usefixtures("megatron_rank")
def test_a_wait_for_data_during_which_the_gpu_computes_is_none(log, path, monkeypatch):
    now = busy_until = 0.0

    class Event:
        """An event of a stream: it happens when all that was launched before has ended."""

        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            self.at = max(now, busy_until)

        def elapsed_time(self, end: "Event") -> float:
            return 1000.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    module, trainer, of_ranks = module_at_start(), trainer_at(1), []
    log.on_fit_start(trainer, module)
    log.on_train_start(trainer_at(0), module)
    log.on_train_batch_start(trainer_at(0), module, None, 0)
    for sample, host_waits in enumerate([0.25, 1.0, 0.0, 2.5]):
        with timed(module.config.timers, DATA_TIMER):
            now += host_waits
            module.tally.waited += host_waits
        module.tally.add(torch.zeros(1, SEQ_LENGTH, dtype=torch.int64), torch.tensor([sample]))
        busy_until = max(now, busy_until) + 1.0  # seconds of kernels; the host returns at once
    trainer.callbacks = [
        SimpleNamespace(rank_facts=lambda module: of_ranks.append(module.tally.waited) or {})
    ]
    log.on_train_batch_end(trainer, module, None, None, 0)
    # The second and the third are there at 1.25 s, when the first has ended, and end at 3.25; the
    # fourth is there at 3.75.
    assert lines(path)[0]["data_wait_seconds"] == pytest.approx(0.25 + 0.0 + 0.0 + 0.5)
    assert of_ranks == [lines(path)[0]["data_wait_seconds"]]


@pytest.mark.usefixtures("megatron_rank")
def test_a_line_is_passed_on_as_it_is_written(log, path):
    passed = []
    tracker = SimpleNamespace(on_step_line=lambda trainer, line: passed.append(line))
    log.on_train_start(trainer_at(0), None)
    run_step(log, 1, [0, 1, 2, 3], callbacks=[tracker])
    assert passed == lines(path)


@pytest.mark.usefixtures("megatron_rank")
def test_a_line_has_the_rate_that_the_step_began_with(log, path):
    log.on_train_start(trainer_at(0), None)
    run_step(log, 3, [8, 9, 10, 11])
    assert lines(path)[0]["lr"] == pytest.approx(2e-3)


@pytest.mark.usefixtures("megatron_rank")
def test_throughput_and_flops_agree_with_the_seconds_of_the_step(log, path):
    log.on_train_start(trainer_at(0), None)
    run_step(log, 1, [0, 1, 2, 3], measured=True)
    (line,) = lines(path)
    assert line["tokens_per_second_per_rank"] * line["seconds"] == pytest.approx(32)
    assert line["model_flops_per_second_per_rank"] * line["seconds"] == pytest.approx(320)
    assert line["device_memory_bytes"] == line["peak_memory_bytes"] > 0
    assert line["host_memory_bytes_by_rank"] == [line["host_memory_bytes"]]
    assert line["mfu"] is line["mfu_6n"] is line["gpu_utilization"] is None
    assert line["gpu_utilization_by_rank"] is None


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_a_clock_that_jumps_is_in_the_line_and_in_no_duration(log, path, monkeypatch, seconds):
    log.on_train_start(trainer_at(0), None)
    run_step(log, 1, [0, 1, 2, 3])
    clock = time.time
    monkeypatch.setattr(step_log.time, "time", lambda: clock() + seconds)
    run_step(log, 2, [4, 5, 6, 7])
    run_step(log, 3, [8, 9, 10, 11])
    jumps = [line.get("clock_jump_seconds") for line in lines(path)]
    assert jumps == [None, pytest.approx(seconds, abs=5), None]
    assert all(0 < line["seconds"] < 60 for line in lines(path))


@pytest.mark.usefixtures("megatron_rank")
def test_a_sequence_that_was_split_twice_stops_the_step(log, path):
    log.on_train_start(trainer_at(0), None)
    with pytest.raises(RuntimeError, match=r"step 1 trained on 16 tokens .* not on the 32"):
        run_step(log, 1, [0, 1, 2, 3], tokens_per_sample=SEQ_LENGTH // 2)
    assert lines(path) == []


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize(
    "samples",
    [[0, 1, 2, 3], [5, 6, 7, 8], [3, 4, 5, 6], [4, 5, 6, 8], [4, 4, 7, 7]],
    ids=str,
)
def test_samples_that_do_not_follow_the_last_step_stop_it(log, samples):
    log.on_train_start(trainer_at(1), None)
    with pytest.raises(RuntimeError, match=r"step 2 consumed samples .* not 4 to 7"):
        run_step(log, 2, samples)


@pytest.mark.usefixtures("megatron_rank")
def test_samples_may_come_in_any_order_within_a_step(log, path):
    log.on_train_start(trainer_at(0), None)
    run_step(log, 1, [2, 0, 3, 1])
    assert lines(path)[0]["samples"] == [0, 3]


def test_a_resume_drops_the_lines_that_a_kill_has_undone(log, path):
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)))
    log.on_train_start(trainer_at(3), None)
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


def test_a_resume_drops_a_line_cut_short_by_a_kill(log, path):
    path.parent.mkdir(parents=True)
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    log.on_train_start(trainer_at(3), None)
    assert [line["step"] for line in lines(path)] == [1, 2]


@pytest.mark.parametrize(
    ("tokens", "samples"), [(64, [0, 3]), (32, [4, 7])], ids=["tokens", "samples"]
)
def test_a_file_of_another_run_is_refused_and_left_as_it_is(log, path, tokens, samples):
    path.parent.mkdir(parents=True)
    content = json.dumps({"step": 1, "tokens": tokens, "samples": samples}) + "\n"
    path.write_text(content)
    with pytest.raises(RuntimeError, match="is of another run or recipe: its step 1 has"):
        log.setup(trainer_at(0), None, "fit")
    assert path.read_text() == content


def test_a_file_of_this_run_is_continued(log, path):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"step": 2, "tokens": 32, "samples": [4, 7]}) + "\n")
    log.setup(trainer_at(2), None, "fit")
    log.on_train_start(trainer_at(2), None)
    assert [line["samples"] for line in lines(path)] == [[4, 7]]


def test_a_rank_other_than_the_first_leaves_the_file_alone(log, path):
    trainer = trainer_at(0)
    trainer.is_global_zero = False
    log.on_train_start(trainer, None)
    assert not path.exists()


def test_a_second_run_into_the_same_folder_is_refused(log, path):
    log.setup(trainer_at(0), None, "fit")
    second = StepLog(
        path=str(path), tokens_per_batch=32, seq_length=SEQ_LENGTH, flops_per_token=10.0
    )
    with pytest.raises(RuntimeError, match="another process is training into"):
        second.setup(trainer_at(0), None, "fit")


def test_a_command_that_only_asks_who_trains_does_not_end_a_training(log, path, monkeypatch):
    path.parent.mkdir()
    with path.with_suffix(".lock").open("w") as asking:
        fcntl.flock(asking, fcntl.LOCK_EX)
        monkeypatch.setattr(step_log.time, "sleep", lambda _: asking.close())
        log.setup(trainer_at(0), None, "fit")
    assert json.loads(path.with_suffix(".lock").read_text())["process"] == os.getpid()
