# SPDX-License-Identifier: Apache-2.0
"""Training that is watched: health, evaluations, profiles. What each rank of a stage runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run

from longhaul.jobs.evaluated_training import add_evaluations
from longhaul.jobs.profile import add_profile
from slurm import entrypoint
from slurm.preflight.requirements import Expected
from slurm.preflight.run import SECONDS


def train_watched(
    config: str,
    every: int | None = None,
    profile: str | None = None,
    track: Sequence[str] = (),
    alert: str = "",
    expected: Expected | None = None,
    seconds: float = SECONDS,
) -> None:
    """Train the stage of a recipe file and check its health; `alert` is called for each finding.

    The model is evaluated `every` few steps (0: by its own time; None: not at all), and steps are
    profiled that `profile`, the words of --profile, names. Metrics are also sent to the trackers of
    the names in `track`. The machines are checked first as by `slurm.entrypoint.train`.
    """

    def add_callbacks(recipe: "nemo_run.Partial") -> None:
        if every is not None:
            add_evaluations(recipe, every)
        if profile is not None:
            add_profile(recipe, config, profile)
        if track:
            add_trackers(recipe, track)
        check_health(recipe, alert)

    entrypoint.train(config, expected=expected, seconds=seconds, change=add_callbacks)


def add_trackers(recipe: "nemo_run.Partial", names: Sequence[str]) -> None:
    """Add the callback that sends the metrics of each step to trackers."""
    import nemo_run

    from recipes.nemo2.trackers import Trackers
    from recipes.resolved.stage import ResolvedStage

    folder = str(ResolvedStage.of(recipe).folder)
    recipe.trainer.callbacks.append(nemo_run.Config(Trackers, names=list(names), folder=folder))


def check_health(recipe: "nemo_run.Partial", alert: str = "") -> None:
    """Have a recipe measure its ranks and check its health, which changes no number of it."""
    import nemo_run

    from custom_modules.callbacks.rank_times import RankTimes
    from longhaul.health.on_ranks import Health
    from recipes.resolved.stage import ResolvedStage

    folder = Path(ResolvedStage.of(recipe).metrics).parent
    recipe.trainer.callbacks += [
        nemo_run.Config(RankTimes),
        nemo_run.Config(Health, folder=str(folder), alert=alert),
    ]
