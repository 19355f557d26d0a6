# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor`: find what is wrong with a run, and what to change."""

import typer

from longhaul.doctor.hang import hang
from longhaul.doctor.log import log
from longhaul.doctor.oom import oom
from longhaul.doctor.run import run
from longhaul.doctor.slow import slow
from longhaul.doctor.spike import spike

app = typer.Typer(help="Find what is wrong with a run, and what to change.", no_args_is_help=True)
app.command()(log)
app.command()(oom)
app.command()(spike)
app.command()(slow)
app.command()(hang)
app.command()(run)
