# SPDX-License-Identifier: Apache-2.0
"""`longhaul probe cp`: a table of every kind, refusals in one sentence, wrong parity as exit 1."""

import os
import signal

import pytest

from custom_modules.context_parallel.config import KINDS, ContextParallelKind, degrees
from custom_modules.context_parallel.measure import Measured, kinds_for
from longhaul.commands import probe

CP = ("probe", "cp", "--device", "cpu", "--ranks", 2, "--seq", 64, "--repeats", 1)
HEADS, KV_HEADS = 8, 4


@pytest.mark.parametrize("documents", [1, 5])
def test_every_kind_is_in_the_table_and_sends_what_theory_says(answer, monkeypatch, documents):
    measured: list[Measured] = []
    measure = probe.measure_on_ranks

    def kept(*of):
        measured.extend(measure(*of))
        return measured

    monkeypatch.setattr(probe, "measure_on_ranks", kept)
    code, shown, said = answer(
        *CP, "--heads", HEADS, "--kv-heads", KV_HEADS, "--documents", documents
    )
    assert code == 0, said
    kinds = kinds_for(2, HEADS, KV_HEADS)
    assert {"ring", "ulysses", "head_chunked"} == {kind.kind for kind in kinds}
    rows = [line.split() for line in shown.splitlines()]
    assert [row[1] for row in rows if row[1:] and row[1] in KINDS] == [kind.kind for kind in kinds]
    assert [(one.degrees.kind, one.degrees.heads_per_stage) for one in measured] == [
        (kind.kind, kind.heads_per_stage) for kind in kinds
    ]
    for one in measured:
        assert one.sent_bytes == one.sent_formula > 0, one.degrees
    assert "WRONG" not in shown
    progress = [line for line in said.splitlines() if line.startswith("measuring ")]
    assert len(progress) == len(kinds)
    assert progress[0] == f"measuring 1 of {len(kinds)}: ring"


def test_a_quiet_probe_says_nothing_of_its_progress(answer):
    code, shown, said = answer("-q", *CP, "--heads", 2, "--kv-heads", 1)
    assert (code, said) == (0, "")
    assert "ring" in shown


@pytest.mark.parametrize("error", [float("nan"), 1.0])
def test_another_result_than_one_rank_has_is_a_failure(answer, monkeypatch, error):
    measured = [_measured("ring", 0.0), _measured("ulysses", error)]
    monkeypatch.setattr(probe, "measure_on_ranks", lambda *_: measured)
    code, shown, said = answer(*CP)
    assert code == 1
    assert [line.split()[1] for line in shown.splitlines() if "WRONG" in line] == ["ulysses"]
    assert "error: differs from one rank: ulysses" in said


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (("--seq", 66), "not divisible by 2 x ranks = 4; 64 would do"),
        (("--heads", 6, "--kv-heads", 4), "--kv-heads 4"),
        (("--dtype", "int8"), "float64, float32"),
        (("--device", "tpu"), "cpu or cuda"),
        (("--device", "cuda"), "this machine has 0"),
        (("--kernel", "flash"), "it is one of auto, cpu_flash"),
        (("--kernel", "cuda_flash"), "cuda_flash"),
        (("--documents", 65), "--documents 65 is more than the 64 tokens"),
        (("--head-dim", 33), "--head-dim 33 is odd"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value)),
)
def test_what_cannot_be_probed_is_one_sentence(answer, monkeypatch, words, word):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, shown, said = answer(*CP, *words)
    assert code == 2, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert word in errors[0]
    assert not shown


@pytest.mark.parametrize(
    ("option", "value"), [("--seq", 0), ("--ranks", -1), ("--repeats", 0), ("--batch", -2)]
)
def test_a_size_below_the_least_is_refused(answer, option, value):
    code, _, said = answer(*CP, option, value)
    assert code == 2
    assert option in said


def _raising(rank: int, *_: object) -> None:
    if rank == 1:
        raise RuntimeError("lost its peer")


def _killed(rank: int, *_: object) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("of_rank", "why"), [(_raising, "RuntimeError: lost its peer"), (_killed, "SIGKILL")]
)
def test_a_rank_that_fails_is_named_in_one_line(answer, monkeypatch, of_rank, why):
    monkeypatch.delenv("LONGHAUL_TRACEBACK", raising=False)
    monkeypatch.setattr(probe, "_rank", of_rank)
    code, _, said = answer(*CP)
    assert code == 1
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert errors[0].startswith("error: rank 1 failed: ")
    assert why in errors[0]
    assert "Traceback" not in said


def _measured(kind: str, error: float) -> Measured:
    return Measured(
        degrees=degrees(
            ContextParallelKind(kind=kind), size=2, heads=HEADS, kv_heads=KV_HEADS, head_dim=32,
            seq_length=64, ranks_per_link=2,
        ),
        error=error, sent_bytes=1, sent_formula=1, forward_peak=1, forward_formula=1,
        backward_peak=1, backward_formula=1, forward_seconds=1.0, backward_seconds=1.0,
    )  # fmt: skip
