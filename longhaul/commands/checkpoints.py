# SPDX-License-Identifier: Apache-2.0
"""`longhaul checkpoints`: list, verify, prune and average the checkpoints of a run; light."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longhaul.options import Json, RunArgument, RunOption, print_json, run_of
from longhaul.terminal.messages import next_command, note
from recipes.hugging_face.config_fields import CONFIG

if TYPE_CHECKING:
    from recipes.checkpoints.stored import Stored


def checkpoints(
    given: RunArgument = None,
    run: RunOption = None,
    stage: Annotated[
        str, typer.Option(help="Only this stage: its name or length.", show_default="all")
    ] = "",
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare the SHA-256 of every file; also of an export."),
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove those that no option keeps, of each stage.")
    ] = False,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, help="With --prune: keep the last N; with --keep-every alone 1."),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, help="With --prune: keep those whose step is a multiple of N."),
    ] = None,
    dryrun: Annotated[
        bool,
        typer.Option(
            "--dry-run", "--dryrun", help="With --prune: only print what would be removed."
        ),
    ] = False,
    average: Annotated[
        int | None,
        typer.Option(min=2, metavar="K", help="Write the mean of a stage's last K, to --to."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="With --average: folder of a stage to write.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, or verify, prune or average them."""
    run = run_of(given, run)
    _require_options(verify, prune, keep_last, keep_every, dryrun, average, to)
    if verify and (run / CONFIG).is_file():
        _verify_export(run, as_json)
        return
    found = _found(run, stage)
    if average is not None:
        assert to is not None
        _average(run, found, average, to, as_json)
    elif prune:
        _prune(run, found, keep_last or 1, keep_every or 0, dryrun, as_json)
    elif verify:
        _verify(found, as_json)
    else:
        _list(run, found, as_json)


def _require_options(
    verify: bool,
    prune: bool,
    keep_last: int | None,
    keep_every: int | None,
    dryrun: bool,
    average: int | None,
    to: Path | None,
) -> None:
    """Raise ValueError for options that do not go together."""
    chosen = [
        name
        for name, given in (("--verify", verify), ("--prune", prune), ("--average", average))
        if given
    ]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are different commands; give one of them")
    of_prune = {"--keep-last": keep_last, "--keep-every": keep_every, "--dry-run": dryrun}
    for name, given in of_prune.items():
        if given and not prune:
            raise ValueError(f"{name} has no effect without --prune; add it, or leave {name} out")
    if prune and keep_last is None and keep_every is None:
        raise ValueError("--prune needs to know what to keep; add --keep-last N or --keep-every N")
    if (average is None) != (to is None):
        raise ValueError("--average K and --to FOLDER go together; give both")


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


def _list(run: Path, found: "dict[str, list[Stored]]", as_json: bool) -> None:
    every = [one for checkpoints in found.values() for one in checkpoints]
    if as_json:
        print_json([_content(one) for one in every])
        return
    from rich.table import Table

    from longhaul.terminal.console import show

    titles = ["stage", "step", "size", "saved", "written by", "optimizer", "complete"]
    if any(one.rotation is not None for one in every):
        titles.insert(6, "rotation")

    def table(without: Sequence[str]) -> Table:
        made = Table(title=f"checkpoints in {run}")
        shown = [title for title in titles if title not in without]
        for title in shown:
            right = title in ("step", "size")
            made.add_column(title, no_wrap=True, justify="right" if right else "left")
        for one in every:
            line = _line(one)
            made.add_row(*(line[title] for title in shown))
        return made

    show(table, ("rotation", "written by", "optimizer"))
    for one in every:
        if not one.complete:
            typer.echo(f"{one.folder.name} of {one.stage}: {one.problem}")
    typer.echo(f"{_size(sum(one.bytes for one in every))} in all")


def _line(one: "Stored") -> dict[str, str]:
    """Return the table's row of a checkpoint, by column."""
    rotation = one.rotation
    if isinstance(rotation, dict):
        rotation = rotation.get("sha256") or rotation.get("hash") or rotation
    return {
        "stage": one.stage,
        "step": f"{one.step:,}",
        "size": _size(one.bytes),
        "saved": one.saved,
        "written by": _layout(one.layout, "a command" if one.optimizer is False else "?"),
        "optimizer": {True: "yes", False: "no", None: "?"}[one.optimizer],
        "rotation": "" if rotation is None else str(rotation)[:12],
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


def _verify(found: "dict[str, list[Stored]]", as_json: bool) -> None:
    """Compare the content of each complete checkpoint; exit with 1 if one is damaged."""
    from custom_modules.checkpoints.index import CheckpointError
    from recipes.checkpoints.stored import damages

    answers = []
    for one in (one for checkpoints in found.values() for one in checkpoints):
        damaged = [] if one.complete else [f"{one.folder}: {one.problem}"]
        if one.complete:
            try:
                damaged = damages(one.folder)
            except CheckpointError as error:
                damaged = [str(error)]
        answers.append({**_content(one), "damaged": damaged})
        if not as_json:
            typer.echo("\n".join(damaged) or f"{one.folder}: verified")
    if as_json:
        print_json(answers)
    if any(answer["damaged"] for answer in answers):
        raise typer.Exit(1)


def _verify_export(folder: Path, as_json: bool) -> None:
    """Compare the content of an export; exit with 1 if a file is damaged, or has no sum."""
    from recipes.hugging_face.checksums import SUMS, damages

    if not (folder / SUMS).is_file():
        raise ValueError(
            f"{folder} has no {SUMS} to compare with; exports of `longhaul export` have one"
        )
    damaged = damages(folder)
    if as_json:
        print_json([{"folder": str(folder), "damaged": damaged}])
    else:
        typer.echo("\n".join(damaged) or f"{folder}: verified")
    if damaged:
        raise typer.Exit(1)


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
            "nothing is to be removed: each checkpoint is kept by the options, is the newest of "
            "its stage, or one that a stage starts from"
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


def _average(
    run: Path, found: "dict[str, list[Stored]]", count: int, to: Path, as_json: bool
) -> None:
    """Write the mean of the last complete checkpoints of the stage as a stage."""
    from data.files.appearing import require_free
    from longhaul.terminal.console import loading

    if len(found) > 1:
        raise ValueError(
            f"{run} has {len(found)} stages ({', '.join(found)}); add --stage NAME, since a mean "
            "is of one stage"
        )
    ((name, all_of),) = found.items()
    complete = [one.folder for one in all_of if one.complete]
    if len(complete) < count:
        raise ValueError(
            f"--average is {count}, and {name} has {len(complete)} complete checkpoint"
            f"{'' if len(complete) == 1 else 's'}; a training keeps several with "
            "log.ckpt.keep_last=N or log.ckpt.keep_all=true"
        )
    require_free(to)
    with loading("torch"):
        from recipes.checkpoints import merge
    chosen = complete[-count:]
    if not as_json:
        note(f"averaging {', '.join(folder.name for folder in chosen)} of {name}")
    merge.average(chosen, to)
    if as_json:
        print_json({"folder": str(to), "of": [str(folder) for folder in chosen]})
        return
    typer.echo(to)
    words = ["longhaul", "export", "--from", to, "--to", f"{to}_hf"]
    next_command(words, "export it as a Hugging Face folder")
