# SPDX-License-Identifier: Apache-2.0
"""`longhaul merge`: average two checkpoints of one model, for example before and after a stage."""

from pathlib import Path
from typing import Annotated

import typer

from longhaul.terminal.console import loading
from longhaul.terminal.messages import next_command, note

FOLDER = "Folder of a stage, of a checkpoint or of an import"


def merge(
    first: Annotated[Path, typer.Argument(help=f"{FOLDER}.")],
    second: Annotated[
        Path,
        typer.Argument(help=f"{FOLDER}; the mean gets its recipe, length, rotation, tokenizer."),
    ],
    to: Annotated[Path, typer.Option(help="Folder to write.")],
    share: Annotated[float, typer.Option(help="Weight of the second, 0 to 1.")] = 0.5,
) -> None:
    """Average the weights of two checkpoints into a stage to evaluate, export or start from."""
    from data.files.appearing import require_free
    from recipes.hugging_face.source_checkpoint import checkpoint_of

    require_free(to)
    if not 0 <= share <= 1:
        raise ValueError(f"--share is {share:g}; the weight of the second must be from 0 to 1")
    before, after = checkpoint_of(first), checkpoint_of(second)
    with loading("torch"):
        from recipes.checkpoints import merge as merging
    note(f"averaging {1 - share:g} of {before} and {share:g} of {after}")
    merging.merge(before, after, to, share=share)
    typer.echo(to)
    words = ["longhaul", "export", "--from", to, "--to", f"{to}_hf"]
    next_command(words, "export it as a Hugging Face folder")
