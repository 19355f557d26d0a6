# SPDX-License-Identifier: Apache-2.0
"""Every command that a page or a string of the program names can be typed.

Collected are the lines of fenced blocks, inline code, comments of files to copy, and the strings of
the source, in which what a program fills in is a hole. Each is parsed by the command itself: an
unknown sub-command or option fails, and so does a card, ladder or recipe that is not shipped. What
pages print from given facts is parsed with its values in `test_next_commands.py`.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import typer

from longhaul.cli import COMMANDS, app, loaded
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped.table import ROWS
from tests.house.blocks import PAGES
from tests.house.rooms import ROOMS, TREE

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PROGRAM = re.compile(r"(?<![\w./-])longhaul (?=[a-z-])")
AT_THE_END = re.compile(r"(?:^|: )(longhaul [a-z][^`]*)\Z")
HOLE = "\0"
"""In the place of a value that a string is formatted with."""
SHELL = re.compile(r"[|&;<>()]+")
NAMES: dict[str, Any] = {"--card": CARDS, "--factory": ROWS, "--ladder": LADDERS}
USAGE: Any = typer.BadParameter.__base__
"""The errors of typer's parser, which newer releases do not take from click."""
LEFT_OUT = ("MissingParameter", "BadOptionUsage")
OWN = re.compile(r"[A-Z]|[./\0$:]")
"""In a value that is not a shipped name: a placeholder, a path, a hole, a name on the hub."""


class Told(NamedTuple):
    """A command in a text, and whether it is one to type, or one that is only mentioned."""

    place: str
    words: tuple[str, ...]
    to_type: bool

    def __str__(self) -> str:
        """Return the place and the command, as pytest shows it."""
        return f"{self.place}: longhaul {' '.join(self.words)}".replace(HOLE, "{}")


def words_after(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command of a line, without the shell's own."""
    for found in PROGRAM.finditer(text):
        lexer = shlex.shlex(text[found.end() :], posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = []
        for word in lexer:
            if SHELL.fullmatch(word):
                break
            if word not in ("...", "..."):
                words.append(word)
        yield tuple(words)


def of_page(place: str, text: str) -> Iterator[Told]:
    """Yield the commands of a page: of its blocks, and of its inline code."""
    for language, code in FENCE.findall(text):
        for line in re.sub(r" \\\n\s*", " ", code).splitlines():
            typed = language == "sh" or line.startswith("$ ")
            if typed and not line.lstrip().startswith("#"):
                yield from (Told(place, words, True) for words in words_after(line))
    for code in INLINE.findall(FENCE.sub("", text)):
        line = " ".join(code.split())
        if line.startswith("longhaul "):
            yield from (Told(place, words, False) for words in words_after(line))


def of_source(place: str, text: str) -> Iterator[Told]:
    """Yield the commands in the strings of a Python file, and its lists of a command's words."""
    tree = ast.parse(text)
    inside = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            words = [_string(each) for each in node.elts]
            if words[:1] == ["longhaul"] and len(words) > 1 and words[1] in COMMANDS:
                yield Told(place, tuple(word.replace(HOLE, "VALUE") for word in words[1:]), False)
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node not in inside:
            text = _string(node)
            inline = INLINE.findall(" ".join(text.split()))
            codes = [code for code in inline if code.startswith("longhaul ")]
            for line in INLINE.sub("", text).splitlines():
                codes += AT_THE_END.findall(line.strip())
            for code in codes:
                yield from (Told(place, words, False) for words in words_after(code))


def of_yaml(place: str, text: str) -> Iterator[Told]:
    """Yield the commands in the comments of a file that a user copies."""
    for line in re.findall(r"^# +(longhaul .*)$", text, re.MULTILINE):
        yield from (Told(place, words, True) for words in words_after(line))


def _string(node: ast.AST) -> str:
    """Return the text of a string's node, each value in it a hole; of anything else a hole."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str | int) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_string(part) for part in node.values)
    return HOLE


@cache
def told() -> list[Told]:
    """Return every command of the pages and of the source, each once."""
    found: dict[Told, None] = {}
    texts = [(page, of_page) for page in PAGES]
    for ending, commands_of in ((".py", of_source), (".yaml", of_yaml)):
        texts += [
            (f, commands_of) for room in ROOMS for f in sorted((TREE / room).rglob(f"*{ending}"))
        ]
    for file, commands in texts:
        place = file.relative_to(TREE).as_posix()
        found |= dict.fromkeys(commands(place, file.read_text(encoding="utf-8")))
    return list(found)


def refusal(one: Told) -> str:
    """Return why a command cannot be typed, or nothing."""
    name, *words = one.words
    if name.startswith("-"):
        return _unknown(typer.main.get_command(app), [name])
    if name not in COMMANDS:
        return f"there is no command {name}"
    command = loaded(name)
    if hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"{name} has no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if why := _unknown(command, words) or _not_shipped(words):
        return why
    if HOLE in "".join(words):
        return ""
    return _not_parsed(command, words, one.to_type)


def _unknown(command: Any, words: list[str]) -> str:
    known = {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)}
    known |= {"-h", "--help", "--install-completion", "--show-completion"}
    given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    unknown = [option for option in given if option not in known and HOLE not in option]
    return f"{command.name} has no {', '.join(unknown)}" if unknown else ""


def _not_shipped(words: list[str]) -> str:
    for option, value in pairwise(words):
        if OWN.search(value) or value.startswith("-"):
            continue
        if value not in NAMES.get(option, [value]):
            return f"{option} {value} is not shipped"
    return ""


def _not_parsed(command: Any, words: list[str], to_type: bool) -> str:
    """Return what the command's parser says; what a mention leaves out is not held against it."""
    if {"-h", "--help"} & set(words) or (hasattr(command, "commands") and not words):
        return ""
    options = {opt: param for param in command.params for opt in param.opts}
    valid = list(words)
    for at, (option, value) in enumerate(pairwise(words), 1):
        param = options.get(option)
        if param is not None and (param.metavar or param.type.name).lstrip("<").startswith("int"):
            valid[at] = "2" if value.isupper() else value
    try:
        command.make_context(command.name, valid)
    except USAGE as error:
        mentioned = type(error).__name__ in LEFT_OUT and not to_type
        return "" if mentioned else str(error.format_message())
    return ""


def test_commands_are_found_in_pages_and_in_the_source():
    places = {one.place for one in told()}
    assert {"README.md", "docs/guide.md", "docs/dgx_cluster.md", "docs/slurm.md"} <= places
    assert {"longhaul/commands/ladders.py", "recipes/shipped/rotation.py"} <= places
    assert {"recipes/ladders/template.yaml", "slurm/clusters/template.yaml"} <= places
    assert {one.words[0] for one in told()} >= set(COMMANDS)


@pytest.mark.parametrize("name", [*COMMANDS, "-"])
def test_every_command_of_a_text_can_be_typed(name):
    chosen = [
        one
        for one in told()
        if one.words[0] == name or (name == "-" and one.words[0] not in COMMANDS)
    ]
    assert chosen
    found = {str(one): why for one in chosen if (why := refusal(one))}
    assert found == {}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("trains --ladder tiny", "there is no command trains"),
        ("run --ladder tiny --node 2", "run has no --node"),
        ("run --ladder tniy", "--ladder tniy is not shipped"),
        ("run --nodes 2", "Missing option '--ladder'."),
        ("run --ladder tiny --nodes two", "Invalid value for '--nodes'"),
        ("plan llama31_8b llama3_8b --seq 1M", "unexpected extra argument"),
        ("doctor spke --run RUN", "doctor has no command spke"),
        ("doctor spike --run RUN --stages NAME", "spike has no --stages"),
    ],
)
def test_a_command_that_cannot_be_typed_is_noticed(line, why):
    [one] = of_page("a page", f"```sh\nlonghaul {line}\n```\n")
    assert why in refusal(one)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```sh\ncd a && longhaul run --ladder tiny \\\n    --nodes N | tee log\n```\n",
         ("run", "--ladder", "tiny", "--nodes", "N")),
        ("```text\n$ longhaul config\ncluster  longhaul plan\n```\n", ("config",)),
        ("Type `longhaul\nstatus RUN`, of longhaul.", ("status", "RUN")),
    ],
    ids=["a block", "a transcript", "inline code"],
)  # fmt: skip
def test_a_command_of_a_page_is_found(text, words):
    [one] = of_page("a page", text)
    assert (one.words, refusal(one)) == (words, "")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('raise ValueError(f"{run} is new; "\n    f"type `longhaul status {run}`")',
         ("status", HOLE)),
        ('x = f"make one: longhaul prepare --out {store}"', ("prepare", "--out", HOLE)),
        ('next_command(["longhaul", "report", "--run", run], "x")', ("report", "--run", "VALUE")),
    ],
    ids=["a message", "the end of a message", "a list"],
)  # fmt: skip
def test_a_command_of_the_source_is_found(source, words):
    [one] = of_source("a file", source)
    assert (one.words, refusal(one)) == (words, "")
