# SPDX-License-Identifier: Apache-2.0
"""Tables of what the stages were trained with, and of what that cost."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from eval.report.cells import MISSING, Cell, Row, number, value_text
from eval.run_folder import StageRecord, StageResults

MFU, OF_PROCESS = "causal MFU", "peak of the process"
OPTIONAL = (MFU, OF_PROCESS)
"""Columns that are left out if no stage has them."""


class Cost(NamedTuple):
    """What the steps of a stage took; NaN where it was not measured."""

    steps: int
    tokens: float
    seconds: float
    tokens_per_second_per_rank: float
    """Median over the steps after the first."""
    mfu: float
    peak_memory_bytes: float
    """Of tensors, on the rank that took most; on CPU of the process."""
    device_memory_bytes: float
    """Of the process on its GPU, on the rank that took most."""
    last_loss: float


def facts(stages: Sequence[StageResults]) -> list[Row]:
    """Return rows of facts of the stages; cells that differ from the stage before are marked."""
    rows: list[Row] = []
    before: list[str] | None = None
    for stage in stages:
        if stage.record is None:
            rows.append(Row(stage.name, [], note="has not been started"))
            continue
        texts = _fact_texts(stage.record)
        cells = [
            Cell(text, marked=before is not None and text != before[i])
            for i, text in enumerate(texts)
        ]
        rows.append(Row(stage.name, cells))
        before = texts
    return rows


def _fact_texts(record: StageRecord) -> list[str]:
    rope = dict(record.rope)
    method = str(rope.pop("method", MISSING))
    base, factor = rope.pop("base", math.nan), rope.pop("factor", math.nan)
    more = ", ".join(
        f"{key} {value_text(value)}" for key, value in rope.items() if value is not None
    )
    layout = " ".join(f"{key.upper()} {value_text(value)}" for key, value in record.layout.items())
    return [
        f"{record.seq_length:,}",
        method,
        value_text(base),
        value_text(factor),
        more or MISSING,
        layout or MISSING,
        number(record.tokens, "{:,.0f}"),
        number(record.tokens_per_batch, "{:,.0f}"),
        record.start or MISSING,
    ]


def costs(stages: Sequence[StageResults]) -> tuple[list[str], list[Row]]:
    """Return the column heads and the rows of the cost of each stage."""
    heads = ["steps", "tokens", "time", "tokens/s per rank", MFU, "peak memory", OF_PROCESS,
             "last loss"]  # fmt: skip
    rows = [Row(stage.name, _cost_cells(cost(stage))) for stage in stages if stage.steps]
    for head in OPTIONAL:
        at = heads.index(head)
        if all(row.cells[at].text == MISSING for row in rows):
            del heads[at]
            for row in rows:
                del row.cells[at]
    return heads, rows


def cost(stage: StageResults) -> Cost:
    """Return what a stage that has steps took."""
    steps = stage.steps
    settled = steps[1:] or steps  # the first step of a stage includes start-up costs
    seconds = [step.seconds for step in steps if math.isfinite(step.seconds)]
    return Cost(
        steps=len(steps),
        tokens=sum(stage.step_tokens()),
        seconds=sum(seconds) if seconds else math.nan,
        tokens_per_second_per_rank=_median([each.tokens_per_second_per_rank for each in settled]),
        mfu=_median([step.mfu for step in settled]),
        peak_memory_bytes=_largest([step.peak_memory_bytes for step in steps]),
        device_memory_bytes=_largest([step.device_memory_bytes for step in steps]),
        last_loss=steps[-1].loss,
    )


def _cost_cells(of: Cost) -> list[Cell]:
    process = of.device_memory_bytes  # on CPU that of tensors is not known, and both are equal
    return [
        Cell(f"{of.steps:,}"),
        Cell(number(of.tokens, "{:,.0f}")),
        Cell(_duration(of.seconds) if math.isfinite(of.seconds) else MISSING),
        Cell(number(of.tokens_per_second_per_rank, "{:,.0f}")),
        Cell(number(of.mfu, "{:.1%}")),
        Cell(number(of.peak_memory_bytes / 2**30, "{:.2f} GiB")),
        Cell(MISSING if process == of.peak_memory_bytes else number(process / 2**30, "{:.2f} GiB")),
        Cell(number(of.last_loss, "{:.2f}")),
    ]


def _largest(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) if finite else math.nan


def _median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes = f"{rest // 60} min {rest % 60:02} s"
    return f"{hours} h {minutes}" if hours else minutes
