# SPDX-License-Identifier: Apache-2.0
"""Where and for what Megatron-Core compiles its CUDA extension, which it does when imported.

torch asks the devices what to compile for, and without one ends in an IndexError where a CUDA
toolkit is installed: on a login node, or in a job that asked for no GPU. A process that is killed
while it compiles leaves torch's lock behind, for which every later one waits without end. A command
has the variables while it imports, and the ranks that it starts here have them; those of a batch
job, whose task imports Megatron-Core before any line of ours, get them from its script
(`slurm.batch_script`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

FOLDER = "TORCH_EXTENSIONS_DIR"
"""Environment variable: where torch compiles; a job has a folder of its own, so no old lock."""
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""Environment variable: the devices that torch compiles for."""
WITHOUT_DEVICE = "9.0"
"""An architecture that every CUDA toolkit since 11.8 knows; nothing is run on it."""


def architecture() -> dict[str, str]:
    """Return the variable to set where no device answers and the user names none. Imports torch."""
    import torch

    named = os.environ.get(ARCHITECTURES, "")
    if named in ("", "native") and torch.cuda.device_count() == 0:  # torch would ask the devices
        return {ARCHITECTURES: WITHOUT_DEVICE}
    return {}


def name_architecture() -> None:
    """Set an architecture for the rest of this process, a rank, where none is named or found."""
    os.environ.update(architecture())


@contextmanager
def architecture_named() -> Iterator[None]:
    """Set an architecture while something is imported, where none is named or found.

    It is a guess for this machine: `sbatch` hands the environment to jobs, whose machines have
    other devices.
    """
    before = os.environ.get(ARCHITECTURES)
    name_architecture()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(ARCHITECTURES, None)
        else:
            os.environ[ARCHITECTURES] = before
