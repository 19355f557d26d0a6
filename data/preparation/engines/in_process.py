# SPDX-License-Identifier: Apache-2.0
"""Tasks in this process, one after the other; the tokenizer itself uses all cores."""

from collections.abc import Callable, Sequence

from data.preparation.task import run_task
from data.preparation.work import Receipt, Work

Done = Callable[[int, Receipt], None]
"""Receives the number and the receipt of a task that has been done."""


def run_here(work: Work, numbers: Sequence[int], done: Done) -> None:
    """Do tasks in the order given."""
    for number in numbers:
        done(number, run_task(work, number))
