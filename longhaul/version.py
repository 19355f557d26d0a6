# SPDX-License-Identifier: Apache-2.0
"""The version of this tree and of the libraries that its results depend on; imports none."""

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTION = "longhaul-recipes"
LIBRARIES = ("torch", "nemo_toolkit", "megatron-core", "nemo_run", "transformers")
TREE = Path(__file__).resolve().parents[1]


def versions() -> dict[str, str]:
    """Return the versions that a run's figures depend on, read from the installed metadata."""
    return {name: version(name) for name in LIBRARIES}


def commit(tree: Path = TREE) -> str:
    """Return the commit of a checkout, with `and changes` if tracked files differ from it.

    Empty if the folder is not a git checkout of its own, or git is not installed.
    """
    if shutil.which("git") is None or not (tree / ".git").exists():
        return ""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(tree), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    hash_ = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{hash_} and changes" if hash_ and changed else hash_


def page() -> str:
    """Return a line for Longhaul, with its commit in a checkout, and one for each library."""
    try:
        own = version(DISTRIBUTION)
    except PackageNotFoundError:
        own = "not installed"
    revision = commit()
    lines = {"longhaul": f"{own} ({revision})" if revision else own, **versions()}
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items())
