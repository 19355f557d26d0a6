# SPDX-License-Identifier: Apache-2.0
"""The CUDA extension that Megatron-Core compiles on import, left out or kept from doing harm.

It is for inference in CUDA's unified memory, which Longhaul does not use. A process killed while
compiling it leaves torch's lock behind, and every later process waits for it forever; and with a
CUDA toolkit but no device (on a login node, or in a job without GPUs) torch, which takes the
architecture from the visible devices, raises an IndexError. A command leaves the extension out of
its imports. The ranks of a job import Megatron-Core before any code of Longhaul: a command for
those that it starts on this machine, and the script of a batch job (`slurm.batch_script`), set a
build folder of the job's own, and the architecture where it cannot be asked for.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

FOLDER = "TORCH_EXTENSIONS_DIR"
"""Environment variable: torch's build folder; each job has its own, so it finds no old lock."""
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""Environment variable: the architectures that torch compiles for."""
WITHOUT_DEVICE = "9.0"
"""An architecture that every CUDA toolkit since 11.8 supports; nothing is run on it."""
NAME = "managed_alloc_runtime"
"""Megatron-Core's extension."""
_GUESSED = ContextVar("guessed", default=False)
"""Whether the variable has its value from `during_import`, and not from the user."""


def architecture() -> dict[str, str]:
    """Return the variable to set if no device is visible and the user set none. Imports torch."""
    import torch

    named = "" if _GUESSED.get() else os.environ.get(ARCHITECTURES, "")
    if named in ("", "native") and torch.cuda.device_count() == 0:  # torch would ask the devices
        return {ARCHITECTURES: WITHOUT_DEVICE}
    return {}


def prepare_process() -> None:
    """Leave the extension out of the rest of this process (a rank); name an architecture if none
    is set or detected."""
    from torch.utils import cpp_extension

    os.environ.update(architecture())
    cpp_extension.load_inline = _without_megatrons(cpp_extension.load_inline)


def _without_megatrons(load_inline: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function, which refuses the extension as if it could not be compiled."""

    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == NAME:
            raise RuntimeError(f"{NAME} is left out: Longhaul does not use it")
        return load_inline(name, *args, **kwargs)

    return load


@contextmanager
def during_import() -> Iterator[None]:
    """Leave the extension out of an import; name an architecture if none is set or detected.

    The architecture is a guess for this machine only: `sbatch` passes the environment on to jobs,
    whose machines have other devices.
    """
    from torch.utils import cpp_extension

    before, guess = os.environ.get(ARCHITECTURES), architecture()
    os.environ.update(guess)
    outer = _GUESSED.set(bool(guess))
    load_inline = cpp_extension.load_inline
    cpp_extension.load_inline = _without_megatrons(load_inline)
    try:
        yield
    finally:
        cpp_extension.load_inline = load_inline
        _GUESSED.reset(outer)
        if before is None:
            os.environ.pop(ARCHITECTURES, None)
        else:
            os.environ[ARCHITECTURES] = before
