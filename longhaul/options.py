# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have: the run they read and the ranks they start on it."""

from pathlib import Path
from typing import Annotated

import typer

K_IS = "K is 1,024, M is 1,024 K"
"""What help says of lengths and of the tokens of a step; budgets are in powers of ten."""
CLUSTER = "dgx_h100"
"""The cluster that is meant where none is named."""

Run = Annotated[Path, typer.Option(help="Run folder, as `longhaul run` leaves it.")]
Ranks = Annotated[int, typer.Option(min=1, help="Processes.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Ranks that share each layer.")]
ContextParallel = Annotated[int, typer.Option(min=1, help="Ranks that share each sequence.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; without it what the run trained on.")
]


def length_of(option: str, word: str) -> int:
    """Return the tokens that the value of an option means; raise ValueError with the option."""
    from recipes.naming import length_from

    try:
        return length_from(word)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def require_device(device: str | None) -> None:
    """Raise ValueError for a device that is neither cpu nor cuda; None and "" stand for none."""
    if device not in (None, "", "cpu", "cuda"):
        raise ValueError(f"--device is {device!r}; it is cpu or cuda")
