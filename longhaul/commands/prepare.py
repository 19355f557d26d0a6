# SPDX-License-Identifier: Apache-2.0
"""`longhaul prepare`: convert documents to a token store."""

from pathlib import Path
from typing import Annotated

import typer

from data.prepare import HELDOUT_FRACTION, VOCAB_SIZE
from longhaul.pages.store_page import show_store
from longhaul.terminal.messages import next_command


def prepare(
    out: Annotated[Path, typer.Option(help="Folder of the store to write.")],
    source: Annotated[
        str | None,
        typer.Option(
            help="Folder, text file, FILE.jsonl[.gz|.zst], FILE.parquet or"
            " hf:NAME[:CONFIG][@SPLIT]. Without it: the Python standard library's source files."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder or name of a Hugging Face tokenizer. Without it one is trained here."
        ),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Tokens of the tokenizer to train; not with --tokenizer.")
    ] = VOCAB_SIZE,
    text_key: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    heldout_fraction: Annotated[
        float, typer.Option(help="Share of the documents kept for evaluation, between 0 and 1.")
    ] = HELDOUT_FRACTION,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Count broken records instead of stopping.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the store at --out.")
    ] = False,
) -> None:
    """Turn documents into a token store: tokenizer, train and held-out tokens, manifest."""
    from data.prepare import prepare as write_store

    if tokenizer is not None and vocab_size != VOCAB_SIZE:
        raise ValueError("--vocab-size is for a tokenizer that is trained; leave out --tokenizer")
    manifest = write_store(
        source,
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        text_key=text_key,
        heldout_fraction=heldout_fraction,
        skip_broken=skip_broken,
        overwrite=overwrite,
    )
    show_store(manifest)
    model = None if tokenizer is None else _model_of(Path(tokenizer))
    if model is None:
        next_command(
            ["longhaul", "pretrain", "--factory", "NAME", "--store", out],
            "train on it; NAME is a recipe that `longhaul recipes` lists",
        )
    else:
        next_command(
            ["longhaul", "run", "--card", model, "--ladder", "LADDER", "--store", out],
            "train on it; LADDER is your file or a name that `longhaul ladders` lists; without "
            "GPUs add --device cpu",
        )


def _model_of(tokenizer: Path) -> Path | None:
    """Return the import or the model that a tokenizer's folder is of, None for any other."""
    from recipes.checkpoints.files import HUGGING_FACE
    from recipes.checkpoints.marker import is_marked

    of_import = tokenizer.name == HUGGING_FACE and is_marked(tokenizer.parent)
    if of_import:
        return tokenizer.parent
    return tokenizer if (tokenizer / "config.json").is_file() else None
