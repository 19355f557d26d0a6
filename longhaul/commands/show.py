# SPDX-License-Identifier: Apache-2.0
"""`longhaul show`: show one recipe on one page, and the commands to type next."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longhaul.defaults import planned_cluster
from longhaul.options import (
    Cluster,
    Gpus,
    Json,
    MachineLayout,
    StageCard,
    StageLadder,
    StageLength,
    print_json,
)
from longhaul.terminal.console import loading, print_table, table_for_terminal
from recipes.shipped.machines import Machines
from recipes.spec.cluster import CLUSTER
from recipes.spec.extension_facts import card_facts, lines
from recipes.spec.stage import OWN_SOURCE
from recipes.spec.suggest import lookup

if TYPE_CHECKING:
    from rich.table import Table

    from recipes.shipped.row import Row
    from recipes.spec.model_card import ModelCard
    from recipes.spec.stage import Stage

EXPENDABLE = ("positions", "documents")
"""Columns of the table of stages that are printed once if all stages have the same."""


def show(
    name: Annotated[
        str,
        typer.Argument(help="A shipped recipe; any other by --card, --ladder and --stage."),
    ] = "",
    card: StageCard = "",
    ladder: StageLadder = "",
    stage: StageLength = "",
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Nodes for --card.", show_default="the fewest that fit"),
    ] = None,
    gpus: Gpus = None,
    layout: MachineLayout = "",
    cluster: Cluster = "",
    as_json: Json = False,
    to_yaml: Annotated[
        Path | None, typer.Option(help="Write the recipe, for `longhaul pretrain --yaml`.")
    ] = None,
    to_bridge: Annotated[
        Path | None, typer.Option(help="Write it as a Megatron-Bridge configuration, in YAML.")
    ] = None,
) -> None:
    """Show a recipe: its model, ladder, stage, data and layout, and what to type next."""
    asked = Machines(nodes=nodes, gpus=gpus, layout=layout, cluster=cluster)
    if bool(name) == bool(card or ladder or stage):
        raise ValueError(
            "name one recipe: a shipped one by its NAME, any other by --card, --ladder and --stage"
        )
    row, notes = _named(name, asked) if name else _combined(card, ladder, stage, asked)
    if as_json + (to_yaml is not None) + (to_bridge is not None) > 1:
        raise ValueError("--json prints, --to-yaml and --to-bridge write; take one of them")
    if to_yaml is not None:
        from data.files.writable import require_file

        require_file(to_yaml, "--to-yaml")
        with loading("NeMo and Megatron-Core"):
            from recipes.resolved import yaml_file

            yaml_file.write(row(), to_yaml)
        typer.echo(to_yaml)
    elif to_bridge is not None:
        from data.files.whole import write_text
        from data.files.writable import require_file
        from recipes.megatron_bridge.config import text

        require_file(to_bridge, "--to-bridge")
        write_text(to_bridge, text(row.card, row.ladder, row.seq_length, row.layout))
        typer.echo(to_bridge)
    elif as_json:
        print_json(content(row))
    else:
        _print(row, notes)


def _combined(card: str, ladder: str, stage: str, asked: Machines) -> "tuple[Row, list[str]]":
    """Return a card on a stage as a row, and the notes on it."""
    from recipes.shipped import select

    row = select.row_of(card, ladder, stage, asked, planned_cluster() or CLUSTER)
    return row, list(select.notes(row))


def _named(name: str, asked: Machines) -> "tuple[Row, list[str]]":
    """Return the recipe of a name; raise ValueError for other names, with hints."""
    from recipes.shipped import rotation
    from recipes.shipped.machines import on_machines
    from recipes.shipped.table import ROWS

    of_ladder = [row.name for row in ROWS.values() if name in (row.ladder.name, row.card.name)]
    if name not in ROWS and of_ladder:
        raise ValueError(
            f"{name!r} is a ladder or a card, not a recipe; its recipes are {', '.join(of_ladder)}"
        )
    row = lookup("recipe", name, ROWS)
    other = rotation.of_other_cards(row.ladder, row.card)
    if asked.sized or asked.cluster:
        row = on_machines(row, asked)
    return row, [other] if other else []


def content(row: "Row") -> dict[str, Any]:
    """Return all that a page shows, in numbers."""
    ladder = row.ladder
    return {
        "name": row.name,
        "card": asdict(row.card) | {"native_rope": row.card.native_rope.to_dict()},
        "ladder": {
            "name": ladder.name,
            "source": ladder.source,
            "data": ladder.data,
            "starts_from": ladder.starts_from,
            "ours": list(ladder.ours),
            "departures": list(ladder.departures),
            "cards": list(ladder.cards),
            "stages": [_stage(stage, row.card) for stage in ladder.stages],
        },
        "stage": row.seq_length,
        "layout": asdict(row.layout),
        "nodes": row.nodes,
        "cluster": row.cluster,
        "source": row.source,
        "extension_facts": [
            asdict(fact) for fact in card_facts(row.card, row.layout, row.seq_length)
        ],
        "commands": [line for line, _ in commands(row)],
    }


def _stage(stage: "Stage", card: "ModelCard") -> dict[str, Any]:
    from longhaul.pages.recipe_facts import resolved

    return asdict(stage) | {
        "rope": resolved(stage.rope, card).to_dict(),
        "lr": {"shape": type(stage.lr).__name__.lower(), **asdict(stage.lr)},
        "steps": stage.steps,
        "sequences_per_batch": stage.sequences_per_batch,
        "warmup_steps": stage.lr.warmup_steps(stage.steps),
    }


def commands(row: "Row") -> Iterator[tuple[str, str]]:
    """Yield the commands to type next, each with its purpose."""
    from longhaul.terminal.next_commands import sized, submitted
    from recipes.notation.layout import words_of
    from recipes.shipped.machines import STATED
    from recipes.shipped.table import ROWS
    from recipes.spec.naming import recipe_name

    card, ladder, on_cpu = row.card, row.ladder, row.layout.device == "cpu"
    stages = {recipe_name(card, ladder, stage): stage for stage in ladder.stages}
    shipped = ROWS.get(row.name) == row
    job = submitted(row, row.layout.world_size, row.stage)
    gpus = None if on_cpu else job.gpus
    if ladder.stages[0].start == "card" and not card.start:
        yield _import(row)
    yield _prepare(row)
    yield f"longhaul rehearse {row.name if shipped else _words(row)}", "small, on a few CPU ranks"
    if not on_cpu:
        asked = {
            "seq": _word(row.seq_length),
            "tokens-per-batch": _word(row.stage.tokens_per_batch),
            "tokens": row.stage.tokens,
            "cluster": shlex.quote(row.cluster),
        }
        options = " ".join(f"--{name} {value}" for name, value in asked.items())
        if ladder.path:
            options = f"--ladder {ladder.word} --cluster {asked['cluster']}"
        if row.variant or row.pinned in STATED:
            options += f" --layout {shlex.quote(words_of(row.layout))}"
        sizes = sized(row.layout.world_size, row.cluster)
        yield f"longhaul plan {card.word} {options} {sizes}", "its memory and time"
    if row.stage.start == "previous":
        before = list(stages)[list(stages).index(row.stage_name) - 1]
        of_before = before if before in ROWS else _words(row, stages[before])
        yield f"longhaul show {of_before}", "the stage before, which this one starts from"
    if row.nodes == 1:
        alone = f"--factory {row.name}" if shipped else _words(row)
        yield f"longhaul pretrain {alone}", "this stage, on this machine"
    else:
        explained = f"; {job.explained}" if job.explained else ""
        yield job.command, f"this stage, on {row.nodes} nodes{explained}"
    if len(stages) == 1 or row.variant or row.pinned in STATED:
        return
    if not (gpus or on_cpu or all(name in ROWS for name in stages)):
        return
    here = all(ROWS[name].nodes == 1 for name in stages) if gpus is None else row.nodes == 1
    if here:
        whole = f"longhaul run --ladder {ladder.word} --card {card.word}"
        yield f"{whole}{'' if shipped else _sizes(row)}", "all stages in order"
    else:
        yield replace(job, stage=None).command, "all stages in order, as jobs"


def _words(row: "Row", stage: "Stage | None" = None) -> str:
    """Return the options that name the recipe of a row, or of another stage on its machines."""
    from recipes.spec.naming import length_word

    length = length_word((stage or row.stage).seq_length).upper()
    return (
        f"--card {row.card.word} --ladder {row.ladder.word} --stage {length}"
        f"{_sizes(row, with_layout=stage is None)}"
    )


def _sizes(row: "Row", *, with_layout: bool = True) -> str:
    """Return the options of a row's machines, after a blank."""
    from longhaul.terminal.next_commands import sized
    from recipes.notation.layout import words_of
    from recipes.shipped.machines import STATED

    stated = row.pinned in STATED and with_layout
    layout = f" --layout {shlex.quote(words_of(row.layout))}" if stated else ""
    if row.layout.device == "cpu":
        return layout or " --device cpu"
    sizes = sized(row.layout.world_size, row.cluster)
    return f" --cluster {shlex.quote(row.cluster)} {sizes}{layout}"


def _import(row: "Row") -> tuple[str, str]:
    """Return the command that imports the weights that the ladder starts from, and its purpose."""
    from longhaul.terminal.next_commands import importing
    from recipes.spec.naming import MODELS

    card, to = row.card, MODELS / row.card.name
    if card.path and card.hf_id is not None:
        purpose = f"its weights, to {to}"
    elif card.hf_id is None:
        purpose = (
            f"weights of yours in Hugging Face's format, to {to}; or put a checkpoint there, or "
            "name it by resume.start=PATH"
        )
    else:
        others = row.ladder.starts_from
        began = f"; the source began with {others}" if others else ""
        purpose = f"the published weights, to {to}{began}"
    return importing(card), purpose


def _prepare(row: "Row") -> tuple[str, str]:
    """Return the command that prepares a store with the tokenizer of those weights."""
    from longhaul.terminal.next_commands import preparing

    foreign = row.ladder.stages[0].start != "scratch" and row.card.hf_id is None
    whose = ", by the tokenizer of your weights" if foreign else ""
    return preparing(row.card, row.ladder), f"the documents as tokens{whose}"


def _word(tokens: int) -> str:
    from recipes.spec.naming import length_word

    return length_word(tokens).upper()


def _print(row: "Row", notes: Sequence[str]) -> None:
    from rich.table import Table

    from longhaul.pages import recipe_facts

    of_stages = [_line(stage, row) for stage in row.ladder.stages]
    alike = [title for title in EXPENDABLE if len({line[title] for line in of_stages}) == 1]
    console, stages, left_out = table_for_terminal(lambda without: _stages(row, without), alike)
    page = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(2):
        page.add_column(overflow="fold")
    said = [f"{title} {of_stages[0][title]}" for title in left_out]
    for title, words in _parts(row, said, notes):
        page.add_row(title, "\n".join(words))
    place = f"stage {row.ladder.stages.index(row.stage) + 1} of {len(row.ladder.stages)}"
    typer.echo(f"{row.name}: {row.card.name} at {recipe_facts.length(row.stage)}, {place}\n")
    print_table(console, page)
    typer.echo()
    print_table(console, stages)
    typer.echo("\nnext")
    for line, what_for in commands(row):  # unwrapped, with nothing after it: a line to copy
        typer.echo(f"  {what_for}:\n    {line}")


def _parts(
    row: "Row", said: Sequence[str], notes: Sequence[str]
) -> "Iterator[tuple[str, Iterable[str]]]":
    """Yield the parts of a page under their names; `said` belongs to the stage too."""
    from longhaul.pages import recipe_facts

    yield "model", (row.card.name, *recipe_facts.model(row.card))
    if facts := lines(card_facts(row.card, row.layout, row.seq_length)):
        yield "extends", facts
    own = row.ladder.source == OWN_SOURCE
    yield "ladder", (f"{row.ladder.name}: {'your own' if own else row.ladder.source}",)
    for title, sentences in (("ours", row.ladder.ours), ("departs", row.ladder.departures)):
        if sentences:
            yield title, [f"- {sentence}" for sentence in sentences]
    yield "data", (row.ladder.data or f"the {'ladder' if own else 'source'} does not say",)
    if row.ladder.stages[0].start == "card":
        yield "weights", (recipe_facts.weights(row.ladder, row.card),)
    yield (
        "stage",
        (*recipe_facts.training(row.stage, row.card), *([", ".join(said)] if said else ())),
    )
    yield "layout", (*recipe_facts.layout(row), f"based on: {row.source}")
    if notes:
        yield "note", notes


def _stages(row: "Row", without: Sequence[str]) -> "Table":
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    rows = [_line(stage, row) for stage in row.ladder.stages]
    titles = [title for title in rows[0] if title not in without]
    for title in titles:
        table.add_column(
            title,
            no_wrap=title not in ("RoPE", "learning rate"),
            justify="right" if title in ("tokens", "batch", "steps") else "left",
        )
    for line in rows:
        table.add_row(*(line[title] for title in titles), style="bold" if line[""] else None)
    return table


def _line(stage: "Stage", row: "Row") -> dict[str, str]:
    """Return the row of a stage in the table of stages, by column."""
    from longhaul.pages import recipe_facts
    from recipes.spec import naming

    return {
        "": ">" if stage == row.stage else "",
        "length": recipe_facts.length(stage),
        "RoPE": recipe_facts.rotation(stage, row.card),
        "tokens": naming.amount(stage.tokens),
        "batch": recipe_facts.batch(stage),
        "steps": f"{stage.steps:,}",
        "learning rate": recipe_facts.schedule(stage),
        "documents": stage.documents,
        "positions": stage.positions.kind,
    }
