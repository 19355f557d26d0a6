# SPDX-License-Identifier: Apache-2.0
"""The `longhaul` command: its sub-commands, and the one place that reports a user's errors.

The module of a sub-command is imported only when that command runs: help and completion need only
a name and one line each, which are listed here.
"""

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from longhaul.gone import refuse_gone
from longhaul.own_packages import HiddenPackageError, require_own_files, require_own_packages
from longhaul.terminal.messages import Verbosity, set_verbosity, write_in_the_terminal_s_encoding

HELP = {"help_option_names": ["-h", "--help"]}
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": False}


class SubCommand(NamedTuple):
    """Where a sub-command is defined, and the first line of its help."""

    place: str
    """`module:attribute`, a function or a `typer.Typer`."""
    summary: str
    settings: dict[str, bool] | None = None


COMMANDS = {
    "recipes": SubCommand(
        "longhaul.commands.recipes:recipes",
        "List the shipped recipes: length, rotation, tokens, GPUs (nodes x GPUs), source.",
    ),
    "show": SubCommand(
        "longhaul.commands.show:show",
        "Show a recipe: its model, ladder, stage, data and layout, and what to type next.",
    ),
    "plan": SubCommand(
        "longhaul.commands.plan:plan",
        "Choose a layout that fits and is fast, and print its memory and its time by category.",
    ),
    "calibrate": SubCommand(
        "longhaul.commands.calibrate:calibrate",
        "Measure this node's rates, or fit the planner to measured steps; write the cluster file.",
    ),
    "batch": SubCommand(
        "longhaul.commands.batch:batch",
        "Solve global batch = micro-batch x accumulation x DP for the tokens of a step.",
    ),
    "prepare": SubCommand(
        "longhaul.commands.prepare:prepare",
        "Turn documents into a token store: tokenizer, train and held-out tokens, manifest.",
    ),
    "adopt": SubCommand(
        "longhaul.commands.adopt:adopt",
        "Make a token store of Megatron's .bin and .idx files from other tools; nothing is copied.",
    ),
    "data": SubCommand(
        "longhaul.commands.data:app",
        "Inspect a store and what a stage takes of it, or compare tokenizers on your text.",
    ),
    "pretrain": SubCommand(
        "longhaul.commands.pretrain:pretrain",
        "Train one stage. Overrides follow as KEY=VALUE, for example trainer.max_steps=20.",
        OVERRIDES,
    ),
    "run": SubCommand(
        "longhaul.commands.run:run",
        "Train every stage of a ladder in order, evaluate them all, and build the report.",
        OVERRIDES,
    ),
    "rehearse": SubCommand(
        "longhaul.commands.rehearse:rehearse",
        "Run a recipe's stage and the one before it, small, on CPU ranks, and check both.",
        OVERRIDES,
    ),
    "evaluate": SubCommand(
        "longhaul.commands.evaluate:evaluate",
        "Evaluate loss by position and passkey retrieval of a run's stages, or tasks with --suite.",
    ),
    "ruler": SubCommand(
        "longhaul.commands.ruler:app",
        "Make RULER's samples at any length for a tokenizer, answer and score them.",
    ),
    "report": SubCommand(
        "longhaul.commands.report:report",
        "Build the page of one run, or of several side by side, and print their mean losses.",
    ),
    "import": SubCommand(
        "longhaul.commands.import_model:import_model",
        "Import published weights, bit for bit, with their config and tokenizer.",
    ),
    "export": SubCommand(
        "longhaul.commands.export:export",
        "Export weights, config at the stage's length and rotation, and tokenizer.",
    ),
    "checkpoint": SubCommand(
        "longhaul.commands.checkpoint:app", "List, verify, prune, average or compare checkpoints."
    ),
    "preflight": SubCommand(
        "longhaul.commands.preflight:preflight",
        "Check GPUs, links, host, folders, versions, clocks and, in a job, links between ranks.",
    ),
    "status": SubCommand(
        "longhaul.commands.status:status",
        "Show how far a run is and what is wrong with it, once or with --follow until it ends.",
    ),
    "clusters": SubCommand(
        "longhaul.commands.clusters:app", "List the cluster files, or check one."
    ),
    "ladders": SubCommand(
        "longhaul.commands.ladders:app",
        "List the shipped ladders, or write and check one of your own.",
    ),
    "config": SubCommand(
        "longhaul.commands.config:config",
        "Show the defaults that longhaul.toml sets, here or in ~/.config/longhaul.",
    ),
    "doctor": SubCommand(
        "longhaul.commands.doctor:app", "Find what is wrong with a run, and what to change."
    ),
    "probe": SubCommand(
        "longhaul.commands.probe:app", "Measure what a module costs on this machine."
    ),
    "rope": SubCommand(
        "longhaul.commands.rope:app",
        "Look at how a rotation stretches a model's context, or search for one.",
    ),
}


class Commands(TyperGroup):
    """Group of sub-commands, each only a name and a line of help until it runs."""

    def __init__(self, **given: Any) -> None:
        """Register every sub-command by its name and its line of help."""
        super().__init__(**given)
        for name, command in COMMANDS.items():
            self.add_command(TyperCommand(name, help=command.summary, context_settings=HELP))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and remaining arguments; import the module of the command."""
        refuse_gone(args)
        name, command, rest = super().resolve_command(ctx, args)
        _refuse_empty(rest)
        return name, command and loaded(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the sub-command; print a sentence on Ctrl-C, which typer does not."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Exit(_say(error)) from error


def _refuse_empty(words: list[str]) -> None:
    """Raise ValueError for an empty value, such as an unset shell variable."""
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        if word == "":
            before = words[at - 1] if at else ""
            what = before if before.startswith("--") else "an argument"
        elif option.startswith("--") and equals and not value:
            what = option
        else:
            continue
        raise ValueError(f"{what} is empty (''); give it a value, or leave it out")


def loaded(name: str) -> Any:
    """Import a sub-command's module and return the command as typer calls it."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    defined = getattr(importlib.import_module(module), attribute)
    if not isinstance(defined, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name, context_settings=COMMANDS[name].settings)(defined)
        defined = single
    command = typer.main.get_command(defined)
    command.name = name
    _add_common_options(command)
    return command


def _add_common_options(command: Any) -> None:
    """Add -h, -v and -q to a command and to its sub-commands."""
    command.context_settings = {**command.context_settings, **HELP}
    command.params += [
        TyperOption(
            param_decls=[f"-{chosen[0]}", f"--{chosen}"], is_flag=True, expose_value=False,
            callback=_verbosity(chosen), help=help_,
        )
        for chosen, help_ in VERBOSITIES.items()
    ]  # fmt: skip
    for below in getattr(command, "commands", {}).values():
        _add_common_options(below)


VERBOSITIES: dict[Verbosity, str] = {
    "verbose": "Show details and the output of libraries.",
    "quiet": "Show only results and errors.",
}


def _verbosity(chosen: Verbosity) -> Callable[[Any, Any, bool], None]:
    def set_where_given(_context: Any, _option: Any, given: bool) -> None:
        if given:
            set_verbosity(chosen)

    return set_where_given


def _versions(asked: bool) -> None:
    if asked:
        from longhaul.version import page

        typer.echo(page())
        raise typer.Exit


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(context_settings=HELP)
def longhaul(
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help=VERBOSITIES["verbose"])
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help=VERBOSITIES["quiet"])] = False,
    _: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_versions,
            help="Print the version and commit of Longhaul, and the versions of its libraries.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Extend the context window of language models, stage by stage."""
    set_verbosity("verbose" if verbose else "quiet" if quiet else "normal")


def main() -> None:
    """Run the command line; report a user's errors by one sentence and an exit code."""
    write_in_the_terminal_s_encoding()
    if "PYTHONWARNINGS" not in os.environ and not sys.warnoptions:
        os.environ["PYTHONWARNINGS"] = "ignore"  # of libraries, in processes that are started
        warnings.simplefilter("ignore")
    # Where HOME is not writable, matplotlib uses a temporary folder and warns in two lines.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    # nemo-run starts torchrun by name: find this environment's, activated or not.
    ours, before = os.path.dirname(sys.executable), os.environ["PATH"]
    if before.split(os.pathsep)[0] != ours:
        os.environ["PATH"] = os.pathsep.join((ours, before))
    try:
        require_own_packages()
        try:
            _run()
        finally:
            sys.stdout.flush()  # a full device fails here at the latest
    except SystemExit:  # typer has printed its answer: an unknown option, help, the end
        raise
    except BaseException as error:
        if os.environ.get("LONGHAUL_TRACEBACK"):
            raise
        sys.exit(_say(error))


def _run() -> None:
    try:
        app()
    except ImportError:
        require_own_files()
        raise


def _say(error: BaseException) -> int:
    """Print the sentence for a user's error and return its exit code; raise any other error."""
    if isinstance(error, HiddenPackageError):  # `terminal.errors` imports what may be hidden
        typer.echo(f"error: {error}", err=True)
        return 2
    from longhaul.terminal.errors import answer

    said = answer(error)
    if said is None:
        raise error
    typer.echo(said.sentence, err=True)
    return said.code


if __name__ == "__main__":
    main()
