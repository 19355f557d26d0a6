# SPDX-License-Identifier: Apache-2.0
"""The `longhaul` command: every sub-command, and one place where a user's mistake is answered."""

import os
import sys

import typer

from longhaul.batch import batch
from longhaul.clusters import app as clusters
from longhaul.doctor import app as doctor
from longhaul.evaluate import evaluate
from longhaul.export import export
from longhaul.import_model import import_model
from longhaul.list_recipes import recipes
from longhaul.plan import plan
from longhaul.preflight import preflight
from longhaul.prepare import prepare
from longhaul.pretrain import pretrain
from longhaul.probe import app as probe
from longhaul.rehearse import rehearse
from longhaul.report import report
from longhaul.rope import app as rope
from longhaul.run import run
from longhaul.show import show

KEY_VALUE = {"allow_extra_args": True, "ignore_unknown_options": False}

app = typer.Typer(
    help="Extend the context window of language models, stage by stage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(recipes)
app.command()(show)
app.command()(plan)
app.command()(batch)
app.command()(prepare)
app.command(context_settings=KEY_VALUE)(pretrain)
app.command(context_settings=KEY_VALUE)(run)
app.command(context_settings=KEY_VALUE)(rehearse)
app.command()(evaluate)
app.command()(report)
app.command(name="import")(import_model)
app.command()(export)
app.command()(preflight)
app.add_typer(clusters, name="clusters")
app.add_typer(doctor, name="doctor")
app.add_typer(probe, name="probe")
app.add_typer(rope, name="rope")


def main() -> None:
    """Run the command line; a mistake of the user ends as one sentence and exit code 2."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    # nemo-run starts torchrun by name; it is this environment's, activated or not.
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("LONGHAUL_TRACEBACK"):
            raise
        sys.exit(_say(error, 2))
    except RuntimeError as error:
        if type(error).__module__ != "slurm.launch":
            raise
        sys.exit(_say(error, 1))


def _say(error: Exception, code: int) -> int:
    typer.echo(f"error: {error}", err=True)
    return code


if __name__ == "__main__":
    main()
