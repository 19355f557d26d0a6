# SPDX-License-Identifier: Apache-2.0
"""What ranks do besides training, as options of `run` and `pretrain` ask; no part of a recipe."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from longhaul.health.alert import require_alert
from longhaul.jobs.evaluated_training import Interval, describe, with_evaluations
from longhaul.jobs.profile import ProfileRequest, require_profile

if TYPE_CHECKING:
    from recipes.resolved.stage import ResolvedStage


@dataclass(frozen=True, kw_only=True)
class OnRanks:
    """Evaluations, alerts, profile, trackers and debugging of stages that a command trains."""

    evaluate_every: Interval | None = None
    """Steps between evaluations; None: as the stage's folder records."""
    alert: str = ""
    profile: str | None = None
    track: tuple[str, ...] = ()
    debug_comm: bool = False
    """Whether ranks log their communication."""

    def require(self, *, here: bool) -> None:
        """Raise ValueError for an alert that cannot be started `here`, and for a wrong profile."""
        require_alert(self.alert, here=here)
        if self.profile is not None:
            ProfileRequest.of(self.profile)

    def given_to(self, stage: "ResolvedStage") -> "ResolvedStage":
        """Return a stage whose ranks do this."""
        return replace(
            with_evaluations(stage, self.evaluate_every),
            alert=self.alert,
            profile=self.profile,
            track=self.track,
            debug_comm=self.debug_comm,
        )

    def notes(self, stages: "Sequence[ResolvedStage]", *, submitted: bool = False) -> list[str]:
        """Return what ranks do besides training; raise ValueError if they cannot."""
        notes = [
            *describe(stages, self.evaluate_every),
            *require_profile(stages, self.profile, submitted=submitted),
        ]
        if self.debug_comm:
            notes += [_debugged(stage) for stage in stages if not stage.is_done]
        return notes


def _debugged(stage: "ResolvedStage") -> str:
    """Return what the ranks of a stage do whose communication is debugged."""
    files = os.path.relpath(stage.folder / "nccl_*.log")
    logs = f", and log those of NCCL to {files}" if stage.layout.device == "cuda" else ""
    return f"the ranks of {stage.name} compare every collective{logs}; that slows its steps"
