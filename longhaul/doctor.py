# SPDX-License-Identifier: Apache-2.0
"""`longhaul doctor`: what is wrong with a run, and what to change."""

import typer

from longhaul.doctor_oom import oom
from longhaul.doctor_slow import slow
from longhaul.doctor_spike import spike

app = typer.Typer(help="What is wrong with a run, and what to change.", no_args_is_help=True)
app.command()(oom)
app.command()(spike)
app.command()(slow)
