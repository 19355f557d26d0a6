# SPDX-License-Identifier: Apache-2.0
"""What commands show on a terminal, in a narrow one, in one of ASCII, and loudly or quietly."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from longhaul.cli import COMMANDS

CLI = (sys.executable, "-m", "longhaul.cli")
NOISY = """
import logging, os, subprocess, sys, warnings
from longhaul.terminal.console import held_back, loading
{first}
with {held}:
    print("on stdout")
    print("on stderr", file=sys.stderr)
    warnings.warn("a warning")
    logging.getLogger("library").warning("a record")
    os.write(2, b"of a C library\\n")
    subprocess.run(["echo", "of a child"])
    {then}
print("the result")
"""


def on_terminal(*command: str, **environment: str) -> tuple[int, list[str]]:
    """Run a command on a pseudo-terminal; return its exit code and the lines that stay on it."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, close_fds=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **environment},
    )  # fmt: skip
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the last process has closed it
            break
        if not part:
            break
        shown += part
    os.close(master)
    return process.wait(), lines_left(shown.decode())


def lines_left(text: str) -> list[str]:
    """Return the lines that a terminal shows in the end: some are written over or erased."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part
            column += len(part)
    return [line.strip() for line in lines if line.strip()]


def noisy(then: str, held: str = "loading('libraries')", first: str = "") -> tuple[int, list[str]]:
    return on_terminal(sys.executable, "-c", NOISY.format(first=first, held=held, then=then))


@pytest.mark.parametrize("held", ["loading('libraries')", "held_back()"])
def test_what_libraries_print_on_a_terminal_is_held_back(held):
    assert noisy("pass", held) == (0, ["the result"])


def test_it_is_shown_where_loading_fails_for_another_reason_than_the_user_s_mistake():
    code, lines = noisy("raise IndexError('list index out of range')")
    assert code == 1
    for said in ("on stdout", "on stderr", "a record", "of a C library", "of a child"):
        assert said in lines
    assert lines[-1] == "IndexError: list index out of range"


def test_it_is_not_shown_for_a_mistake():
    code, lines = noisy("raise ValueError('no such thing')")
    assert code == 1
    assert "of a C library" not in lines
    assert lines[-1] == "ValueError: no such thing"


def test_verbose_shows_it_all():
    verbose = "from longhaul.terminal import messages; messages.set_verbosity('verbose')"
    code, lines = noisy("pass", first=verbose)
    assert code == 0
    assert {"loading libraries", "of a C library", "of a child", "the result"} <= set(lines)


def test_verbose_shows_what_ranks_write_and_keeps_it_in_their_log(tmp_path):
    log = tmp_path / "output.log"
    first = (
        "from pathlib import Path\n"
        "from longhaul.terminal import console, messages\n"
        "messages.set_verbosity('verbose')"
    )
    code, lines = noisy("pass", f"console.output_to(Path({str(log)!r}))", first=first)
    assert code == 0
    assert {"on stdout", "of a C library", "of a child"} <= set(log.read_text().splitlines())
    assert {"on stdout", "of a C library", "of a child", "the result"} <= set(lines)


BRACKETS = """
from pathlib import Path
from longhaul.terminal.console import busy, output_to
from rich.table import Table
from longhaul.terminal.console import show
folder = Path({folder!r}) / "[old]" / "[/old]"
with output_to(folder / "output.log") as console, busy(console, f"evaluating {{folder}}"):
    console.print(f"told {{folder}}", soft_wrap=True)
    print("of a library")
table = Table(title=f"stages in {{folder}}")
table.add_column("[old]", no_wrap=True)
table.add_row(str(folder))
show(lambda _: table)
"""


def test_brackets_of_a_folder_are_shown_and_are_no_styles(tmp_path):
    code, lines = on_terminal(sys.executable, "-c", BRACKETS.format(folder=str(tmp_path)))
    folder = tmp_path / "[old]" / "[/old]"
    shown = "".join(lines)
    assert code == 0, shown
    assert f"told {folder}" in shown
    assert str(folder) in shown.partition("told")[2].partition(str(folder))[2]
    assert (folder / "output.log").read_text() == "of a library\n"


TITLED = """
from rich.table import Table
from longhaul.terminal.console import show
table = Table(title="a title of more words than the columns have")
table.add_column("a")
table.add_row("1")
show(lambda _: table)
"""


def test_the_title_of_a_narrow_table_is_one_line():
    code, lines = on_terminal(sys.executable, "-c", TITLED)
    assert code == 0
    assert any("a title of more words than the columns have" in line for line in lines)


def test_a_run_in_a_folder_of_brackets_has_a_status(answer, tmp_path):
    from tests.longhaul.commands.test_status import make_run

    run = make_run(tmp_path / "[old]" / "[/old]")
    code, out, err = answer("status", run)
    assert code == 0, err
    assert str(run) in "".join(out.split())


@pytest.mark.slow
def test_a_misspelled_override_is_answered_in_three_lines_on_a_terminal():
    code, lines = on_terminal(*CLI, "pretrain", "--factory", "tiny_8k", "trainer.max_stepz=1")
    assert code == 2, lines
    assert len(lines) <= 3, lines
    assert "did you mean trainer.max_steps?" in " ".join(lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_h_v_and_q(answer, name):
    code, out, err = answer(name, "-h")
    assert code == 0, err
    for option in ("--verbose", "-v", "--quiet", "-q", "--help", "-h"):
        assert option in out


@pytest.mark.parametrize(
    "words", [(), ("doctor", "oom"), ("rope", "search"), ("clusters", "check")]
)
def test_so_have_the_command_itself_and_commands_below_commands(answer, words):
    code, out, _ = answer(*words, "-h")
    assert code == 0
    assert "--quiet" in out


@pytest.mark.parametrize(
    ("words", "quiet"), [(("-q", "plan"), True), (("plan", "-q"), True), (("plan",), False)]
)
def test_quiet_leaves_notes_out(answer, words, quiet):
    code, out, err = answer(*words, "llama31_8b", "--ladder", "tiny")
    assert code == 0
    assert "llama31_8b_tiny_8k" in out
    assert ("note: " in err) is not quiet


def piped(*words: str, **environment: str) -> str:
    """Return what a command prints into a pipe."""
    done = subprocess.run(
        (*CLI, *words), capture_output=True, text=True, check=False,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words", [("recipes",), ("show", "tiny_8k"), ("plan", "llama31_8b", "--seq", "64K"),
              ("rope", "--card", "tiny", "--method", "linear:factor=4")], ids=lambda words: words[0]
)  # fmt: skip
def test_lines_of_tables_end_without_blanks_in_a_pipe(answer, words):
    lines = answer(*words).out.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_terminal_of_ascii_gets_ascii():
    shown = piped("plan", "llama31_8b", "--seq", "64K", PYTHONIOENCODING="ascii")
    assert "| matmul" in shown
    assert re.search(r"\| weights +\| +[0-9.]+ \| #+ ", shown)


def test_a_home_that_cannot_be_written_to_is_no_warning_of_a_plot(tmp_path):
    done = subprocess.run(
        (*CLI, "plan", "llama31_8b", "--seq", "64K", "--plot", tmp_path / "plan.png"),
        capture_output=True, text=True, check=False, env={**os.environ, "HOME": "/dev/null",
        "MPLCONFIGDIR": "", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.png").stat().st_size
    assert "atplotlib" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("doctor", "oom", "--factory", "llama3_8b_nemo_64k", "--layout", "tp2 dp4"),
         r"\b(?:trainer|model|data|optim)\.[\w.\[\]]+=\S+"),
        (("plan", "llama31_8b", "--ladder", "nemo", "--nodes", "4"), r"\bllama\w+|offload\S+"),
        (("plan", "llama31_8b", "--seq", "1M"), r"\bhybrid\S+|\boffload\S+|\btile-\w+"),
        (("clusters",), r"\b(?:dgx|gb200)_\w+"),
        (("recipes", "--cards"), r"\b[a-z]+\d+\w*_\w+"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_what_is_to_be_copied_is_whole_in_a_narrow_terminal(words, pattern):
    wide, narrow = piped(*words), piped(*words, COLUMNS="60")
    wanted = set(re.findall(pattern, wide))
    assert len(wanted) > 2
    assert wanted <= set(narrow.split()) | set(re.findall(pattern, narrow))


@pytest.mark.parametrize("words", [("clusters",), ("plan", "llama31_8b", "--seq", "64K")], ids=str)
def test_tables_keep_to_the_columns_that_are_named(words):
    lines = piped(*words, COLUMNS="60").splitlines()
    tables = [line for line in lines if not line.isascii() or words == ("clusters",)][:-1]
    assert tables
    assert max(map(len, tables)) <= 60


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("batch", "--seq", "64K", "--tokens-per-batch", "4M", "--dp", "8"), {"tokens_per_batch"}),
        (("clusters",), {"gpus_per_node", "gpu_memory_bytes"}),
        (("clusters", "check", "dgx_h100"), {"lacking"}),
        (("doctor", "oom", "--factory", "llama3_8b_nemo_64k"), {"memory_bytes", "remedies"}),
        (("doctor", "slow", "--factory", "llama3_8b_nemo_64k"), {"predicted", "faster"}),
        (("plan", "llama31_8b", "--seq", "64K"), {"plans", "command"}),
        (("rope", "--card", "tiny", "--method", "linear:factor=4"), {"rotations", "length_tokens"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_what_answers_with_facts_has_them_as_json(answer, words, keys):
    code, out, err = answer(*words, "--json")
    found = json.loads(out)
    assert keys <= set(found[-1] if isinstance(found, list) else found)
    assert (code, "FAIL" in err) == (1 if "lacking" in keys else 0, False)
