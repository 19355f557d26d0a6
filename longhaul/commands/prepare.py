# SPDX-License-Identifier: Apache-2.0
"""`longhaul prepare`: convert documents to a token store."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data.formats.by_content import FORMATS, Format
from data.preparation.skip_limit import SKIP_LIMIT
from data.prepare import HELDOUT_FRACTION, VOCAB_SIZE
from longhaul.pages.store_page import show_store
from longhaul.terminal.messages import next_command, note

if TYPE_CHECKING:
    from data.preparation.engine import Engine


def prepare(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the store to write.", show_default=False)
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder or file (text, lines of JSON, compressed or not, Parquet), hf:NAME or"
            " hf:NAME:CONFIG@SPLIT, synthetic:KIND[,NAME=VALUE...] or repositories:PATH; several"
            " as NAME=SOURCE. Without: the Python standard library's source files.",
            show_default=False,
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
    text_key: Annotated[
        str, typer.Option(help="Field or column that holds the text; OBJECT.FIELD in an object.")
    ] = "text",
    no_first_token: Annotated[
        bool,
        typer.Option(
            "--no-first-token",
            help="Begin no document with what the tokenizer puts first, such as <s>.",
        ),
    ] = False,
    file_format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help=f"Format of all files: {', '.join(FORMATS)}.",
            show_default="by their content",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Files of a folder to leave out, as '*.png'.", show_default=False),
    ] = None,
    heldout_fraction: Annotated[
        float, typer.Option(help="Share of the documents kept for evaluation, between 0 and 1.")
    ] = HELDOUT_FRACTION,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Count broken records instead of stopping.")
    ] = False,
    skip_limit: Annotated[
        str,
        typer.Option(help="Broken records that --skip-broken allows: a number, or a share as 1%."),
    ] = SKIP_LIMIT,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace the store at --out, or that of --plan with --merge."
        ),
    ] = False,
    workers: Annotated[
        int | None, typer.Option(help="Processes that tokenize.", show_default="one a core")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="pool: processes of this machine; ray: a Ray cluster.")
    ] = "pool",
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of the Ray cluster, HOST:PORT or ray://HOST:PORT.",
            show_default="RAY_ADDRESS, or the cluster that runs on this machine",
        ),
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Write the plan and the tokenizer, then stop.")
    ] = False,
    plan: Annotated[
        Path | None, typer.Option(help="Folder of a plan to work on, by --task or --merge.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Do part N of --plan, or every Mth part from the Nth on: N/M."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the parts of --plan to the store.")
    ] = False,
) -> None:
    """Turn documents into a token store: tokenizer, train and held-out tokens, manifest.

    An interrupted run continues when the same command is given again.
    """
    from data.preparation.engine import Engine
    from data.preparation.named_sources import parsed_sources
    from data.prepare import prepare as write_store
    from data.prepare import write_plan
    from recipes.models import TINY

    where = Engine(kind=engine, workers=workers, address=address)  # type: ignore[arg-type]
    if plan is not None:
        if out is not None or source or plan_only:
            raise ValueError("--plan names a plan with its store and its sources; leave out others")
        _work_on(plan, task, merge, overwrite, where)
        return
    if task is not None or merge:
        raise ValueError(
            "--task and --merge work on a plan: add --plan FOLDER, which --plan-only prints"
        )
    if out is None:
        raise ValueError("--out is missing; name the folder of the store to write")
    if tokenizer is not None and vocab_size != VOCAB_SIZE:
        raise ValueError("--vocab-size is for a tokenizer that is trained; leave out --tokenizer")
    if skip_limit != SKIP_LIMIT and not skip_broken:
        raise ValueError("--skip-limit limits what --skip-broken skips; add --skip-broken")
    if tokenizer is None:
        _require_vocabulary(out, vocab_size)
        if no_first_token:
            raise ValueError(
                "--no-first-token is for the tokenizer of --tokenizer; one that is trained here "
                "puts nothing first: leave it out"
            )
    sources = parsed_sources(source or [])
    if plan_only:
        work = write_plan(
            sources, out, tokenizer=tokenizer, vocab_size=vocab_size, text_key=text_key,
            first_token=not no_first_token, heldout_fraction=heldout_fraction,
            skip_broken=skip_broken, skip_limit=skip_limit, file_format=file_format,
            skip=skip or (), overwrite=overwrite,
        )  # fmt: skip
        typer.echo(f"{work.count:,} parts of {work.plan.cost / 2**20:,.1f} MiB: {work.folder}")
        command = ["longhaul", "prepare", "--plan", work.folder]
        next_command([*command, "--task", "0/1"], "do all parts; K/N does a share of them")
        replaced = ["--overwrite"] if overwrite else []
        next_command([*command, "--merge", *replaced], "then write the store")
        return
    manifest = write_store(
        sources, out, tokenizer=tokenizer, vocab_size=vocab_size, text_key=text_key,
        first_token=not no_first_token, heldout_fraction=heldout_fraction, skip_broken=skip_broken,
        skip_limit=skip_limit, file_format=file_format, skip=skip or (), overwrite=overwrite,
        engine=where,
    )  # fmt: skip
    show_store(manifest)
    if tokenizer is None and manifest.tokenizer.vocab_size > TINY.vocab:
        note(
            f"note: the card {TINY.name}, which is trained from scratch, has a vocabulary of "
            f"{TINY.vocab:,} tokens; --vocab-size {TINY.vocab} makes a store for it"
        )
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


def _require_vocabulary(out: Path, vocab_size: int) -> None:
    """Raise ValueError if the store of a card would have more tokens than the card."""
    from recipes.models import CARDS
    from recipes.spec.naming import store_folder

    card = CARDS.get(out.name)
    if card is None or out.absolute() != store_folder(card).absolute() or vocab_size <= card.vocab:
        return
    raise ValueError(
        f"--vocab-size is {vocab_size:,}, and --out {out} is the store of the card {card.name}, "
        f"which has {card.vocab:,} tokens; add --vocab-size {card.vocab}, or name another folder"
    )


def _work_on(plan: Path, task: str | None, merge: bool, overwrite: bool, where: "Engine") -> None:
    """Do a share of the parts of a plan, or merge them."""
    from data.prepare import merge_plan, run_tasks

    if merge == (task is not None):
        raise ValueError("--plan is only a folder: add --task N, --task N/M, or --merge")
    if merge:
        show_store(merge_plan(plan, overwrite=overwrite))
        return
    assert task is not None
    if re.fullmatch(r"\d+(/[1-9]\d*)?", task) is None:
        raise ValueError(f"--task {task} is not a part; give N, or N/M: every Mth part from N on")
    number, _, step = task.partition("/")
    done = run_tasks(plan, int(number), int(step) if step else None, where)
    note(f"{done:,} parts were done")


def _model_of(tokenizer: Path) -> Path | None:
    """Return the import or the model that a tokenizer's folder is of, None for any other."""
    from recipes.checkpoints.files import HUGGING_FACE
    from recipes.checkpoints.marker import is_marked

    of_import = tokenizer.name == HUGGING_FACE and is_marked(tokenizer.parent)
    if of_import:
        return tokenizer.parent
    return tokenizer if (tokenizer / "config.json").is_file() else None
