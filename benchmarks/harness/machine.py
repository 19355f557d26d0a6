# SPDX-License-Identifier: Apache-2.0
"""What a result stands on: date, machine, versions, command and commit."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

TREE = Path(__file__).resolve().parents[2]


def facts(packages: Sequence[str] = ()) -> dict[str, str]:
    """Return the facts of this run; `packages` are distributions whose versions matter."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": _machine(),
        "versions": ", ".join(
            [
                f"Python {platform.python_version()}",
                f"torch {torch.__version__}",
                *(f"{package} {version(package) or 'not installed'}" for package in packages),
            ]
        ),
        "command": _command(),
        "commit": _commit(),
    }


def version(package: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> str:
    cores = f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores"
    if not torch.cuda.is_available():
        return cores
    name, cudnn = torch.cuda.get_device_name(), torch.backends.cudnn.version()
    return f"{name}, CUDA {torch.version.cuda}, cuDNN {cudnn}; {cores}"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _command() -> str:
    module = sys.modules["__main__"].__spec__
    name = sys.argv[:1] if module is None else ["-m", module.name.removesuffix(".__main__")]
    return shlex.join(["python", *name, *sys.argv[1:]])


def _commit() -> str:
    try:
        return _git("rev-parse", "--short=12", "HEAD") + (
            " with changes" if _git("status", "--porcelain") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not a git checkout"


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=TREE, capture_output=True, text=True, check=True)
    return done.stdout.strip()
