# SPDX-License-Identifier: Apache-2.0
"""Each text of a cluster file reaches srun and its ranks as it was written, or is refused.

Batch scripts are run with a stand-in `srun` that records its arguments and its environment. The
fields are those of the schema: a field added later is tried as well.
"""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import nemo_run as run
import pytest
from pydantic import BaseModel, ValidationError

from slurm.cluster_file import ClusterFile, Tunnel
from slurm.executors import executor
from slurm.experiment import Job, scripts

BEGINNINGS = ("", "/", "--x=")
"""Beginnings that the texts of fields may need."""
PLAIN = "PLAIN"
TEXTS = (
    "a$(touch ran)`touch ran`$HOME$$${num_nodes_var}", "a;b>ran&c|d", "a\ntouch ran", "sh ared",
    "a 'b' \"c\"", "a'b*{c,d}#!", "~", "a\\b", "a:b,c", "-x", "/nemo_run/x", "/$nemo_run/x",
)  # fmt: skip
BASES = {
    "container": {"container": {"image": "/x.sqsh"}},
    "python": {"python": "/venv"},
}
STAND_IN = """#!/usr/bin/env python3
import json, os, sys
with open("words", "a") as words:
    print(json.dumps([sys.argv[1:], dict(os.environ)]), file=words)
"""


def places(kind: Any, wrap: Callable[[Any], Any]) -> Iterator[Callable[[str], Any]]:
    """Yield for each place of a text below a type a function that states a text there."""
    if kind is str:
        yield wrap
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from places(field.annotation, lambda value, name=name: wrap({name: value}))
    elif get_origin(kind) is dict:
        yield lambda text: wrap({text: "x"})
        yield lambda text: wrap({"comment": text})
        yield lambda text: wrap({"COMMENT": text})
    elif get_origin(kind) is tuple:
        yield from places(get_args(kind)[0], lambda value: wrap([value]))
    else:
        for part in get_args(kind):
            yield from places(part, wrap)


PLACES = list(places(ClusterFile, lambda value: value))


def merged(*files: dict[str, Any]) -> dict[str, Any]:
    """Return mappings as one; of two values at one place the later."""
    whole: dict[str, Any] = {}
    for file in files:
        for key, value in file.items():
            inner = isinstance(value, dict) and key in whole
            whole[key] = merged(whole[key], value) if inner else value
    return whole


def taken(base: dict[str, Any], stated: dict[str, Any]) -> bool:
    try:
        ClusterFile.model_validate_json(json.dumps(merged(base, stated)))
    except ValidationError:
        return False
    return not ("container" in stated and "container" not in base)


def words(file: dict[str, Any], folder: Path) -> list[Any]:
    """Return the words that sbatch, and each srun of the script, are given for a cluster file."""
    folder.mkdir()
    site = ClusterFile.model_validate_json(json.dumps(file))
    made = executor(
        site, nodes=1, ranks_per_node=1, folder=folder, outcome=folder / "outcome", array=2
    )
    job = Job("stage", run.Partial(subprocess.getoutput, "true"), made)
    script = scripts("ladder", [job], folder)["stage"]
    program = folder / "srun"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-c", script], cwd=folder, env={"PATH": path}, check=False, capture_output=True
    )
    assert not (folder / "ran").exists(), "a part of a text was executed"
    of_sbatch = [shlex.split(line) for line in script.splitlines() if line.startswith("#SBATCH")]
    read = [*of_sbatch, *map(json.loads, (folder / "words").read_text().splitlines())]
    return json.loads(re.sub(r"_\d{19}", "_ID", json.dumps(read).replace(str(folder), "/run")))


@pytest.fixture(scope="module", autouse=True)
def _small_tree(tmp_path_factory):
    """Work in a tree of one file, which each job unpacks."""
    tree = tmp_path_factory.mktemp("tree")
    (tree / "file").touch()
    author = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tree, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tree)
        yield


@pytest.fixture(scope="module")
def plain_words(tmp_path_factory):
    """Return the words of a file whose texts at some places are plain, read once."""
    read: dict[str, Any] = {}

    def of(file: dict[str, Any]) -> Any:
        key = json.dumps(file)
        if key not in read:
            read[key] = words(file, tmp_path_factory.mktemp("plain") / "run")
        return read[key]

    return of


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_a_text_of_the_file_is_refused_or_read_as_it_was_written(base, text, tmp_path, plain_words):
    base = merged({"name": "mine", "slurm": {"account": "me"}}, base)
    given, plain = base, base
    for place in PLACES:
        for beginning in BEGINNINGS:
            if taken(base, place(beginning + text)) and taken(base, place(beginning + PLAIN)):
                given = merged(given, place(beginning + text))
                plain = merged(plain, place(beginning + PLAIN))
                break
    expected = json.dumps(plain_words(plain)).replace(PLAIN, json.dumps(text)[1:-1])
    assert words(given, tmp_path / "run") == json.loads(expected)


def test_the_comparison_sees_the_text_of_each_field_of_a_script(plain_words):
    slurm = {
        "account": "1-A",
        "partition": "2-A",
        "srun": ["--x=3-A"],
        "sbatch": {"comment": "4-A"},
    }
    container = {"image": "5-A", "mounts": ["/6-A"]}
    file = {"slurm": slurm, "container": container, "environment": {"COMMENT": "7-A"}}
    read = json.dumps(plain_words({"name": "mine", **file}))
    assert [number for number in range(1, 8) if f"{number}-A" not in read] == []


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_of_the_tunnel_is_one_word_of_nemo_run_s_commands(text, tmp_path):
    for place in places(Tunnel, lambda value: value):
        try:
            Tunnel(**place(text))
        except ValidationError:
            continue
        read = subprocess.run(
            ["bash", "-c", f"printf '%s\\n' rsync me@{text}"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
        assert read.stdout.decode().splitlines() == ["rsync", f"me@{text}"]
