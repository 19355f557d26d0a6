# SPDX-License-Identifier: Apache-2.0
"""`longhaul adopt`: make a store of token files that other tools wrote, without copying them."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from longhaul.options import Json, print_json
from longhaul.terminal.messages import next_command


def adopt(
    tokenizer: Annotated[
        str, typer.Option(help="Folder or name of the Hugging Face tokenizer that made the files.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the store to write.")],
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[NAME=]PATH]...",
            help="Megatron's files: a folder, a .bin or .idx, or the name that both have. With "
            "NAME, all of them are one source.",
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="The same as NAME=PATH without --name; may be repeated.",
            show_default="the name of the file",
        ),
    ] = None,
    heldout_fraction: Annotated[
        float | None,
        typer.Option(
            help="Share of each source's documents kept for evaluation, between 0 and 1."
        ),
    ] = None,
    heldout_documents: Annotated[
        int | None,
        typer.Option(
            help="Documents of each source kept for evaluation, more of the longer ones.",
            show_default="at most 1,000, and a tenth of the tokens",
        ),
    ] = None,
    without_eod: Annotated[
        str,
        typer.Option(
            help="Documents that do not end with the tokenizer's eos token: refuse, keep or "
            "leave-out."
        ),
    ] = "refuse",
    leave_out_empty: Annotated[
        bool, typer.Option("--leave-out-empty", help="Leave empty documents out; do not stop.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the store at --out.")
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make a token store of Megatron's .bin and .idx files from other tools; nothing is copied."""
    from data.adoption.adopt import adopt as write_store
    from data.adoption.checks import HeldOut, WithoutEod
    from data.adoption.pairs import Named
    from longhaul.pages.store_page import show_store, store_as_json

    heldout = HeldOut(fraction=heldout_fraction, documents=heldout_documents)
    if without_eod not in get_args(WithoutEod):
        raise ValueError(
            f"--without-eod is {without_eod!r}; expected one of {', '.join(get_args(WithoutEod))}"
        )
    named = [Named.of_word(word) for word in paths or []]
    named += [Named.parse(word) for word in name or []]
    if not named:
        raise ValueError(
            "no files are named; write `longhaul adopt PATH`, such as /data/web_text_document for "
            "web_text_document.bin and web_text_document.idx"
        )
    manifest = write_store(
        named,
        out,
        tokenizer=tokenizer,
        heldout=heldout,
        without_eod=without_eod,  # type: ignore[arg-type]  # one of them, by the check above
        leave_out_empty=leave_out_empty,
        overwrite=overwrite,
    )
    if as_json:
        print_json(store_as_json(manifest))
        return
    show_store(manifest)
    next_command(
        ["longhaul", "data", "inspect", out], "see its lengths, and what each length keeps whole"
    )
