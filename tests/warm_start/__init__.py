# SPDX-License-Identifier: Apache-2.0
"""Processes that import NeMo start as forks of one that has: what the tests set up for that."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

HOOK = Path(__file__).resolve().parent / "hook"
FOLDER = "LONGHAUL_WARM_START"
MORE = {"LONGHAUL_WARM_START_MORE": "1"}
"""Environment where what imports torch or transformers alone is forked too, as pages do often."""
MODULES = (
    "nemo.collections.llm", "nemo.lightning.pytorch.callbacks", "nemo_run",
    "megatron.core.models.gpt", "megatron.core.optimizer",
    "megatron.core.dist_checkpointing.strategies.torch", "transformers",
)  # fmt: skip
"""What the server imports: libraries whose import takes a rank 10 to 20 seconds of CPU."""


WAIT_SECONDS = 20.0
"""Longest that processes which end with their worker are waited for."""


def set_up() -> None:
    """Have every Python started from now on look for the server, which the first one starts.

    Without NeMo (tests/every_megatron.py) every process imports what it needs by itself.
    """
    if find_spec("nemo") is None:
        return
    os.environ[FOLDER] = str(make_folder())
    os.environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(HOOK), os.environ.get("PYTHONPATH")) if part
    )


def make_folder(modules: Iterable[str] = MODULES) -> Path:
    """Return a new folder for a server that imports the modules and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm-", dir="/tmp"))  # a socket's path is short
    (folder / "owner").write_text(str(os.getpid()))
    (folder / "modules").write_text("\n".join(modules))
    return folder


def tear_down() -> None:
    """Remove the server's folder; the server ends with this process."""
    if folder := os.environ.pop(FOLDER, None):
        shutil.rmtree(folder, ignore_errors=True)


def computed(*, wait: bool = True) -> list[tuple[str, float]]:
    """Return tests with the CPU seconds of a process that was forked for them and has ended.

    Those that end with their worker, such as servers of ranks, are waited for. The server's own
    imports stand under the name of its file.
    """
    folder = Path(os.environ.get(FOLDER, "/nonexistent"))
    end = time.monotonic() + WAIT_SECONDS * wait
    while any(folder.glob("*.forked")) and time.monotonic() < end:
        time.sleep(0.05)
    try:
        lines = (folder / "cpu").read_text().splitlines()
    except OSError:  # no test needed the server
        return []
    return [(test, float(seconds)) for seconds, _, test in (line.partition(" ") for line in lines)]


def count_under(test: str, seconds: float, instead_of: str) -> None:
    """Count seconds of a process that was forked for one test under the test that used them."""
    if (folder := os.environ.get(FOLDER)) and Path(folder).is_dir():
        with (Path(folder) / "cpu").open("a") as file:
            file.write(f"{seconds:.2f} {test}\n{-seconds:.2f} {instead_of}\n")


def path_with(*folders: Path | str) -> str:
    """Return a `PYTHONPATH` that begins with the folders and still reaches the server."""
    return os.pathsep.join(map(str, (*folders, HOOK)))


def cold() -> dict[str, str]:
    """Return this environment for a process that imports everything itself."""
    return {name: value for name, value in os.environ.items() if name != FOLDER}


def forked_for(process: int) -> int | None:
    """Return the process that was forked in the place of one that stands in for it, if any."""
    place = Path(os.environ.get(FOLDER, "/nonexistent")) / f"{process}.forked"
    try:
        return int(place.read_text())
    except (OSError, ValueError):  # none, or it has ended meanwhile
        return None
