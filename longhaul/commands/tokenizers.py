# SPDX-License-Identifier: Apache-2.0
"""`longhaul tokenizers`: compare tokenizers on documents of your own."""

from typing import Annotated

import typer

from longhaul.options import K_IS, Json, length_of, print_json
from longhaul.terminal.messages import next_command

HIDDEN = 4096
SEQ = "64K"


def tokenizers(
    names: Annotated[
        list[str], typer.Argument(help="Folders or names of Hugging Face tokenizers, or stores.")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Documents, as `prepare --source` takes them, but not synthetic ones."
            " Without it: the Python standard library's source files."
        ),
    ] = None,
    text_key: Annotated[
        str, typer.Option(help="Field or column that holds the text; OBJECT.FIELD in an object.")
    ] = "text",
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave broken records out instead of stopping.")
    ] = False,
    sample_mib: Annotated[
        int, typer.Option(min=1, help="MiB of text to compare on, from the first document on.")
    ] = 16,
    card: Annotated[
        str, typer.Option(help="Model card, for the cost of vocabulary and attention.")
    ] = "",
    hidden: Annotated[
        int | None,
        typer.Option(min=1, help="Hidden size, instead of --card.", show_default=f"{HIDDEN:,}"),
    ] = None,
    seq: Annotated[str, typer.Option(help=f"Sequence whose logits are counted ({K_IS}).")] = SEQ,
    as_json: Json = False,
) -> None:
    """Compare tokenizers on your text: tokens, vocabulary cost, round trip, speed, attention."""
    from data.tokenization.tokenizer_comparison import Shape, as_rows, compare
    from longhaul.pages.tokenizers_page import show_comparison

    if card and hidden is not None:
        raise ValueError("--hidden and --card both set the hidden size; leave one of them out")
    length = length_of("--seq", seq)
    shape = Shape(hidden=hidden or HIDDEN)
    if card:
        from recipes.shipped.named import card_named

        model = card_named(card)
        shape = Shape(
            hidden=model.hidden,
            tied_embeddings=model.tied_embeddings,
            layers=model.layers,
            attention_width=model.heads * model.head_dim,
        )
    compared = compare(
        names, data, text_key=text_key, skip_broken=skip_broken, sample_bytes=sample_mib * 2**20
    )
    rows = as_rows(compared, shape, length)
    if as_json:
        print_json(
            {
                "source": compared.source,
                "documents": compared.documents,
                "sample_bytes": compared.bytes,
                "cores": compared.cores,
                "seq_length_tokens": length,
                "hidden": shape.hidden,
                "tokenizers": rows,
            }
        )
        return
    show_comparison(compared, rows, shape, length)
    best = min(rows, key=lambda row: float(str(row["tokens_per_document"])))
    name = best["name"]
    words = ["longhaul", "prepare", "--tokenizer", name, "--out", "STORE"]
    if data:
        words = ["longhaul", "prepare", "--source", data, "--tokenizer", name, "--out", "STORE"]
    words += ["--text-key", text_key] if text_key != "text" else []
    words += ["--skip-broken"] if skip_broken else []
    next_command(
        words,
        "prepare a store with the one that needs the fewest tokens; STORE is a folder to write",
    )
