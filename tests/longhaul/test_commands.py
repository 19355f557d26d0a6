# SPDX-License-Identifier: Apache-2.0
"""The list of sub-commands: what it says of each is what the command says of itself."""

import inspect
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from longhaul import cli
from longhaul.gone import GONE
from longhaul.version import commit
from tests.house.rooms import TREE

LONGHAUL = Path(sys.executable).parent / "longhaul"
IMPORTED = """
import sys
from longhaul import cli
try:
    cli.main()
finally:
    ours = sorted(name for name in sys.modules if name.split(".")[0] in {rooms})
    sys.stderr.write("imported " + " ".join(ours))
"""
ROOMS = ("longhaul", "recipes", "custom_modules", "data", "slurm", "eval")


def imported(*words: str) -> tuple[str, set[str]]:
    """Run a command in a process of its own; return what it shows and which of ours it imports."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED.format(rooms=ROOMS), *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.rpartition("imported ")[2].split())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_has_the_first_line_of_a_command_s_help(name):
    module, _, attribute = cli.COMMANDS[name].place.partition(":")
    defined = getattr(import_module(module), attribute)
    text = inspect.getdoc(defined) if inspect.isfunction(defined) else defined.info.help
    assert text.splitlines()[0] == cli.COMMANDS[name].summary
    assert cli.loaded(name).name == name


@pytest.mark.parametrize("words", GONE)
def test_a_word_or_option_of_before_is_answered_with_what_replaces_it(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["longhaul", *words.split(), "more"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == (
        f"error: `longhaul {words}` is not in this release; {GONE[words]}\n"
    )
    word = words.split()
    assert word[0] not in cli.COMMANDS or len(word) >= 2  # an option, or a leaf


def test_help_imports_no_command():
    shown, ours = imported("--help")
    light = {"longhaul.terminal", "longhaul.terminal.messages", "longhaul.own_packages"}
    light.add("longhaul.gone")
    assert ours == {"longhaul", "longhaul.cli"} | light
    for name, command in cli.COMMANDS.items():
        assert name in shown
        assert command.summary.split()[0] in shown


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (
            ("recipes",),
            ("slurm", "eval", "data", "longhaul.commands.doctor", "longhaul.commands.plan"),
        ),
        (
            ("show", "tiny_8k"),
            ("slurm", "eval", "data", "longhaul.commands.doctor", "longhaul.commands.plan"),
        ),
        (
            ("plan", "llama31_8b", "--seq", "128K"),
            ("slurm", "eval", "data", "longhaul.commands.doctor"),
        ),
    ],
    ids=lambda value: value[0],
)
def test_a_quick_command_imports_its_own_and_no_other(words, others):
    _, ours = imported(*words)
    light = {
        "data", "data.files", "data.files.nearest", "data.files.user_file", "data.hub",
        "data.mixture", "data.mixture.config",
    }  # fmt: skip
    brought = {name for name in ours if name in others or name.split(".")[0] in others}
    assert brought <= light


def test_a_command_that_is_not_there_names_the_nearest(answer):
    code, _, said = answer("recipe")
    assert code == 2
    assert "No such command 'recipe'. Did you mean 'recipes'" in " ".join(said.split())


def test_the_version_has_the_commit_and_the_libraries(answer):
    code, shown, _ = answer("--version")
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert lines["longhaul"] == f"{version('longhaul-recipes')} ({commit(TREE)})"
    for name in ("nemo_toolkit", "megatron-core", "torch"):
        assert lines[name] == version(name)


def test_a_folder_that_is_not_a_checkout_has_no_commit(tmp_path):
    assert commit(tmp_path) == ""


def test_a_changed_tree_says_so(tmp_path):
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{clean} and changes"


@pytest.mark.parametrize(
    ("words", "at", "offered"),
    [
        ("longhaul re", 1, {"recipes", "rehearse", "report"}),
        ("longhaul plan --fp", 2, {"--fp8"}),
    ],
)
def test_a_shell_completes_commands_and_options(monkeypatch, words, at, offered):
    variables = {"_LONGHAUL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([LONGHAUL], capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == offered, done.stderr


SUBCOMMANDS = {
    "checkpoint": "average", "clusters": "check", "doctor": "oom", "probe": "memory",
    "rope": "search",
}  # fmt: skip


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_every_option_in_full_on_80_columns(name, answer, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    for words in ([name], [name, SUBCOMMANDS.get(name, "")]):
        code, shown, _ = answer(*filter(None, words), "-h")
        assert code == 0
        assert "\N{HORIZONTAL ELLIPSIS}" not in shown
