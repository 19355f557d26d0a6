# SPDX-License-Identifier: Apache-2.0
"""`longhaul ruler convert`: sample files from published suites."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longhaul.options import K_IS, Json, length_of, print_json
from longhaul.terminal.messages import next_command, note

if TYPE_CHECKING:
    from eval.given_suites.convert import Converted

LENGTHS = "8K,16K,32K,64K,128K"
EXTRA_TOKENS = 128


def convert(
    suite: Annotated[
        str,
        typer.Argument(help="mrcr, graphwalks, helmet-recall, helmet-rag or helmet-rerank."),
    ],
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder with the files of openai/mrcr or openai/graphwalks, or HELMET's data."
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option(help="Folder or name of the model's Hugging Face tokenizer.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; it may hold other samples.")],
    lengths: Annotated[
        str, typer.Option(help=f"Most tokens of prompt and answer together, as 8K,128K ({K_IS}).")
    ] = LENGTHS,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of each task and length at most; without it all."),
    ] = None,
    extra_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens to generate beyond those of the answer.")
    ] = EXTRA_TOKENS,
    as_json: Json = False,
) -> None:
    """Convert the published samples of a suite, each in the bin of its length."""
    from eval.given_suites.suites import suite_named

    chosen = suite_named(suite)
    tokens_of = sorted({length_of("--lengths", word) for word in lengths.split(",")})
    files = chosen.files(folder)
    from data.files.writable import require_folder
    from longhaul.terminal.console import busy, loading, plain_console

    require_folder(out, "--out")
    with loading("the tokenizer"):
        from data.tokenization.tokenizer import load
        from eval.given_suites.convert import convert as convert_files
        from eval.ruler.tokens import Tokens

        tokens = Tokens(load(tokenizer))
    with busy(plain_console(sys.stderr), f"{chosen.name}: {len(files):,} files"):
        found = convert_files(
            folder, out, chosen, tokens=tokens, lengths=tokens_of, samples=samples,
            extra_tokens=extra_tokens,
        )  # fmt: skip
    if as_json:
        print_json({"suite": chosen.name, **asdict(found)})
        return
    from longhaul.pages.ruler_page import EXPENDABLE, show_files

    show_files(chosen.name, found.files, [False] * len(found.files), not_shown=EXPENDABLE)
    typer.echo(found.folder)
    for line in _notes(found, tokens_of[-1]):
        note(f"note: {line}")
    next_command(
        ["longhaul", "ruler", "predict", found.folder, "--export", "EXPORT", "--out",
         "predictions.jsonl"],
        "answer the samples with the Hugging Face folder EXPORT, or with --run and --stage",
    )  # fmt: skip


def _notes(found: "Converted", longest: int) -> Iterator[str]:
    """Yield what was left out, and how prompts were written."""
    from eval.given_suites.convert import SPECIAL, TOO_LONG, TOO_SHORT
    from eval.given_suites.helmet import POPULAR

    reasons = {
        TOO_LONG: f"have more than {longest:,} tokens",
        TOO_SHORT: "have at most half of the smallest length that holds them",
        SPECIAL: "have a special token of the tokenizer in a message",
        POPULAR: "ask about a popular subject",
    }
    for reason, words in reasons.items():
        if count := found.left_out.get(reason):
            yield f"{count:,} samples are left out, since they {words}"
    if not found.by_template:
        yield "the tokenizer has no chat template; prompts are User: and Assistant: paragraphs"
    elif found.joined:
        yield (
            f"in {found.joined:,} prompts messages of the same role are joined, since the chat "
            "template refuses two in a row"
        )
