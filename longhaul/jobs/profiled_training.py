# SPDX-License-Identifier: Apache-2.0
"""Training of which some steps are profiled."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run

from longhaul.jobs.profile_request import FOLDER, ProfileRequest


def add_profile(recipe: "nemo_run.Partial", config: str, words: str) -> None:
    """Add the callback that profiles what the words of --profile name, next to the recipe file.

    The one that compares the kernel times of GPUs is taken out on every rank. CUPTI passes its
    records to one reader in a process: PyTorch's profiler would become it, lose the kernels outside
    of `training_step`, where that callback turns records off, and keep its buffers afterwards; and
    below nsys a process must not call CUPTI.
    """
    import nemo_run

    from custom_modules.callbacks.profile_steps import ProfileSteps
    from custom_modules.callbacks.stragglers import Stragglers

    request = ProfileRequest.of(words)
    recipe.trainer.callbacks = [
        one
        for one in recipe.trainer.callbacks
        if getattr(one, "__fn_or_cls__", None) is not Stragglers
    ]
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
