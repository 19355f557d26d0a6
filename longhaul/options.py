# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have: the run they read and the ranks they start on it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

K_IS = "K is 1,024, M is 1,024 K"
"""What help says of lengths and of the tokens of a step; budgets are in powers of ten."""

Run = Annotated[Path, typer.Option(help="Run folder, as `longhaul run` leaves it.")]
Ranks = Annotated[int, typer.Option(min=1, help="Processes.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Ranks that share each layer.")]
ContextParallel = Annotated[int, typer.Option(min=1, help="Ranks that share each sequence.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; without it what the run trained on.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with units in its names.")]


def print_json(content: Any) -> None:
    """Print mappings, lists and dataclasses as JSON on stdout; NaN and infinity become null."""
    from eval.run_folder import plain

    typer.echo(json.dumps(plain(content), indent=1, allow_nan=False, default=str))


def require_no_json(context: typer.Context, as_json: bool) -> None:
    """Raise ValueError where --json stands before a sub-command, which takes it behind its name."""
    if as_json:
        raise ValueError(
            f"--json before {context.invoked_subcommand} has no effect; write it after "
            f"{context.invoked_subcommand}"
        )


Verify = Annotated[
    bool | None,
    typer.Option(
        "--verify/--no-verify",
        help="Read the whole store and compare its SHA-256 / compare no store and no checkpoint.",
        show_default="a sample of the store, the whole checkpoint",
    ),
]
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Do not compare the checkpoint's SHA-256.")
]


def length_of(option: str, word: str) -> int:
    """Return the tokens that the value of an option means; raise ValueError with the option."""
    from recipes.spec.naming import length_from

    try:
        return length_from(word)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def require_device(device: str | None) -> None:
    """Raise ValueError for a device that is neither cpu nor cuda; None and "" stand for none."""
    if device not in (None, "", "cpu", "cuda"):
        raise ValueError(f"--device is {device!r}; it is cpu or cuda")
