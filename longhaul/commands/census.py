# SPDX-License-Identifier: Apache-2.0
"""`longhaul census`: count a store's documents by length, and what each length keeps whole."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from longhaul.options import Json, print_json


def census(
    store: Annotated[Path, typer.Argument(help="Token store.")],
    lengths_only: Annotated[
        bool,
        typer.Option(
            "--lengths-only",
            help="Read the indexes, not the tokens: no copies, no compressibility.",
        ),
    ] = False,
    sample: Annotated[
        int, typer.Option(min=1, help="Documents of each source whose text is compressed.")
    ] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Seed of that sample.")] = 0,
    png: Annotated[
        Path | None, typer.Option(help="PNG: tokens by length, what is kept whole, padding.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Count a store's documents by length, and what each sequence length keeps whole."""
    from data.census.census import census as count
    from data.store import Manifest
    from longhaul.pages.census_page import holding_most, show_census
    from longhaul.terminal.messages import next_command
    from recipes.spec.naming import length_word

    if png is not None:
        from data.files.writable import require_file

        require_file(png, "--png", (".png",))
    manifest = Manifest.load(store)
    counted = count(manifest, lengths_only=lengths_only, sample=sample, seed=seed)
    if as_json:
        print_json({"store": str(store), **asdict(counted)})
    else:
        show_census(counted)
        chosen = holding_most(counted.together)
        length = length_word(chosen.seq_length_tokens).upper()
        next_command(
            ["longhaul", "plan", "CARD", "--seq", length, "--store", store],
            f"plan a stage; packed rows of {length} keep {chosen.best_fit_tokens:.0%} of the tokens"
            " in whole documents; CARD is a model that `longhaul recipes --cards` lists",
        )
    if png is not None:
        from longhaul.pages.census_plot import draw

        draw(png, counted, str(store))
        typer.echo(png, err=as_json)
