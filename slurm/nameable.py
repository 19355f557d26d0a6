# SPDX-License-Identifier: Apache-2.0
"""Folders that Slurm, pyxis or an SSH tunnel cannot name; light."""

import os
import shlex
from pathlib import Path

PATTERN = "%\\\n"
"""Characters with a special meaning to Slurm in the name of a log."""
RUN_FOLDER = "/nemo_run"
"""Text that nemo-run replaces everywhere in a script that has no container."""
BETWEEN_MOUNTS = " \t,:"
"""Characters that end a path in mounts of pyxis."""


def require_nameable(folder: Path, *, in_container: bool, through_ssh: bool) -> None:
    """Raise ValueError if Slurm, the container or the tunnel could not name a run's folder."""
    path, why = os.path.abspath(folder), "Slurm"
    refused = {*PATTERN} & {*path}
    if not refused and not in_container and RUN_FOLDER in path:
        refused, why = {RUN_FOLDER}, "nemo-run, which replaces it by another folder,"
    if not refused and in_container:
        refused, why = {*BETWEEN_MOUNTS} & {*path}, "pyxis, which mounts it into the container,"
    if not refused and through_ssh:
        refused = {one for one in path if shlex.quote(one) != one}
        why = "nemo-run, which copies it through the SSH tunnel,"
    if refused:
        shown = " and ".join(map(repr, sorted(refused)))
        raise ValueError(
            f"{why} cannot name {path!r}, which contains {shown}; choose another --out"
        )
