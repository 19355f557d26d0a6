# SPDX-License-Identifier: Apache-2.0
"""Options shared by several commands: the run they read and the ranks they start on it."""

import difflib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from longhaul.defaults import default
from longhaul.terminal.messages import note
from recipes.spec.cluster import CLUSTER

if TYPE_CHECKING:
    from longhaul.jobs.evaluated_training import Interval
    from recipes.spec.model_card import ModelCard

K_IS = "K is 1,024, M is 1,024 K"
"""Units of lengths and of the tokens of a step, for help texts; budgets use powers of ten."""

WRITTEN_WHEN_STARTED = (
    "commands that nemo-run would start; it creates the numbered folders in them at that time"
)
"""Comment of a dry run above the lines of torchrun."""

RunArgument = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="Run folder, as written by `longhaul run`."),
]
RunOrStage = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", help="Run folder, or the folder of a stage in it."),
]
RunOption = Annotated[
    Path | None, typer.Option("--run", metavar="RUN", help="Run folder, in place of RUN.")
]
Ranks = Annotated[int, typer.Option(min=1, help="Processes.")]
TensorParallel = Annotated[
    int, typer.Option("--tp", min=1, help="Ranks that share each layer (TP).")
]
ContextParallel = Annotated[
    int, typer.Option("--cp", min=1, help="Ranks that share each sequence (CP).")
]
PipelineParallel = Annotated[
    int, typer.Option("--pp", min=1, help="Ranks that have a part of the layers each (PP).")
]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; without it the device the run trained on.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; its names include units.")]


StageCard = Annotated[str, typer.Option(help="A model card, with --ladder and --stage.")]
StageLadder = Annotated[str, typer.Option(help="The ladder of the stage.")]
StageLength = Annotated[str, typer.Option(help="The stage, by its length, such as 64K.")]
MachineLayout = Annotated[
    str, typer.Option("--layout", help="Train this layout, such as 'tp2 ulysses4 kept_attention'.")
]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs, if they are not whole nodes.")]
Cluster = Annotated[
    str,
    typer.Option(
        help="Cluster file: a shipped name or a path.",
        show_default=f"longhaul.toml's, or {CLUSTER}",
    ),
]
Executor = Annotated[str, typer.Option(help="Where to run: local, or slurm with --cluster.")]
Account = Annotated[
    str,
    typer.Option(help="Slurm's account.", show_default="longhaul.toml's, or the cluster file's"),
]
Partition = Annotated[
    str,
    typer.Option(help="Slurm's partition.", show_default="longhaul.toml's, or the cluster file's"),
]


class Checking(TyperGroup):
    """Group with a sub-command `check`, suggested for a file or a word unlike any command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and remaining arguments; raise ValueError for another word."""
        word = args[0]
        if not (word in self.commands or word.startswith("-") or ctx.resilient_parsing):
            command = f"longhaul {self.name} {shlex.join(['check', word])}"
            if Path(word).suffix in (".yaml", ".yml", ".py"):
                raise ValueError(f"{word} is a file; to check it: {command}")
            if not difflib.get_close_matches(word, self.commands):
                raise ValueError(
                    f"`longhaul {self.name}` has no command {word}; to look at the file or the "
                    f"shipped name: {command}"
                )
        return super().resolve_command(ctx, args)


def run_of(argument: Path | None, option: Path | None) -> Path:
    """Return the run that a command is given as RUN or as --run.

    Raises ValueError if it is given in neither way, or in both.
    """
    if argument is not None and option is not None:
        raise ValueError(f"{argument} and --run {option} both name a run; leave one of them out")
    given = option if argument is None else argument
    if given is None:
        raise ValueError("no run is named; add its folder, such as runs/tiny, or --run FOLDER")
    return given


def print_json(content: Any) -> None:
    """Print mappings, lists and dataclasses as JSON on stdout; NaN and infinity become null."""
    from eval.run_folder import plain

    typer.echo(json.dumps(plain(content), indent=1, allow_nan=False, default=str))


def require_no_json(context: typer.Context, as_json: bool) -> None:
    """Raise ValueError if --json precedes the name of a sub-command, which takes it after."""
    if as_json:
        raise ValueError(
            f"--json before {context.invoked_subcommand} has no effect; write it after "
            f"{context.invoked_subcommand}"
        )


Verify = Annotated[
    bool | None,
    typer.Option(
        "--verify/--no-verify",
        help="Verify the SHA-256 of the whole store / of neither store nor checkpoint.",
        show_default="a sample of the store, the whole checkpoint",
    ),
]
EvalEvery = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Log held-out loss and a passkey every N steps; 0: as often as takes 1% of the time; "
        "never: not at all.",
        show_default="as the run began, or never",
    ),
]
Alert = Annotated[
    str,
    typer.Option(
        metavar="COMMAND",
        help="Call COMMAND, without a shell, for each finding about the run's health, as JSON on "
        "its standard input.",
        show_default="longhaul.toml's, or none",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        metavar="WORDS",
        help="Profile steps of a stage: 'steps=5:8', and after it ranks=0,1 (or all), nsys.",
    ),
]
DebugComm = Annotated[
    bool,
    typer.Option(
        "--debug-comm",
        help="Have ranks in training compare every collective, and log those of NCCL to the "
        "stage's folder.",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Send the metrics to wandb, mlflow or tensorboard as well; repeatable.",
        show_default="longhaul.toml's",
    ),
]
EvaluationTensorParallel = Annotated[
    int | None,
    typer.Option(
        "--eval-tp",
        min=1,
        help="TP of evaluations; they have as many ranks as their TP, CP and PP take.",
        show_default="the training's",
    ),
]
EvaluationContextParallel = Annotated[
    int | None,
    typer.Option("--eval-cp", min=1, help="CP of evaluations.", show_default="the training's"),
]
EvaluationPipelineParallel = Annotated[
    int | None,
    typer.Option("--eval-pp", min=1, help="PP of evaluations.", show_default="the training's"),
]
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Do not verify the SHA-256 of the weights.")
]


NativeContext = Annotated[
    str,
    typer.Option(
        help="Tokens that the model was trained at, such as 32K, where its config.json does not "
        "tell.",
        show_default="as its config.json says",
    ),
]


def card_at(word: str, native_context: str) -> "ModelCard":
    """Return the card that a word names, at a native context if one is stated, and note doubts."""
    from recipes.shipped.named import card_named

    card = stated_at(card_named(word), native_context)
    for words in card.notes:
        note(f"note: {words}")
    return card


def stated_at(card: "ModelCard", native_context: str) -> "ModelCard":
    """Return a card with the value of --native-context; empty: as its config.json says."""
    stated = length_of("--native-context", native_context) if native_context else None
    return card.trained_at(stated)


def length_of(option: str, word: str) -> int:
    """Return the tokens that an option's value means; raise ValueError that names the option."""
    from recipes.spec.naming import length_from

    try:
        return length_from(word)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def evaluation_interval(word: str | None) -> "Interval | None":
    """Return what --eval-every means, None if it is not given; raise ValueError for other words."""
    if word is None:
        return None
    if word == "never":
        return "never"
    if word.isascii() and word.isdecimal():
        return int(word)
    raise ValueError(
        f"--eval-every is {word!r}; expected a number of steps, 0 for 1% of the time, or never"
    )


def trackers(given: Sequence[str] | None, *, here: bool = True) -> tuple[str, ...]:
    """Return the trackers that are given, or those of longhaul.toml.

    Raises ValueError for a tracker that is unknown, or lacks what it needs where ranks run `here`.
    """
    from recipes.spec.trackers import require_trackers

    return require_trackers(given or default("track").replace(",", " ").split(), here=here)


def require_device(device: str | None) -> None:
    """Raise ValueError for a device that is neither cpu nor cuda; None and "" mean none given."""
    if device not in (None, "", "cpu", "cuda"):
        raise ValueError(f"--device is {device!r}; expected cpu or cuda")


def require_executor(executor: str, **of_slurm: object) -> None:
    """Raise ValueError for an unknown executor, and for options of Slurm with the local one."""
    if executor not in ("local", "slurm"):
        raise ValueError(f"executor {executor!r} is unknown; expected local or slurm")
    given = [f"--{name}" for name, value in of_slurm.items() if value]
    if executor == "local" and given:
        raise ValueError(
            f"{' and '.join(given)} cannot go with --executor local; add --executor slurm, or "
            "leave it out"
        )
