# SPDX-License-Identifier: Apache-2.0
"""`longhaul rope`: compare rotations with the model's own by pair, as a table and a plot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from data.files.writable import require_file
from longhaul.commands.rope_search import search
from longhaul.options import (
    K_IS,
    Json,
    NativeContext,
    card_at,
    length_of,
    print_json,
    require_no_json,
)
from longhaul.terminal.console import loading, show
from longhaul.terminal.messages import note

if TYPE_CHECKING:
    from custom_modules.rope.config import RopeScaling
    from custom_modules.rope.frequency_report import FrequencyBands

app = typer.Typer(
    help="Look at how a rotation stretches a model's context, or search for one.",
    invoke_without_command=True,
)
app.command()(search)
LIKE = "METHOD[:KEY=VALUE,...], before=own to stretch the model's own, or a file"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model whose rotation is examined."""

    name: str
    head_dim: int
    rope: "RopeScaling"
    trained: int
    """Tokens of context it was trained at."""


@app.callback()
def rope(
    context: typer.Context,
    card: Annotated[str, typer.Option(help="The model, by its card.")] = "",
    model: Annotated[
        Path | None, typer.Option(help="The model, by its Hugging Face folder.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"A rotation: {LIKE}; repeatable."),
    ] = None,
    length: Annotated[
        str,
        typer.Option(
            help=f"Context to examine, such as 128K ({K_IS}).",
            show_default="the longest that the methods reach",
        ),
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Also draw it, to this PNG.")] = None,
    native_context: NativeContext = "",
    as_json: Json = False,
) -> None:
    """Show the wavelength of each pair of dimensions, and what a method does to it."""
    if context.invoked_subcommand is not None:
        options = {"--card": card, "--model": model, "--method": method, "--length": length,
                   "--plot": plot, "--native-context": native_context}  # fmt: skip
        given = [name for name, value in options.items() if value]
        if given:
            raise ValueError(
                f"{' and '.join(given)} cannot go with rope {context.invoked_subcommand}, which "
                "has options of its own; leave them out"
            )
        require_no_json(context, as_json)
        return
    if bool(card) == (model is not None):
        raise ValueError("name one model: --card NAME or --model FOLDER")
    if plot is not None:
        require_file(plot, "--plot", (".png",))
    asked = length_of("--length", length) if length else 0
    from custom_modules.rope.config import MAX_POSITION

    subject = _of_card(card, native_context) if model is None else _of_folder(model, native_context)
    words, chosen = method or [], {"own": subject.rope}
    for found in _read(words, subject):
        alike = sum(name.partition(" ")[0] == found.method for name in chosen)
        chosen[f"{found.method} {alike + 1}" if alike else found.method] = found
    reach = max((found.reach or 0) for found in chosen.values())
    target = asked or max(reach, subject.trained)
    if target > MAX_POSITION:
        raise ValueError(
            f"--length is {target:,}; it is at most 2^31 = {MAX_POSITION:,}, since later positions "
            "are not rotated"
        )
    with loading("torch"):
        from custom_modules.rope.frequency_report import frequency_bands
    shown = {
        name: frequency_bands(
            subject.rope, found, subject.head_dim, trained=subject.trained, length=target
        )
        for name, found in chosen.items()
    }
    if as_json:
        print_json(
            {
                "model": subject.name,
                "head_dim": subject.head_dim,
                "trained_tokens": subject.trained,
                "length_tokens": target,
                "rotations": {name: _content(chosen[name], each) for name, each in shown.items()},
            }
        )
    else:
        _print(subject, words, list(chosen), shown, target)
    if plot is not None:
        from eval.rope_search.plot import draw

        draw(plot, shown, title=subject.name, trained=subject.trained, length=target)
        typer.echo(plot, err=as_json)


def _content(rope: "RopeScaling", found: "FrequencyBands") -> dict[str, Any]:
    """Return a rotation in numbers; lengths and distances in tokens, by pair of dimensions."""
    return {
        "rope": rope.to_dict(),
        "attention_factor": found.temperature,
        "wavelengths_tokens": found.wavelengths,
        "divisors": found.divisors,
        "kept_pairs": found.kept,
        "between_pairs": found.between,
        "interpolated_pairs": found.interpolated,
        "largest_known_distance_tokens": found.largest_distance,
    }


def _print(
    subject: Subject,
    words: Sequence[str],
    names: Sequence[str],
    shown: dict[str, "FrequencyBands"],
    target: int,
) -> None:
    typer.echo(
        f"{subject.name}: heads of {subject.head_dim}, {subject.rope.method} at base "
        f"{subject.rope.base:,.10g}, trained at {subject.trained:,} tokens; shown at {target:,}"
    )
    for name, word in zip(names[1:], words, strict=True):
        typer.echo(f"{name}: {word}")
    show(lambda _: _pairs(shown, subject.trained, target))
    typer.echo("* rotates past the trained angles")
    show(lambda _: _summary(shown))


def _of_card(name: str, native_context: str) -> Subject:
    found = card_at(name, native_context)
    return Subject(
        name=found.name,
        head_dim=found.head_dim,
        rope=found.native_rope,
        trained=found.native_context,
    )


def _of_folder(folder: Path, native_context: str) -> Subject:
    from recipes.hugging_face.config import read_config
    from recipes.hugging_face.positions import rotation_of
    from recipes.spec.model_card import context_notes, rope_trained_at

    config = read_config(folder)
    try:
        found = rotation_of(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    rope, trained, others = found.rope, found.native_context, found.other_contexts
    if native_context:
        trained, others = length_of("--native-context", native_context), ()
        rope = rope_trained_at(rope, trained)
    for words in (*found.notes, *context_notes(trained, others)):
        note(f"note: {words}")
    return Subject(name=folder.name, head_dim=found.head_dim, rope=rope, trained=trained)


def _read(words: Sequence[str], subject: Subject) -> list["RopeScaling"]:
    from recipes.notation.rope import rope_from

    of_model = {
        "base": subject.rope.base,
        "partial_rotary_factor": subject.rope.partial_rotary_factor,
        "interleaved": subject.rope.interleaved,
        "original_length": subject.rope.original_length or subject.trained,
    }
    return [rope_from(word, of_model, own=subject.rope, trained=subject.trained) for word in words]


def _pairs(shown: dict[str, "FrequencyBands"], trained: int, length: int) -> Table:
    table = Table("pair", box=None, header_style="bold")
    for name in shown:
        table.add_column(f"{name}\nwavelength", justify="right")
        if name != "own":
            table.add_column("\ndivided by", justify="right")
    own = shown["own"].wavelengths
    for pair, wavelength in enumerate(own):
        cells = [str(pair), f"{wavelength:,.1f}"]
        for name, found in shown.items():
            if name == "own":
                continue
            divisor = found.divisors[pair]
            unseen = wavelength > trained and length > trained * divisor * (1 + 1e-9)
            cells += [
                f"{found.wavelengths[pair]:,.1f}",
                f"{divisor:.3f} *" if unseen else f"{divisor:.3f}  ",
            ]
        table.add_row(*cells)
    return table


def _summary(shown: dict[str, "FrequencyBands"]) -> Table:
    table = Table("", *shown, box=None, header_style="bold")
    table.add_row("attention factor", *(f"{found.temperature:.6g}" for found in shown.values()))
    for title, of in (
        ("pairs kept", "kept"),
        ("pairs between", "between"),
        ("pairs interpolated", "interpolated"),
    ):
        table.add_row(title, *(spans(getattr(found, of)) for found in shown.values()))
    table.add_row(
        "largest distance of known angles",
        *(
            "any" if math.isinf(found.largest_distance) else f"{found.largest_distance:,.0f}"
            for found in shown.values()
        ),
    )
    return table


def spans(numbers: Sequence[int]) -> str:
    """Return sorted numbers as spans: `0-3, 7`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found) or "none"
