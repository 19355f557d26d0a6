# SPDX-License-Identifier: Apache-2.0
"""What ranks do besides training, as options of `run` and `pretrain` ask; no part of a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from longhaul.health.alert import require_alert
from longhaul.jobs.evaluated_training import Interval, describe, with_evaluations
from longhaul.jobs.profile_request import ProfileRequest, nsys_command, require_profile

if TYPE_CHECKING:
    from recipes.resolved.stage import ResolvedStage


@dataclass(frozen=True, kw_only=True)
class OnRanks:
    """Evaluations, alerts, profile and trackers of the stages that a command trains."""

    evaluate_every: Interval | None = None
    """Steps between evaluations; None: as the stage's folder records."""
    alert: str = ""
    profile: str | None = None
    track: tuple[str, ...] = ()

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
        )

    def notes(self, stages: "Sequence[ResolvedStage]", *, submitted: bool = False) -> list[str]:
        """Return what is evaluated and profiled of stages; raise ValueError if it cannot be."""
        notes = [
            *describe(stages, self.evaluate_every),
            *require_profile(stages, self.profile, submitted=submitted),
        ]
        if of_nsys := nsys_command(self.profile):
            notes.append(f"nsys records it where it starts the ranks: {of_nsys}")
        return notes
