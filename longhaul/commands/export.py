# SPDX-License-Identifier: Apache-2.0
"""`longhaul export`: convert a trained stage to a Hugging Face folder that loads without edits."""

import math
from pathlib import Path
from typing import Annotated

import typer

from longhaul.options import NoVerify
from longhaul.terminal.console import loading
from longhaul.terminal.messages import next_command, note

DTYPES = ("bfloat16", "float16", "float32")
LEAST_SHARD_GIB = 2**-15
"""A smaller one gives a file to nearly every tensor."""


def export(
    source: Annotated[
        Path, typer.Option("--from", help="Folder of a stage, of a checkpoint or of an import.")
    ],
    to: Annotated[Path, typer.Option(help="Folder to write.")],
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}; without it the checkpoint's own.")
    ] = None,
    max_shard_gib: Annotated[float, typer.Option(help="Size of a weight file, at most.")] = 5.0,
    like: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder with config and tokenizer, instead of the import's."
        ),
    ] = None,
    no_verify: NoVerify = False,
) -> None:
    """Export weights, config at the stage's length and rotation, and tokenizer."""
    from data.files.appearing import require_free
    from recipes.checkpoints import files
    from recipes.hugging_face.source_checkpoint import trained

    require_free(to)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    if not (max_shard_gib >= LEAST_SHARD_GIB and math.isfinite(max_shard_gib)):
        raise ValueError(
            f"--max-shard-gib is {max_shard_gib:g}; expected at least {LEAST_SHARD_GIB:g} (32 "
            "KiB), and finite"
        )
    found = trained(source, like)
    files.require_whole(found.checkpoint)
    if (why := files.note(found.checkpoint, not no_verify)) is not None:
        note(f"note: {why}")
    require_free(to, room=found.card.parameters * (4 if dtype == "float32" else 2))
    with loading("Megatron-Core"):
        import torch

        from recipes.hugging_face import export as exporting
    note(f"exporting {found.checkpoint} for {found.length:,} tokens")
    exporting.export(
        found,
        to,
        dtype=None if dtype is None else getattr(torch, dtype),
        max_shard_gib=max_shard_gib,
        verify=not no_verify,
    )
    typer.echo(to)
    next_command(["vllm", "serve", to], "serve it; other programs read the folder too")
