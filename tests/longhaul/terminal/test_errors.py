# SPDX-License-Identifier: Apache-2.0
"""What a user can mend is a sentence and an exit code; a fault of ours keeps its traceback."""

import errno
import os
import subprocess
import sys

import pytest

from longhaul.terminal.errors import answer

INTERRUPTED = """
import sys
from longhaul import cli
def interrupted(*words):
    raise KeyboardInterrupt
cli.loaded = interrupted
sys.argv = ["longhaul", "recipes"]
cli.main()
"""


def failed(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("error", "sentence", "code"),
    [
        (ValueError("seq is 3; it is at least 4"), "error: seq is 3; it is at least 4", 2),
        (failed(errno.EACCES, "runs/a"), "error: runs/a: permission denied; name another", 2),
        (failed(errno.EISDIR, "runs"), "error: runs: it is a folder, and a file is meant", 2),
        (failed(errno.ENOTDIR, "f/x"), "error: f/x: a part of it is a file", 2),
        (failed(errno.EEXIST, "f"), "error: f: it already exists", 2),
        (failed(errno.EROFS, "/mnt/x"), "error: /mnt/x: the file system is read-only", 2),
        (failed(errno.ENOENT, "squeue"), "error: squeue: there is no such file", 2),
        (failed(errno.ENOSPC, "runs/a"), "error: runs/a: the file system is full; make room", 1),
        (failed(errno.EMFILE), "error: too many open files; raise the limit", 1),
        (failed(errno.EHOSTUNREACH), "error: No route to host", 1),
        (KeyboardInterrupt(), "interrupted; ", 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_what_a_user_can_mend_is_a_sentence(error, sentence, code):
    said = answer(error)
    assert said.sentence.startswith(sentence)
    assert said.code == code
    assert "\n" not in said.sentence


@pytest.mark.parametrize("error", [TypeError("x"), RecursionError("x"), RuntimeError("x")])
def test_a_fault_of_the_program_is_not_answered(error):
    assert answer(error) is None


def test_a_full_disk_beneath_a_library_s_error_is_answered():
    error = RuntimeError("unexpected pos 704 vs 598")
    error.__context__ = failed(errno.ENOSPC, "export")
    assert answer(error).sentence.startswith("error: export: the file system is full")


@pytest.mark.parametrize("words", [("recipes",), ("show", "llama31_8b_ultralong_1m"), ("--help",)])
def test_an_output_that_is_full_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "longhaul.cli", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: standard output: the file system is full; make room, or name a place on another"
    ]


def test_an_interrupt_is_one_line():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted; nothing of this command is still running\n"
