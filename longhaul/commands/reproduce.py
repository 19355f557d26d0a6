# SPDX-License-Identifier: Apache-2.0
"""`longhaul reproduce`: what differs here from where a checkpoint was made, and its recipe."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from data.files.writable import require_file
from longhaul.options import Json, print_json
from longhaul.terminal.console import print_left_out, show
from longhaul.terminal.messages import next_command, note

if TYPE_CHECKING:
    from recipes.checkpoints.reproduction import Difference

COLUMNS = ("what", "recorded", "here")
HASH = re.compile(r"\b[0-9a-f]{40,64}\b")
SHORT = 12
"""Characters of a commit or a SHA-256 that the table shows."""


def reproduce(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder of a checkpoint, or of a stage: its newest one.")
    ],
    store: Annotated[
        Path | None, typer.Option(help="Where the token store is here.", show_default="as recorded")
    ] = None,
    to_yaml: Annotated[
        Path | None, typer.Option(help="With --out: write the recipe that makes it again.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder of that recipe; not the checkpoint's own.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what differs here from where a checkpoint was made. Exit code 1: something does."""
    from recipes.checkpoints import reproduction
    from recipes.checkpoints.marker import RECIPE
    from recipes.hugging_face.source_checkpoint import checkpoint_of

    if (to_yaml is None) != (out is None):
        raise ValueError(
            "--to-yaml FILE is the recipe and --out RUN the folder that it trains into; give both"
        )
    found = checkpoint_of(checkpoint)
    record = reproduction.read_record(found)
    folder = found / reproduction.FOLDER
    where = store or Path(record["store"]["path"])
    rows = list(reproduction.differences(record, where))
    recipe = folder / RECIPE
    if to_yaml is not None and out is not None:
        _require_outside(to_yaml, found)
        _write_recipe(recipe, to_yaml, out, store, record.get(reproduction.START))
    if as_json:
        print_json(
            {
                "checkpoint": found,
                "record": record,
                "differences": [row._asdict() for row in rows],
                "recipe": to_yaml if to_yaml is not None else recipe if recipe.is_file() else None,
            }
        )
        raise typer.Exit(1 if rows else 0)
    typer.echo(
        f"{found}: step {record['step']:,} of {record['stage']}, saved {record['saved']} by "
        f"{record['ranks']} ranks"
    )
    _show(rows)
    _note_code(record["code"], folder)
    if reproduction.START not in record:
        note("the checkpoint that the stage started from is not recorded")
    if to_yaml is not None:
        next_command(["longhaul", "pretrain", "--yaml", to_yaml], "make it again")
    elif recipe.is_file():
        words = ["longhaul", "reproduce", os.path.relpath(found)]
        again = f"{record['stage']}_again"
        words += [] if store is None else ["--store", str(store)]
        words += ["--to-yaml", f"{again}.yaml", "--out", f"runs/{again}"]
        next_command(words, "write the recipe that makes it again")
    raise typer.Exit(1 if rows else 0)


def _require_outside(to: Path, checkpoint: Path) -> None:
    """Raise ValueError for a file of a checkpoint, which its marker has the SHA-256 of."""
    if to.resolve().is_relative_to(checkpoint.resolve()):
        raise ValueError(
            f"--to-yaml {to} is inside the checkpoint {checkpoint}, whose files have checksums; "
            "name a file outside it"
        )


def _write_recipe(
    recipe: Path, to: Path, run: Path, store: Path | None, start: Mapping[str, Any] | None
) -> None:
    """Write the recipe of a checkpoint, whose outputs go to another run folder."""
    import yaml

    from data.files.whole import write_text
    from recipes.checkpoints.reproduction import recipe_elsewhere

    require_file(to, "--to-yaml")
    if not recipe.is_file():
        raise ValueError(f"{recipe} is not there: the recipe was withheld, or the stage had none")
    content, stage = recipe_elsewhere(recipe, run, store, start)
    if (run / "stages" / stage).exists():
        raise ValueError(
            f"--out {run} has {stage} already; name another run folder, so that nothing is mixed"
        )
    write_text(to, yaml.safe_dump(content, sort_keys=True))


def _show(rows: "Sequence[Difference]") -> None:
    """Print the differences as a table, or that there is none."""
    if not rows:
        typer.echo("nothing differs here")
        return
    lines = [
        {"what": f"{row.group}: {row.what}", "recorded": _short(row.recorded),
         "here": _short(row.here)}
        for row in rows
    ]  # fmt: skip

    def table(without: Sequence[str]) -> Table:
        made = Table(
            title=f"{len(rows)} things differ here" if len(rows) > 1 else "1 thing differs"
        )
        for title in COLUMNS:
            if title not in without:
                made.add_column(title, overflow="fold")
        for line in lines:
            made.add_row(*(line[title] for title in COLUMNS if title not in without))
        return made

    print_left_out(lines, "what", show(table, ("recorded",)))


def _short(text: str) -> str:
    """Return a text with a hash cut to its first characters."""
    return HASH.sub(lambda found: found[0][:SHORT], text)


def _note_code(code: Mapping[str, Any], folder: Path) -> None:
    """Print how to get the code that the checkpoint was made with."""
    if not code["commit"]:
        note("the code was not a git checkout: its version is all that is known of it")
        return
    words = [f"git checkout {code['commit']}"]
    if (changes := folder / "changes.diff").is_file():
        words.append(f"git apply {shlex.quote(os.path.abspath(changes))}")
    note(f"its code: {' && '.join(words)}")
    if code.get("withheld"):
        note(f"its changes are not recorded: {code['withheld']}")
