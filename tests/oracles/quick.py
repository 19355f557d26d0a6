# SPDX-License-Identifier: Apache-2.0
"""The quick oracles: recipes, batch scripts, plans, stores, RULER's samples, refusals.

Each function takes no arguments, works in a folder of its own and returns entries by name.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from .command import DROPPED, LADDER, answer, dropped, folder, here, settled, table, tree
from .frozen import corpus

Entries = dict[str, Any]
KILLED_BEFORE = (9, 14, 19)
"""Changes of folders of which each is the last of a process."""
CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"})
FRAME = str.maketrans(dict.fromkeys("╭╮╰╯─│", " "))
USAGE = re.compile(r"Usage: .*? Try '[^']*' for help\. ")
OF_THIS_RUN = frozenset({"versions", "own_sha256", "seconds"})
"""Fields of a manifest that depend on versions, paths and time."""


def recipes() -> Entries:
    """Return every shipped recipe, resolved."""
    entries = {}
    with folder():
        names = [row["name"] for row in json.loads(answer("recipes --json").text())]
        for name in names:
            answer(f"show {name} --to-yaml recipe.yaml").text()
            entries[name] = yaml.load(Path("recipe.yaml").read_text(), Loader=yaml.CSafeLoader)
    return entries


def scripts() -> Entries:
    """Return the lines of the batch scripts of dry runs, by job; a new line moves no other."""
    entries: Entries = {}
    with folder() as place:
        _site(place)
        for name, line in table("scripts.yaml").items():
            shown = settled(answer(line).text(), place)
            _, *parts = re.split(r"^# ---- (.*)$", re.sub(r"_\d{19}", "_ID", shown), flags=re.M)
            for job, script in zip(parts[::2], parts[1::2], strict=True):
                entries[f"{name} {job}"] = [{"_target_": row} for row in script.splitlines() if row]
    return entries


def _site(place: Path) -> None:
    """Make a git tree with a cluster file and the folders that scripts name."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True)
    for name in ("books", "tokenizer"):
        (place / name).mkdir()
    text = (LADDER / "site.yaml").read_text().replace("FOLDER", str(place))
    (place / "site.yaml").write_text(text.replace("CACHE", os.environ["HF_HOME"]))
    shutil.copy(LADDER / "chain.yaml", place)


def plans() -> Entries:
    """Return what is planned for each case, and the page of published points."""
    with folder() as place:
        _store(place)
        entries = _facts(table("plans.yaml"), place)
    page = [sys.executable, "-m", "benchmarks.planner_published"]
    done = subprocess.run(page, cwd=tree(), capture_output=True, text=True, check=True)
    entries["published"] = [line for line in done.stdout.splitlines() if line.startswith("|")]
    return entries


def facts() -> Entries:
    """Return what commands say of recipes, ladders, clusters and rotations."""
    with folder() as place:
        names = [row["name"] for row in json.loads(answer("recipes --json").text())]
        return _facts([*table("facts.yaml"), *(f"show {name}" for name in names)], place)


def _facts(lines: list[str], place: Path) -> Entries:
    """Return the exit code and the JSON of command lines, or what they say instead of it."""
    entries: Entries = {}
    for line in lines:
        if dropped(line):
            entries[line] = DROPPED
            continue
        end = answer(f"{line} --json")
        out, err = settled(end.out, place), settled(end.err, place)
        entries[line] = {"code": end.code, "facts": json.loads(out) if out else err}
    return entries


def stores() -> Entries:
    """Return the files of stores of four sources, of one that was killed, and packed rows."""
    entries = {}
    with folder() as place:
        sources = _store(place)
        entries |= _files("tokenizer", place / "store", place)
        named = " ".join(f"--source {name}={at}" for name, at in sources.items())
        line = f"prepare {named} --tokenizer store/tokenizer --heldout-fraction 0.2 --workers 1"
        answer(f"{line} --out whole").text()
        entries |= _files("whole", place / "whole", place)
        answer(f"{line} --plan-only --out parts").text()
        (plan,) = {path.parent for path in place.rglob("plan.json")}
        answer(f"prepare --plan {plan} --task 0/2 --workers 1").text()
        answer(f"prepare --plan {plan} --task 1/2 --workers 1").text()
        answer(f"prepare --plan {plan} --merge").text()
        entries |= _files("parts", place / "parts", place)
        kills = 0
        while _killed(f"{line} --out resumed", KILLED_BEFORE[kills % len(KILLED_BEFORE)]):
            kills += 1
        entries["killed"] = {"at least twice": kills >= 2}
        entries |= _files("resumed", place / "resumed", place)
        mix = f"mix --ladder {LADDER / 'mixed.yaml'} --card tiny --store whole --json"
        entries["mix"] = json.loads(settled(answer(mix).text(), place))
        for step in (1, 7, 20):
            entries[f"step {step}"] = json.loads(answer(f"{mix} --step {step}").text())
        entries |= _files("packed", place / "whole/index", place)
    return entries


def _store(place: Path) -> dict[str, str]:
    """Make the corpus, and the store whose tokenizer the others use; return the sources."""
    sources = corpus(place / "sources")
    answer(f"prepare --source {sources['lines']} --out store --vocab-size 512 --workers 1").text()
    return sources


def _killed(line: str, number: int) -> bool:
    """Run a command in a process that kills itself before a change of a folder; was it killed?"""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status) and status:
            raise RuntimeError(f"{line}: exit status {status}")
        return os.WIFSIGNALED(status)
    left = number

    def kill(event: str, _: object) -> None:
        nonlocal left
        if event in CHANGES:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    os._exit(answer(line).code not in (None, 0))


def _files(name: str, root: Path, place: Path) -> Entries:
    """Return the files below a folder: the content of JSON, the SHA-256 of others."""
    return {
        f"{name} {path.relative_to(root)}": _json(path, place) if path.suffix == ".json"
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*")) if path.is_file()
    }  # fmt: skip


def _json(path: Path, place: Path) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items() if key not in OF_THIS_RUN}
        return [plain(one) for one in value] if isinstance(value, list) else value

    return plain(json.loads(settled(path.read_text(), place)))


def ruler() -> Entries:
    """Return RULER's samples, of every task that needs no download."""
    with folder() as place:
        _store(place)
        answer(
            "ruler make --tokenizer store/tokenizer --out samples --lengths 2K,8K --samples 2"
        ).text()
        return _files("samples", place / "samples", place)


def refusals() -> Entries:
    """Return what wrong command lines are answered with."""
    entries, cases = {}, table("refusals.yaml")
    for line, named, *files in (*cases["light"], *cases["with_nemo"]):
        entries[f"{line} ({named})"] = (
            DROPPED if dropped(line) else _refusal(line, here(line, named)[1], *files)
        )
    return entries


def _refusal(line: str, named: str, files: Entries | None = None) -> Entries:
    with folder() as place:
        for name, content in (files or {}).items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if content is None else path.write_bytes(_bytes(content))
        before = _content(place)
        end = answer(line)
        left = _content(place)
    said = settled(end.out + end.err, place)
    ours = [text for text in said.splitlines() if text.startswith("error: ")]
    message = ours[0] if ours else USAGE.sub("", " ".join(said.translate(FRAME).split()))
    return {
        "code": end.code,
        "sentences": len(ours) or int("Traceback" not in said and bool(message)),
        "message": message,
        "named": named,
        "leaves files": sorted(before ^ left),
    }


def _bytes(content: Any) -> bytes:
    pieces = [[content, 1]] if isinstance(content, str) else content
    return "".join(text * times for text, times in pieces).encode("latin-1")


def _content(place: Path) -> set[str]:
    return {
        f"{path.relative_to(place)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        if path.is_file() else str(path.relative_to(place))
        for path in place.rglob("*")
    }  # fmt: skip


ORACLES = {
    "plans": plans,
    "facts": facts,
    "refusals": refusals,
    "recipes": recipes,
    "scripts": scripts,
    "stores": stores,
    "ruler": ruler,
}
TABLES = {
    "plans": ("plans.yaml",),
    "facts": ("facts.yaml",),
    "refusals": ("refusals.yaml",),
    "scripts": ("scripts.yaml", "ladder/site.yaml", "ladder/chain.yaml"),
    "stores": ("ladder/mixed.yaml",),
}
"""Tables that an oracle reads, by its name."""
BEFORE: list[str] = []
"""Folders that precede the tree on the path of Python."""


def environment(place: Path, _: Path) -> dict[str, str]:
    """Return variables of the process that runs them; `place` is kept from run to run."""
    (place / "cache").mkdir(parents=True, exist_ok=True)
    return {"HF_HOME": str(place / "cache")}
