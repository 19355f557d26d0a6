# SPDX-License-Identifier: Apache-2.0
"""`longhaul ladders`: list the shipped ladders, write a file for one's own, check such a file."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longhaul.options import (
    K_IS,
    Checking,
    Json,
    NativeContext,
    card_at,
    length_of,
    print_json,
    require_no_json,
)
from longhaul.terminal.messages import next_command, note

if TYPE_CHECKING:
    from recipes.spec.model_card import ModelCard
    from recipes.spec.stage import Ladder
    from recipes.spec.suites import SuiteRun

app = typer.Typer(
    cls=Checking,
    help="List the shipped ladders, or write and check one of your own.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


FEWEST_STEPS = 100
"""Steps that a new stage has at least where no batch is given."""
SHOWN_BATCH = f"about 4M, or less for {FEWEST_STEPS} steps"


@app.callback(invoke_without_command=True)
def ladders(context: typer.Context, as_json: Json = False) -> None:
    """List the shipped ladders, or write and check one of your own."""
    if context.invoked_subcommand is not None:
        require_no_json(context, as_json)
        return
    from recipes.ladders import LADDERS

    if as_json:
        print_json([_content(ladder) for ladder in LADDERS.values()])
        return
    from rich.table import Table

    from longhaul.terminal.console import show

    table = Table("ladder", "stages", "cards", "source", box=None, header_style="bold")
    for ladder in LADDERS.values():
        stages, cards = ", ".join(_lengths(ladder)), str(len(ladder.cards))
        table.add_row(ladder.name, stages, cards, ladder.source)
    show(lambda _: table)


@app.command()
def new(
    file: Annotated[Path, typer.Argument(help="YAML file to write.")],
    card: Annotated[
        str, typer.Option(help="With --seq: the card, a name, a folder or hf:NAME.")
    ] = "",
    seq: Annotated[
        str, typer.Option(help=f"Write one stage of this length, such as 96K ({K_IS}).")
    ] = "",
    tokens: Annotated[
        str, typer.Option(help="With --seq: budget, such as 5B (10^9).", show_default="1B")
    ] = "",
    tokens_per_batch: Annotated[
        str,
        typer.Option(help=f"With --seq: tokens of a step ({K_IS}).", show_default=SHOWN_BATCH),
    ] = "",
    native_context: NativeContext = "",
) -> None:
    """Write a commented ladder to edit: of two stages, or of one for a card and a length."""
    from data.files.whole import write_text
    from data.files.writable import require_file
    from recipes.notation import ladder_file

    require_file(file, "FILE", (".yaml", ".yml"))
    if file.exists():
        raise ValueError(f"{file} exists already; name a new file")
    if not seq and (card or tokens or tokens_per_batch or native_context):
        raise ValueError(
            "--card, --tokens, --tokens-per-batch and --native-context are of one stage; add --seq"
        )
    text = _of_one_stage(file, card, seq, tokens, tokens_per_batch, native_context) if seq else ""
    write_text(file, text or ladder_file.template(file))
    typer.echo(file)
    words = ["longhaul", "ladders", "check", file, "--card", card or "llama3_8b"]
    next_command(words, "after editing, check it for a card")


def _of_one_stage(
    file: Path, card: str, seq: str, tokens: str, tokens_per_batch: str, native_context: str
) -> str:
    from recipes.notation.ladder_file import of_one_stage
    from recipes.planner.batch_size import even_batch
    from recipes.spec.naming import budget_from
    from recipes.spec.units import M

    length, model = length_of("--seq", seq), card_at(card, native_context)
    if length < model.native_context:
        raise ValueError(
            f"--seq is {seq}, and the context of {model.name} is {model.native_context:,} tokens "
            "already; name a longer one"
        )
    budget = budget_from(tokens) if tokens else 10**9
    if tokens_per_batch:
        batch = length_of("--tokens-per-batch", tokens_per_batch)
    else:
        batch = even_batch(min(4 * M, budget // FEWEST_STEPS), length, gpus=1)
    return of_one_stage(file, model, seq_length=length, tokens=budget, tokens_per_batch=batch)


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="Ladder file, YAML or Python, or a shipped name.")],
    card: Annotated[
        str, typer.Option(help="Card that it trains: a name, a folder or hf:NAME.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Check a ladder, for a card if one is named, and show its stages."""
    from longhaul.terminal.next_commands import lacks_weights
    from recipes.shipped.named import combined, ladder_named

    recomputed: list[str] = []
    if card:
        model, ladder, recomputed = combined(card, file)
        if lacks_weights(model, ladder):
            recomputed = [*recomputed, _without_weights(model)]
    else:
        ladder = ladder_named(file)
    for said in recomputed:
        note(f"note: {said}")
    if as_json:
        print_json(_content(ladder))
        return
    from rich.table import Table

    from longhaul.pages.recipe_facts import rotation_in_full
    from longhaul.terminal.console import show
    from recipes.spec.naming import amount, length_shown

    table = Table(
        "stage", "rotation", "tokens", "steps", "batch", "peak rate", "documents", "starts from",
        box=None, header_style="bold",
    )  # fmt: skip
    for stage in ladder.stages:
        table.add_row(
            length_shown(stage.seq_length),
            "the card's" if stage.rope == "native" else rotation_in_full(stage.rope),
            amount(stage.tokens),
            f"{stage.steps:,}",
            length_shown(stage.tokens_per_batch),
            f"{stage.lr.peak:g}",
            stage.documents,
            stage.start,
        )
    show(lambda _: table)
    for suite in ladder.suites:
        typer.echo(_suite_shown(suite))
    if card:
        words = ["longhaul", "plan", card, "--ladder", file, "--gpus", "8"]
        next_command(words, "plan its stages on GPUs")


def _without_weights(card: "ModelCard") -> str:
    from longhaul.terminal.next_commands import importing
    from recipes.spec.naming import MODELS

    return (
        f"the first stage starts from the card's weights, and {MODELS / card.name} is not there "
        f"yet: {importing(card)} makes it; for random weights state `start: scratch` of that stage"
    )


def _suite_shown(suite: "SuiteRun") -> str:
    from recipes.spec.naming import length_shown

    lengths = ", ".join(length_shown(length) for length in suite.lengths)
    samples = "" if suite.limit is None else f", {suite.limit:,} samples of each task"
    made = f", prompts of {lengths}" if lengths else ""
    return f"suites: {', '.join(suite.tasks)}{made}{samples}"


def _lengths(ladder: "Ladder") -> list[str]:
    from recipes.spec.naming import length_shown

    return [length_shown(stage.seq_length) for stage in ladder.stages]


def _content(ladder: "Ladder") -> dict[str, object]:
    """Return a ladder for programs; lengths and budgets in tokens."""
    return {
        "name": ladder.name,
        "source": ladder.source,
        "cards": ladder.cards,
        "stages": [
            {
                "seq_length_tokens": stage.seq_length,
                "target_length_tokens": stage.target_length,
                "rope": "native" if stage.rope == "native" else stage.rope.to_dict(),
                "tokens": stage.tokens,
                "tokens_per_batch": stage.tokens_per_batch,
                "steps": stage.steps,
                "peak_rate": stage.lr.peak,
                "documents": stage.documents,
                "mix": None if stage.mix is None else asdict(stage.mix),
                "recovers_tokens": stage.recovers,
                "start": stage.start,
                "optimizer": stage.optimizer,
            }
            for stage in ladder.stages
        ],
    }
