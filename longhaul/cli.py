# SPDX-License-Identifier: Apache-2.0
"""The `longhaul` command: every sub-command, and one place where a user's mistake is answered.

A sub-command's module is imported when that command is called: help and completion need names and
one line each, which are written here.
"""

import importlib
import os
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from longhaul.own_packages import require_own_files, require_own_packages

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": False}


class SubCommand(NamedTuple):
    """Where a sub-command is defined, and the first line of its help."""

    place: str
    """`module:attribute`, a function or a `typer.Typer`."""
    summary: str
    settings: dict[str, bool] | None = None


COMMANDS = {
    "recipes": SubCommand(
        "longhaul.list_recipes:recipes",
        "List the shipped recipes: length, rotation, tokens, GPUs (nodes x GPUs), source.",
    ),
    "show": SubCommand(
        "longhaul.show:show",
        "Show a recipe: its model, ladder, stage, data and layout, and what to type next.",
    ),
    "plan": SubCommand(
        "longhaul.plan:plan",
        "Choose the fastest layout that fits, and print its memory and its time by cause.",
    ),
    "batch": SubCommand(
        "longhaul.batch:batch",
        "Solve global batch = micro-batch x accumulation x DP for the tokens of a step.",
    ),
    "prepare": SubCommand(
        "longhaul.prepare:prepare",
        "Turn documents into a token store: tokenizer, train and held-out tokens, manifest.",
    ),
    "pretrain": SubCommand(
        "longhaul.pretrain:pretrain",
        "Train one stage. Overrides follow as KEY=VALUE, for example trainer.max_steps=20.",
        OVERRIDES,
    ),
    "run": SubCommand(
        "longhaul.run:run",
        "Train every stage of a ladder in order, evaluate them all, and build the report.",
        OVERRIDES,
    ),
    "rehearse": SubCommand(
        "longhaul.rehearse:rehearse",
        "Run a recipe's stage and the one before it, small, on CPU ranks, and say what held.",
        OVERRIDES,
    ),
    "evaluate": SubCommand(
        "longhaul.evaluate:evaluate",
        "Evaluate loss by position and passkey retrieval of a run's stages.",
    ),
    "report": SubCommand(
        "longhaul.report:report",
        "Build report.html from a run folder, and print the mean loss by range of positions.",
    ),
    "import": SubCommand(
        "longhaul.import_model:import_model",
        "Import published weights, bit for bit, with their config and tokenizer.",
    ),
    "export": SubCommand(
        "longhaul.export:export",
        "Export weights, config at the stage's length and rotation, and tokenizer.",
    ),
    "preflight": SubCommand(
        "longhaul.preflight:preflight",
        "Check GPUs, links, host, folders, versions and clocks, and of ranks of a job the links.",
    ),
    "clusters": SubCommand("longhaul.clusters:app", "List the cluster files, or check one."),
    "doctor": SubCommand("longhaul.doctor:app", "What is wrong with a run, and what to change."),
    "probe": SubCommand("longhaul.probe:app", "Measure what a module costs on this machine."),
    "rope": SubCommand(
        "longhaul.rope:app",
        "Look at how a rotation stretches a model's context, or search for one.",
    ),
}


class Commands(TyperGroup):
    """The sub-commands, each a name and a line until it is called."""

    def __init__(self, **given: Any) -> None:
        """Take what typer gives a group."""
        super().__init__(**given)
        for name, command in COMMANDS.items():
            self.add_command(TyperCommand(name, help=command.summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and the words after it, with the command's module imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and loaded(str(name)), rest


def loaded(name: str) -> Any:
    """Return a sub-command of that name from its module, as typer calls it."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    defined = getattr(importlib.import_module(module), attribute)
    if not isinstance(defined, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name, context_settings=COMMANDS[name].settings)(defined)
        defined = single
    command = typer.main.get_command(defined)
    command.name = name
    return command


def _versions(asked: bool) -> None:
    if asked:
        from longhaul.version import page

        typer.echo(page())
        raise typer.Exit


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def longhaul(
    _: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_versions,
            help="Print the version of Longhaul, its commit, and those of the libraries below it.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Extend the context window of language models, stage by stage."""


def main() -> None:
    """Run the command line; a mistake of the user ends as one sentence and exit code 2."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    # nemo-run starts torchrun by name; it is this environment's, activated or not.
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    try:
        require_own_packages()
        _run()
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("LONGHAUL_TRACEBACK"):
            raise
        sys.exit(_say(error, 2))
    except RuntimeError as error:
        if type(error).__module__ != "slurm.launch":
            raise
        sys.exit(_say(error, 1))


def _run() -> None:
    try:
        app()
    except ImportError:
        require_own_files()
        raise


def _say(error: Exception, code: int) -> int:
    typer.echo(f"error: {error}", err=True)
    return code


if __name__ == "__main__":
    main()
