# SPDX-License-Identifier: Apache-2.0
"""`longhaul checkpoint`: list, verify, prune, average and compare checkpoints; light."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longhaul.options import Json, print_json
from longhaul.terminal.console import loading, print_left_out, show
from longhaul.terminal.messages import next_command, note

if TYPE_CHECKING:
    from recipes.checkpoints.stored import Stored

FOLDER = "Folder of a checkpoint, of a stage (its newest one) or of an import"
HASH = re.compile(r"\b[0-9a-f]{40,64}\b")
SHORT = 12
"""Characters of a commit or a SHA-256 that the table shows."""

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder, as written by `longhaul run`.")
]
Stage = Annotated[
    str, typer.Option(help="Only this stage: its name or length.", show_default="all")
]

app = typer.Typer(add_completion=False, help="List, verify, prune, average or compare checkpoints.")


@app.command("list")
def list_(run: Run, stage: Stage = "", as_json: Json = False) -> None:
    """List the checkpoints of a run: step, size, layout, and whether they are complete."""
    every = [one for checkpoints in _found(run, stage).values() for one in checkpoints]
    if as_json:
        print_json([_content(one) for one in every])
        return
    from rich.table import Table

    lines = [_line(one) for one in every]

    def table(without: Sequence[str]) -> Table:
        made = Table(title=f"checkpoints in {run}")
        shown = [title for title in lines[0] if title not in without]
        for title in shown:
            right = title in ("step", "size")
            made.add_column(title, no_wrap=True, justify="right" if right else "left")
        for line in lines:
            made.add_row(*(line[title] for title in shown))
        return made

    show(table, ("written by", "optimizer"))
    for one in every:
        if not one.complete:
            typer.echo(f"{one.folder.name} of {one.stage}: {one.problem}")
    typer.echo(f"{_size(sum(one.bytes for one in every))} in all")


@app.command()
def verify(
    path: Annotated[
        Path, typer.Argument(help="A run, a checkpoint, a stage (its newest one), or an export.")
    ],
    stage: Stage = "",
    as_json: Json = False,
) -> None:
    """Compare the SHA-256 of every file. Exit code 1: a file is damaged."""
    answers = []
    for folder, damaged in _verified(path, stage):
        answers.append({"folder": str(folder), "damaged": damaged})
        if not as_json:
            typer.echo("\n".join(damaged) or f"{folder}: verified")
    if as_json:
        print_json(answers)
    if any(answer["damaged"] for answer in answers):
        raise typer.Exit(1)


@app.command()
def prune(
    run: Run,
    stage: Stage = "",
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, help="Keep the last N of each stage.", show_default="1"),
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Keep those whose step is a multiple of N.")
    ] = None,
    dryrun: Annotated[
        bool, typer.Option("--dry-run", "--dryrun", help="Only print what would be removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove the checkpoints that no option keeps, while no other process uses the run."""
    if keep_last is None and keep_every is None:
        raise ValueError("it is not known what to keep; add --keep-last N or --keep-every N")
    _prune(run, _found(run, stage), keep_last or 1, keep_every or 0, dryrun, as_json)


@app.command()
def average(
    first: Annotated[Path, typer.Argument(help=f"{FOLDER}; or with --last a run.")],
    to: Annotated[Path, typer.Option(help="Folder to write.")],
    second: Annotated[
        Path | None,
        typer.Argument(help=f"{FOLDER}; the mean gets its recipe, length, rotation, tokenizer."),
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=2, metavar="K", help="The last K of a stage of a run.")
    ] = None,
    stage: Stage = "",
    share: Annotated[
        float | None, typer.Option(help="Weight of the second, 0 to 1.", show_default="0.5")
    ] = None,
    as_json: Json = False,
) -> None:
    """Average weights into a stage to evaluate, export or start from."""
    from data.files.appearing import require_free
    from recipes.hugging_face.source_checkpoint import checkpoint_of

    if (second is None) == (last is None):
        raise ValueError("name a second checkpoint, or add --last K for the last K of a run")
    if last is not None and share is not None:
        raise ValueError(
            f"--share {share:g} is of two checkpoints; --last {last} takes equal parts"
        )
    if second is not None and stage:
        raise ValueError(f"--stage {stage} is for --last; name the checkpoints of the stage")
    share = 0.5 if share is None else share
    require_free(to)
    if not 0 <= share <= 1:
        raise ValueError(f"--share is {share:g}; the weight of the second must be from 0 to 1")
    if second is not None:
        chosen = [checkpoint_of(first), checkpoint_of(second)]
        message = f"averaging {1 - share:g} of {chosen[0]} and {share:g} of {chosen[1]}"
    else:
        assert last is not None
        chosen = _last(first, stage, last)
        message = f"averaging {', '.join(map(str, chosen))}"
    with loading("torch"):
        from recipes.checkpoints import average as averaging
    if not as_json:
        note(message)
    averaging.average(chosen, to, share=None if second is None else share)
    if as_json:
        print_json({"folder": str(to), "of": [str(folder) for folder in chosen]})
        return
    typer.echo(to)
    words = ["longhaul", "export", "--from", to, "--to", f"{to}_hf"]
    next_command(words, "export it as a Hugging Face folder")


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="Folder of a checkpoint or of a stage.")],
    second: Annotated[
        Path | None, typer.Argument(help="Another one.", show_default="what is here")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Where the token store is here.", show_default="as recorded")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare how two checkpoints were made, or one with what is here. Exit code 1: it differs."""
    from recipes.checkpoints import record
    from recipes.hugging_face.source_checkpoint import checkpoint_of

    if second is not None and store is not None:
        raise ValueError("--store is where the store is here; leave it out with two checkpoints")
    folders = [checkpoint_of(path) for path in (first, second) if path is not None]
    records = [record.read_record(folder) for folder in folders]
    if second is None:
        where = store or Path(records[0]["store"]["path"])
        rows = record.differences(records[0], record.record_here(records[0], where))
    else:
        recipes = (record.recorded_recipe(folder) for folder in folders)
        rows = record.differences(*({**a, **b} for a, b in zip(records, recipes, strict=True)))
    lines = [dict(zip(("what", "first", "second"), (n, *p), strict=True)) for n, p in rows.items()]
    if as_json:
        print_json({"checkpoints": folders, "records": records, "differences": lines})
        raise typer.Exit(1 if rows else 0)
    for folder, of in zip(folders, records, strict=True):
        typer.echo(
            f"{folder}: step {of['step']:,} of {of['stage']}, saved {of['saved']} by {of['ranks']} "
            "ranks"
        )
    _show_differences(lines, "here" if second is None else "second")
    for folder, of in zip(folders, records, strict=True):
        _note_code(of, folder / record.FOLDER / record.CHANGES)
        if record.START not in of:
            note("the checkpoint that the stage started from is not recorded")
    raise typer.Exit(1 if rows else 0)


def _found(run: Path, stage: str) -> "dict[str, list[Stored]]":
    """Return the checkpoints of each stage; raise ValueError if the folder has none."""
    from eval.run_folder import require_run
    from longhaul.run_folder.stage_named import stage_named
    from recipes.checkpoints.stored import stored
    from recipes.spec.naming import stage_folder

    require_run(run)
    names = sorted(path.parent.name for path in run.glob("stages/*/checkpoints"))
    if not names:
        raise ValueError(
            f"{run} has no stages/STAGE/checkpoints; expected a run folder, as `longhaul run` "
            "writes at --out, with a stage that has saved"
        )
    chosen = [stage_named(run, stage, names)] if stage else names
    found = {name: stored(stage_folder(run, name) / "checkpoints", name) for name in chosen}
    if not any(found.values()):
        raise ValueError(f"no checkpoint is in {run} yet; a stage saves at its interval and end")
    return found


def _line(one: "Stored") -> dict[str, str]:
    """Return the table's row of a checkpoint, by column."""
    return {
        "stage": one.stage,
        "step": f"{one.step:,}",
        "size": _size(one.bytes),
        "saved": one.saved,
        "written by": _layout(one.layout, "a command" if one.optimizer is False else "?"),
        "optimizer": {True: "yes", False: "no", None: "?"}[one.optimizer],
        "complete": "yes" if one.complete else "no",
    }


def _layout(layout: dict[str, int], unknown: str) -> str:
    if not layout:
        return unknown
    ranks = f"{layout['ranks']:,} rank{'' if layout['ranks'] == 1 else 's'}"
    kinds = [f"{name.upper()}{size}" for name, size in layout.items() if name != "ranks"]
    used = [kind for kind in kinds if not kind.endswith("P1")]
    return f"{ranks} ({' '.join(used)})" if used else ranks


def _size(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def _content(one: "Stored") -> dict[str, Any]:
    """Return a checkpoint for programs."""
    return {**asdict(one), "folder": str(one.folder), "complete": one.complete}


def _verified(path: Path, stage: str) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder of a run, or the one that is named, and a sentence for each damaged file.

    Raises ValueError for an export without sums.
    """
    from custom_modules.checkpoints.index import CheckpointError
    from recipes.checkpoints import stored
    from recipes.hugging_face import checksums
    from recipes.hugging_face.config_fields import CONFIG
    from recipes.hugging_face.source_checkpoint import checkpoint_of

    if (path / CONFIG).is_file():
        if not (path / checksums.SUMS).is_file():
            raise ValueError(
                f"{path} has no {checksums.SUMS} to compare with; exports of `longhaul export` "
                "have one"
            )
        yield path, checksums.damages(path)
        return
    if stage or (path / "stages").is_dir():
        every = [one for of_stage in _found(path, stage).values() for one in of_stage]
        folders = {one.folder: one.problem for one in every}
    else:
        folders = {checkpoint_of(path): ""}
    for folder, problem in folders.items():
        try:
            yield folder, [f"{folder}: {problem}"] if problem else stored.damages(folder)
        except CheckpointError as error:
            yield folder, [str(error)]


def _prune(
    run: Path,
    found: "dict[str, list[Stored]]",
    keep_last: int,
    keep_every: int,
    dryrun: bool,
    as_json: bool,
) -> None:
    """Remove what the policy does not keep, while no other process uses the stages."""
    from contextlib import ExitStack

    from longhaul.run_folder.lock import in_use, require_unused
    from recipes.checkpoints.stored import removable, remove, stored
    from recipes.spec.naming import stage_folder

    needed = list(_starts(run))
    with ExitStack() as held:
        require_unused(run)
        for name in found:
            if dryrun:
                require_unused(stage_folder(run, name))
                continue
            held.enter_context(in_use(stage_folder(run, name)))
            found[name] = stored(stage_folder(run, name) / "checkpoints", name)
        gone = [
            one
            for checkpoints in found.values()
            for one in removable(
                checkpoints, keep_last=keep_last, keep_every=keep_every, needed=needed
            )
        ]
        for one in gone:
            if not as_json:
                typer.echo(f"{'would remove' if dryrun else 'removing'} {one.folder} "
                           f"({_size(one.bytes)})")  # fmt: skip
            if not dryrun:
                remove(one.folder)
    if as_json:
        print_json({"removed": [] if dryrun else [_content(one) for one in gone],
                    "would_remove": [_content(one) for one in gone] if dryrun else []})  # fmt: skip
    elif gone:
        total = sum(one.bytes for one in gone)
        typer.echo(f"{total:,} bytes ({_size(total)}){' would be free' if dryrun else ' are free'}")
    else:
        typer.echo(
            "no checkpoint to remove: the options keep each, or it is the newest of its stage, or "
            "a stage starts from it"
        )


def _starts(run: Path) -> Iterator[Path]:
    """Yield the checkpoints that stages of the run start from, by their recipes."""
    import yaml

    from recipes.checkpoints.marker import RECIPE

    for path in run.glob(f"stages/*/{RECIPE}"):
        try:
            recipe = yaml.safe_load(path.read_text())
            start = recipe["resume"].get("start")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}), so it is not known which checkpoint its stage "
                "starts from; nothing is removed"
            ) from error
        if start is not None:
            yield Path(start).resolve()


def _last(run: Path, stage: str, count: int) -> list[Path]:
    """Return the last complete checkpoints of a stage; raise ValueError if there are fewer."""
    found = _found(run, stage)
    if len(found) > 1:
        raise ValueError(
            f"{run} has {len(found)} stages ({', '.join(found)}); add --stage NAME, since a mean "
            "is of one stage"
        )
    ((name, every),) = found.items()
    complete = [one.folder for one in every if one.complete]
    if len(complete) < count:
        raise ValueError(
            f"--last is {count}, and {name} has {len(complete)} complete checkpoint"
            f"{'' if len(complete) == 1 else 's'}; a training keeps several with "
            "log.ckpt.keep_last=N or log.ckpt.keep_all=true"
        )
    return complete[-count:]


def _show_differences(lines: Sequence[dict[str, str]], second: str) -> None:
    """Print the differences as a table, or that there is none."""
    from rich.table import Table

    if not lines:
        typer.echo("nothing differs in how they were made")
        return
    cells = [{key: HASH.sub(lambda m: m[0][:SHORT], text) for key, text in line.items()}
             for line in lines]  # fmt: skip

    def table(without: Sequence[str]) -> Table:
        made = Table(title=f"{len(cells)} difference{'' if len(cells) == 1 else 's'}")
        for key, title in {"what": "what", "first": "first", "second": second}.items():
            if key not in without:
                made.add_column(title, overflow="fold")
        for line in cells:
            made.add_row(*(text for key, text in line.items() if key not in without))
        return made

    print_left_out(cells, "what", show(table, ("first",)))


def _note_code(record: dict[str, Any], changes: Path) -> None:
    """Print how to get the code that a checkpoint was made with."""
    code = record["code"]
    if not code["commit"]:
        note("the code was not a git checkout: its version is all that is known of it")
        return
    words = [f"git checkout {code['commit']}"]
    if changes.is_file():
        words.append(f"git apply {shlex.quote(os.path.abspath(changes))}")
    note(f"its code: {' && '.join(words)}")
    if code.get("withheld"):
        note(f"its changes are not recorded: {code['withheld']}")
