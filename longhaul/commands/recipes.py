# SPDX-License-Identifier: Apache-2.0
"""`longhaul recipes`: list the shipped recipes as a table that can be searched by words.

A card on a ladder without a row is found as well, with the command that trains it.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longhaul.options import Json, print_json
from longhaul.terminal.console import show
from longhaul.terminal.messages import note

if TYPE_CHECKING:
    from rich.table import Table

    from recipes.shipped.row import Row
    from recipes.spec.model_card import ModelCard
    from recipes.spec.stage import Ladder, Stage

COLUMNS = ("name", "model", "length", "RoPE", "tokens", "GPUs", "source")
SHOWN = 3
"""Recipes that a sentence names."""
OF_CARDS = ("card", "family", "weights", "native context", "ladders")


def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Show recipes with all of these words, in any column."),
    ] = None,
    cards: Annotated[
        bool, typer.Option("--cards", help="List the model cards, and the ladders of each.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the shipped recipes: length, rotation, tokens, GPUs (nodes x GPUs), source."""
    from recipes.shipped.table import ROWS

    if cards:
        _list_cards(words or [], as_json=as_json)
        return
    others = list(unlisted(words)) if words else []
    try:
        found = matching(words or [], ROWS)
    except ValueError:
        if not others:
            raise
        if as_json:
            print_json([one.described for one in others])
            return
        for one in others:
            typer.echo(one.sentence)
        return
    if others:
        for ladder in dict.fromkeys(one.ladder.name for one in others):
            there = ", ".join(one.card.name for one in others if one.ladder.name == ladder)
            note(f"note: --card, --ladder and --stage also train {there} on {ladder}")
    if as_json:
        print_json([described(row) for row in found])
        return
    left_out = show(lambda without: _table(found, without), ("source", "model", "RoPE"))
    if left_out:
        typer.echo()
        show(lambda _: _sources(found))
    if "RoPE" in left_out:
        note("\nnote: the terminal is too narrow for RoPE; `longhaul show NAME` has it")


def matching(words: Sequence[str], rows: "Mapping[str, Row]") -> "list[Row]":
    """Return the rows that have every word in their columns; raise ValueError if there are none."""
    lines = {name: "\n".join(cells(row)).casefold() for name, row in rows.items()}
    wanted = [word.casefold() for word in words]
    found = [rows[name] for name, line in lines.items() if all(word in line for word in wanted)]
    if not found:
        raise ValueError(_nothing(wanted, rows, lines))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlisted:
    """A card on a ladder that lists it, without a row."""

    card: "ModelCard"
    ladder: "Ladder"
    stage: "Stage"

    @property
    def command(self) -> str | None:
        """The command that trains it; None if no number of nodes tried holds it."""
        from longhaul.terminal.next_commands import training

        return training(self.card, self.ladder, self.stage)

    @property
    def sentence(self) -> str:
        """The card, its ladder and the command, in a sentence."""
        on_ladder = f"card {self.card.name} is on ladder {self.ladder.name}"
        command = self.command
        if command is None:
            return f"{on_ladder}: {_too_large(self.card, self.ladder)}"
        return f"{on_ladder}: {command}"

    @property
    def described(self) -> dict[str, Any]:
        """The same for JSON."""
        from recipes.spec.naming import length_shown

        return {
            "card": self.card.name,
            "ladder": self.ladder.name,
            "stage": length_shown(self.stage.seq_length),
            "seq_length": self.stage.seq_length,
            "command": self.command,
        }


def unlisted(words: Sequence[str]) -> Iterator[Unlisted]:
    """Yield the cards of ladders that have every word and no row, at the first stage that does."""
    from longhaul.pages import recipe_facts
    from recipes.ladders import LADDERS
    from recipes.models import CARDS
    from recipes.shipped.table import ROWS

    listed = {(row.card.name, row.ladder.name) for row in ROWS.values()}
    wanted = [word.casefold() for word in words]
    for ladder in LADDERS.values():
        for card in (CARDS[name] for name in ladder.cards):
            if (card.name, ladder.name) in listed:
                continue
            for stage in ladder.stages:
                length, rope = recipe_facts.length(stage), recipe_facts.rotation(stage, card)
                said = (card.name, card.hf_id or "", ladder.name, ladder.source, length, rope)
                line = "\n".join(said).casefold()
                if all(word in line for word in wanted):
                    yield Unlisted(card=card, ladder=ladder, stage=stage)
                    break


def _list_cards(words: Sequence[str], *, as_json: bool) -> None:
    """Print the cards that have every word in their columns."""
    from rich.table import Table

    from recipes.models import CARDS

    lines = {name: card_cells(card) for name, card in CARDS.items()}
    wanted = [word.casefold() for word in words]
    found = {
        name: line
        for name, line in lines.items()
        if all(word in "\n".join(line).casefold() for word in wanted)
    }
    if not found:
        raise ValueError(f"no card has {' and '.join(map(repr, wanted))}; leave the words out")
    if as_json:
        print_json([described_card(CARDS[name]) for name in found])
        return

    def table(_without: Sequence[str]) -> Table:
        made = Table(box=None, header_style="bold", pad_edge=False)
        for title in OF_CARDS:
            right = title in ("weights", "native context")
            made.add_column(title, no_wrap=title != "ladders", justify="right" if right else "left")
        for line in found.values():
            made.add_row(*line)
        return made

    show(table)


def card_cells(card: "ModelCard") -> tuple[str, ...]:
    """Return the row of a card in the table of cards, by column."""
    from recipes.spec import naming
    from recipes.spec.naming import length_shown

    return (
        card.name,
        card.facts.name,
        naming.amount(card.parameters),
        length_shown(card.native_context),
        ", ".join(_ladders(card)),
    )


def described_card(card: "ModelCard") -> dict[str, Any]:
    """Return the same in numbers, for JSON."""
    return {
        "name": card.name,
        "family": card.family,
        "parameters": card.parameters,
        "native_context": card.native_context,
        "pattern": None if card.pattern is None else card.pattern.to_dict(),
        "hf_id": card.hf_id,
        "ladders": _ladders(card),
    }


def _ladders(card: "ModelCard") -> list[str]:
    from recipes.ladders import LADDERS

    return [ladder.name for ladder in LADDERS.values() if card.name in ladder.cards]


def cells(row: "Row") -> tuple[str, ...]:
    """Return the table's row of a recipe, by column."""
    from longhaul.pages import recipe_facts
    from recipes.spec import naming

    return (
        row.name,
        row.card.name,
        recipe_facts.length(row.stage),
        recipe_facts.rotation(row.stage, row.card),
        naming.amount(row.stage.tokens),
        recipe_facts.machines(row),
        row.ladder.source,
    )


def described(row: "Row") -> dict[str, Any]:
    """Return the same in numbers, for JSON."""
    from longhaul.pages.recipe_facts import gpu, resolved

    on_gpus = row.layout.device == "cuda"
    return {
        "name": row.name,
        "card": row.card.name,
        "ladder": row.ladder.name,
        "seq_length": row.stage.seq_length,
        "target_length": row.stage.target_length,
        "rope": resolved(row.stage.rope, row.card).to_dict(),
        "rope_of_card": resolved(row.stage.rope, row.card) == row.card.native_rope,
        "tokens": row.stage.tokens,
        "cluster": row.cluster,
        "nodes": row.nodes,
        "gpu": gpu(row.cluster) if on_gpus else None,
        "ranks": row.layout.world_size,
        "device": row.layout.device,
        "source": row.ladder.source,
    }


def _table(rows: "Sequence[Row]", without: Sequence[str]) -> "Table":
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    shown = [number for number, title in enumerate(COLUMNS) if title not in without]
    for title in (COLUMNS[number] for number in shown):
        right = title == "tokens"
        table.add_column(title, no_wrap=title != "RoPE", justify="right" if right else "left")
    for row in rows:
        content = cells(row)
        table.add_row(*(content[number] for number in shown))
    return table


def _sources(rows: "Sequence[Row]") -> "Table":
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ladder", no_wrap=True)
    table.add_column("source")
    for name, source in {row.ladder.name: row.ladder.source for row in rows}.items():
        table.add_row(name, source)
    return table


def _nothing(words: Sequence[str], rows: "Mapping[str, Row]", lines: Mapping[str, str]) -> str:
    """Return why no recipe has the words, with similar names, or a command that would work.

    Words that are each in some recipe may be a card and a length of a ladder, which are combined.
    """
    from longhaul.terminal.next_commands import new_ladder
    from recipes.models import CARDS

    strange = [word for word in words if not any(word in line for line in lines.values())]
    if strange:
        cards = [card for card in CARDS.values() if strange[0] in card.name.casefold()]
        alone = [card for card in cards if not _ladders(card)]
        if len(strange) == 1 and alone:
            example = new_ladder(alone[0], 2 * alone[0].native_context)[1]
            return (
                f"no shipped ladder lists {' or '.join(card.name for card in alone)}; --card and "
                f"--ladder train it on one of another card, and `{example}` writes one of your own"
            )
        parts = {part for name in lines for part in name.split("_")}
        names = [*lines, *(row.card.name for row in rows.values()), *sorted(parts)]
        near = difflib.get_close_matches(strange[0], dict.fromkeys(names), n=3, cutoff=0.7)
        hint = f"did you mean {' or '.join(near)}?" if near else "`longhaul recipes` lists them all"
        return f"no recipe has {strange[0]!r}; {hint}"
    places = [
        _where(word, [name for name, line in lines.items() if word in line]) for word in words
    ]
    said = f"no recipe has all of these words: {'; '.join(places)}"
    return f"{said}. A card can be trained on any ladder; {_combined(words)}"


def _where(word: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" * (len(names) > SHOWN))
    return f"{word!r} is in {shown}"


def _combined(words: Sequence[str]) -> str:
    """Return the commands for the stages that words name by a card and by a length or a ladder.

    Those whose rotation does not suit the card are named, with the reason, only where their ladder
    is; a card and a length alone lead to a ladder of one's own instead.
    """
    from longhaul.terminal.next_commands import YOUR_CLUSTER, new_ladder, training
    from recipes.ladders import LADDERS
    from recipes.models import CARDS
    from recipes.shipped.rotation import heads_refusal, rotation_refusal
    from recipes.spec.naming import length_shown

    named = [ladder for name, ladder in LADDERS.items() if name in words]
    found = [
        (rotation_refusal(card, stage) or "", card, ladder, stage)
        for name, card in CARDS.items()
        for ladder in named or LADDERS.values()
        for stage in ladder.stages
        if name in words
        and {*words} - {name, ladder.name} <= {length_shown(stage.seq_length).casefold()}
        and heads_refusal(card, stage) is None
    ]
    suited = [one for one in found if not one[0]]
    if found and not named:
        longer = [one for one in found if one[3].seq_length >= one[1].native_context]
        if not longer:
            card = found[0][1]
            return f"{card.name} was trained for {card.native_context:,} tokens; name more"
        suited = [one for one in longer if not one[0]]
        if not suited:
            _, card, _, stage = longer[0]
            return f"write one: `{new_ladder(card, stage.seq_length)[1]}`"
    commands = []
    for unsuited, card, ladder, stage in suited or found:
        command = training(card, ladder, stage)
        if command is not None:
            commands.append(f"`{command}`" + (f" (but {unsuited})" if unsuited else ""))
        if len(commands) == SHOWN:
            break
    if commands:
        shown = f"type {' or '.join(commands)}"
        if YOUR_CLUSTER in shown:
            shown += f", with {YOUR_CLUSTER} a copy of a file that `longhaul clusters` lists"
        return shown
    if found:
        _, card, ladder, _ = found[0]
        return _too_large(card, ladder)
    return "type `longhaul pretrain --card CARD --ladder LADDER --stage LENGTH`"


def _too_large(card: "ModelCard", ladder: "Ladder") -> str:
    from recipes.shipped.regenerate import MOST_NODES
    from recipes.spec.cluster import CLUSTER

    return (
        f"no layout of {card.name} fits up to {MOST_NODES} nodes of {CLUSTER}; `longhaul plan "
        f"{card.name} --ladder {ladder.name} --nodes {MOST_NODES}` says what is short"
    )
