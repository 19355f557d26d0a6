# SPDX-License-Identifier: Apache-2.0
"""What each stage has read of each source, and the shares that its mix asked for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.mixture.as_read import SourceRead
from eval.report.cells import Cell, Row
from eval.run_folder import StageResults
from recipes.resolved.data_read import DataRead, data_read
from recipes.spec.naming import stage_folder

MEAN = re.compile(r"[\d.e+-]+ of .+ and [\d.e+-]+ of .+")
"""Start of a stage that `longhaul checkpoint average` wrote."""
HEADS = ("share asked", "share read", "tokens read")


@dataclass(frozen=True)
class MixAsRead:
    """What the stages of a run have read, and a sentence for each other one with a recipe."""

    stages: tuple[DataRead, ...]
    unknown: tuple[str, ...]
    heads: tuple[str, ...] = HEADS

    @property
    def tables(self) -> list[tuple[str, list[Row]]]:
        """Each stage in words, and a row of `HEADS` for each of its sources."""
        return [
            (f"{stage.stage}, to step {stage.step:,}", [_row(each) for each in stage.sources])
            for stage in self.stages
        ]

    @property
    def json(self) -> dict[str, Any]:
        """The numbers, as JSON types."""
        return {
            "stages": [
                {
                    "stage": stage.stage,
                    "step": stage.step,
                    "store": str(stage.store),
                    "sources": [source._asdict() for source in stage.sources],
                }
                for stage in self.stages
            ],
            "unknown": list(self.unknown),
        }


def _row(read: SourceRead) -> Row:
    texts = (f"{read.share_asked:.1%}", f"{read.share_read:.1%}", f"{read.tokens:,}")
    return Row(read.source, [Cell(text) for text in texts])


def mix_as_read(run: Path, stages: Sequence[StageResults]) -> MixAsRead:
    """Return what each stage with a recipe and a checkpoint has read of its store."""
    found, unknown = [], []
    for stage in stages:
        if stage.config is None:
            continue
        if stage.record is not None and MEAN.fullmatch(stage.record.start):
            unknown.append(
                f"{stage.name} is a mean of checkpoints and has read nothing itself: "
                f"{stage.record.start}"
            )
            continue
        try:
            read = data_read(stage_folder(run, stage.name))
        except (ValueError, OSError) as error:
            unknown.append(f"What {stage.name} read of each source is not known: {error}")
            continue
        if read is not None:
            found.append(read)
    return MixAsRead(tuple(found), tuple(unknown))
