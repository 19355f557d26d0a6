# SPDX-License-Identifier: Apache-2.0
"""The git tree that jobs get: that of the folder they are submitted from, as committed; light."""

import subprocess
from pathlib import Path

PACKAGES = ("recipes", "custom_modules", "data", "eval", "slurm", "longhaul")
FILES_READ = (".py", ".yaml", ".jinja")


def uncommitted() -> list[str]:
    """Return notes on files that jobs do not get, which are those that are not committed.

    Raises ValueError outside of a git tree, and where git is not installed.
    """
    try:
        said = _git("status", "--porcelain", "--untracked-files=all")
    except FileNotFoundError:
        raise ValueError("jobs get a git tree, and git is not installed here; install it") from None
    if said.returncode:
        reason = " ".join(said.stderr.split()).removeprefix("fatal: ")
        raise ValueError(
            "jobs get the git tree of the folder that they are submitted from, and git refuses "
            f"{Path.cwd()} ({reason}); run the command in a clone of Longhaul"
        )
    if _git("rev-parse", "--verify", "--quiet", "HEAD").returncode:
        raise ValueError(
            f"jobs get the committed tree, and that of {Path.cwd()} has no commit; run the command "
            "in a clone of Longhaul"
        )
    lines = said.stdout.splitlines()
    changed = sum(not line.startswith("?? ") for line in lines)
    new = [line[3:] for line in lines if line.startswith("?? ") and _is_ours(line[3:])]
    notes = []
    if changed:
        notes.append(f"{changed} changed files are not committed; jobs get the committed tree")
    if new:
        shown = ", ".join(new[:4]) + (", ..." if len(new) > 4 else "")
        notes.append(f"{len(new)} new files are not in git, and jobs do not get them: {shown}")
    return notes


def _git(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False)


def _is_ours(path: str) -> bool:
    return path.partition("/")[0] in PACKAGES and path.endswith(FILES_READ)
