# SPDX-License-Identifier: Apache-2.0
"""Build folder and target architecture of the CUDA extension that Megatron-Core compiles on import.

torch takes the architecture from the visible devices. With a CUDA toolkit but no device (on a login
node, or in a job without GPUs) it raises an IndexError. A process killed while compiling leaves
torch's lock behind, and every later process waits for it forever. A command sets the variables
during its imports and for the ranks that it starts on this machine. The ranks of a batch job import
Megatron-Core before any code of Longhaul, so its script (`slurm.batch_script`) sets them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FOLDER = "TORCH_EXTENSIONS_DIR"
"""Environment variable: torch's build folder; each job has its own, so it finds no old lock."""
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""Environment variable: the architectures that torch compiles for."""
WITHOUT_DEVICE = "9.0"
"""An architecture that every CUDA toolkit since 11.8 supports; nothing is run on it."""


_GUESSED = ContextVar("guessed", default=False)
"""Whether the variable has its value from `architecture_named`, and not from the user."""


def architecture() -> dict[str, str]:
    """Return the variable to set if no device is visible and the user set none. Imports torch."""
    import torch

    named = "" if _GUESSED.get() else os.environ.get(ARCHITECTURES, "")
    if named in ("", "native") and torch.cuda.device_count() == 0:  # torch would ask the devices
        return {ARCHITECTURES: WITHOUT_DEVICE}
    return {}


def name_architecture() -> None:
    """Set an architecture for the rest of this process (a rank) if none is set or detected."""
    os.environ.update(architecture())


@contextmanager
def architecture_named() -> Iterator[None]:
    """Set an architecture during an import if none is set or detected.

    It is a guess for this machine only: `sbatch` passes the environment on to jobs, whose machines
    have other devices.
    """
    before, guess = os.environ.get(ARCHITECTURES), architecture()
    os.environ.update(guess)
    outer = _GUESSED.set(bool(guess))
    try:
        yield
    finally:
        _GUESSED.reset(outer)
        if before is None:
            os.environ.pop(ARCHITECTURES, None)
        else:
            os.environ[ARCHITECTURES] = before
