# SPDX-License-Identifier: Apache-2.0
"""Training of which some steps are profiled."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run

from longhaul.jobs.profile_request import FOLDER, ProfileRequest


def add_profile(recipe: "nemo_run.Partial", config: str, words: str) -> None:
    """Add the callback that profiles what the words of --profile name, beside the recipe file."""
    import nemo_run

    from custom_modules.callbacks.profile_steps import ProfileSteps

    request = ProfileRequest.of(words)
    recipe.trainer.callbacks.append(
        nemo_run.Config(
            ProfileSteps,
            folder=str(Path(config).parent / FOLDER),
            first=request.first,
            last=request.last,
            ranks=None if request.ranks is None else list(request.ranks),
            shapes=request.shapes,
            stack=request.stack,
            nsys=request.nsys,
        )
    )
