# SPDX-License-Identifier: Apache-2.0
"""Tables of what the stages were trained with, and of what that cost."""

import math
from collections.abc import Sequence
from statistics import median

from eval.report.cells import MISSING, Cell, Row, number, value_text
from eval.run_folder import StageRecord, StageResults

MFU = "causal MFU"


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
    heads = ["steps", "tokens", "time", "tokens/s per rank", MFU, "peak memory", "last loss"]
    rows = [Row(stage.name, _cost_cells(stage)) for stage in stages if stage.steps]
    mfu = heads.index(MFU)
    if all(row.cells[mfu].text == MISSING for row in rows):
        del heads[mfu]
        for row in rows:
            del row.cells[mfu]
    return heads, rows


def _cost_cells(stage: StageResults) -> list[Cell]:
    steps = stage.steps
    settled = steps[1:] or steps  # the first step of a stage includes start-up costs
    seconds = [step.seconds for step in steps if math.isfinite(step.seconds)]
    peaks = [step.peak_memory_bytes for step in steps if math.isfinite(step.peak_memory_bytes)]
    return [
        Cell(f"{len(steps):,}"),
        Cell(number(sum(stage.step_tokens()), "{:,.0f}")),
        Cell(_duration(sum(seconds)) if seconds else MISSING),
        Cell(number(_median([step.tokens_per_second_per_rank for step in settled]), "{:,.0f}")),
        Cell(number(_median([step.mfu for step in settled]), "{:.1%}")),
        Cell(f"{max(peaks) / 2**30:.2f} GiB" if peaks else MISSING),
        Cell(number(steps[-1].loss, "{:.2f}")),
    ]


def _median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes = f"{rest // 60} min {rest % 60:02} s"
    return f"{hours} h {minutes}" if hours else minutes
