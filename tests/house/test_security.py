# SPDX-License-Identifier: Apache-2.0
"""docs/security.md: each line has tests that exist, and what the tree itself must not do.

Most lines are enforced by the module that they name and tested beside it; here is what holds for
the whole tree.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import audit
from tests.house.rooms import ROOMS, TREE, imports, modules

PAGE = TREE / "docs" / "security.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
LINE = re.compile(r"^\| (?P<line>[^|`-].*?) \| (?P<how>[^|]+) \| (?P<tests>[^|]*) \|$")
RULES = (
    "S102", "S103", "S108", "S113", "S202", "S301", "S302", "S306", "S307", "S323", "S501", "S506",
    "S507", "S602", "S604", "S605", "S701", "S702",
)  # fmt: skip
UNSAFE = ("load_from_checkpoint", "load_context", "unpack_archive", "extractall", "SqliteDict")
"""Functions that run code of a file, or write where a file says."""
WHOLE_ENVIRONMENT = {
    "longhaul.jobs.slurm_queue": "for squeue, without the variables that change its answer",
    "data.preparation.engine": "for processes of this machine",
    "recipes.checkpoints.record": "for git",
    "slurm.entrypoint": "to set the place of a rank by name",
    "slurm.preflight.machine": "of which checks show NCCL_* and what they are about",
    "slurm.preflight.ranks.measurement": "for a process of this machine",
}
"""Modules that take all variables, and what for; none of them writes them anywhere."""


def lines() -> list[tuple[str, str, str]]:
    """Return the lines of the tables of what is not trusted, with how and by which tests."""
    section = PAGE.read_text().partition("## What is not trusted")[2].partition("\n## ")[0]
    rows = [row.replace(r"\|", "!") for row in section.splitlines() if row.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    return [tuple(row) for row in cells if row[0] not in ("line", "---")]


def faults(name: str, source: str) -> Iterator[str]:
    """Yield the calls of a module that ruff has no rule for."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        last = called.rpartition(".")[2]
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called == "torch.load" and given.get("weights_only") != "True":
            yield f"{name}: torch.load without weights_only=True"
        if last == "from_pretrained" and called.startswith("Auto") and None not in given:
            if given.get("trust_remote_code") != "False":
                yield f"{name}: {called} without trust_remote_code=False"
        elif given.get("trust_remote_code", "False") != "False":
            yield f"{name}: trust_remote_code={given['trust_remote_code']}"
        if given.get("allow_pickle", "False") != "False":
            yield f"{name}: allow_pickle={given['allow_pickle']}"
        if last in UNSAFE:
            yield f"{name}: {last}"
        if last == "RestoreConfig" and given.get("load_artifacts") != "False":
            yield f"{name}: RestoreConfig without load_artifacts=False"


def of_ruff(folder: Path, *rooms: str) -> list[str]:
    """Return what ruff finds by the rules of the page, as the names of rules and files."""
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ruff"), "check", "--isolated", "--no-cache",
            "--output-format", "concise", "--select", ",".join(RULES), *rooms,
        ],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [line.split(": ") for line in done.stdout.splitlines() if ": S" in line]
    return [f"{line[1].split()[0]} {line[0].partition(':')[0]}" for line in found]


def taken_whole(source: str) -> bool:
    """Return whether a module takes all variables of the environment at once."""
    tree = ast.parse(source)
    known = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        or (isinstance(node, ast.Attribute) and node.attr in ("get", "setdefault", "pop", "update"))
    }
    known |= {id(node.comparators[0]) for node in ast.walk(tree) if isinstance(node, ast.Compare)}
    return any(
        isinstance(node, ast.Attribute)
        and ast.unparse(node) == "os.environ"
        and id(node) not in known
        for node in ast.walk(tree)
    )


def sources() -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each module of the rooms."""
    for room in ROOMS:
        for name, file in modules(TREE, room):
            yield name, file.read_text(encoding="utf-8")


def test_each_line_of_the_page_names_tests_that_exist():
    found = lines()
    assert len(found) > 30
    without = [line for line, _, tests in found if not TEST.findall(tests)]
    assert without == []
    named = sorted({pair for _, _, tests in found for pair in TEST.findall(tests)})
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (TREE / file).is_file()
        or not re.search(rf"^def {test}\(", (TREE / file).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_each_file_that_enforces_a_line_exists():
    files = [path for _, how, _ in lines() for path in re.findall(r"`([\w/]+\.(?:py|toml))`", how)]
    assert len(files) > 15
    assert [path for path in files if not (TREE / path).is_file()] == []


def test_no_file_of_the_tree_calls_what_the_page_rules_out():
    assert of_ruff(TREE, *ROOMS) == []
    assert [fault for name, source in sources() for fault in faults(name, source)] == []
    importers = [
        (name, target)
        for room in ROOMS
        for name, file in modules(TREE, room)
        for target in imports(name, file)
        if target.partition(".")[0] in ("tarfile", "zipfile", "shelve", "dill", "joblib")
    ]
    assert importers == []


def test_make_lint_has_the_rules_of_the_page():
    lint = (TREE / "pyproject.toml").read_text()
    assert [rule for rule in RULES if f'"{rule}"' not in lint] == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("import pickle\npickle.load(open('x', 'rb'))", "S301"),
        ("import yaml\nyaml.load(open('x'), yaml.Loader)", "S506"),
        ("eval(input())", "S307"),
        ("exec(input())", "S102"),
        ("import subprocess\nsubprocess.run('ls ' + input(), shell=True)", "S602"),
        ("import os\nos.system('ls ' + input())", "S605"),
        ("import tempfile\ntempfile.mktemp()", "S306"),
        ("open('/var/tmp/longhaul.txt', 'w')", "S108"),
        ("import tarfile\ntarfile.open('x').extractall()", "S202"),
        ("import jinja2\njinja2.Environment(autoescape=False)", "S701"),
        ("import torch\ntorch.load('x')", "torch.load without weights_only=True"),
        ("torch.load('x', weights_only=False)", "torch.load without weights_only=True"),
        ("AutoTokenizer.from_pretrained('x')", "without trust_remote_code=False"),
        ("load_dataset('x', trust_remote_code=True)", "trust_remote_code=True"),
        ("numpy.load('x', allow_pickle=True)", "allow_pickle=True"),
        ("Model.load_from_checkpoint('x')", "load_from_checkpoint"),
        ("nl.io.load_context('x')", "load_context"),
        ("nl.RestoreConfig(path='x')", "RestoreConfig without load_artifacts=False"),
    ],
)
def test_each_call_that_is_ruled_out_is_found(tmp_path, source, rule):
    (tmp_path / "module.py").write_text(source + "\n")
    found = [*of_ruff(tmp_path, "module.py"), *faults("module", source)]
    assert any(rule in fault for fault in found), found


def test_modules_that_take_the_whole_environment_are_known():
    assert {name for name, source in sources() if taken_whole(source)} == set(WHOLE_ENVIRONMENT)
    assert taken_whole("import os\nprint(dict(os.environ))")
    assert not taken_whole("import os\nos.environ['A'], os.environ.get('B'), 'C' in os.environ")


def test_no_module_asks_git_for_its_remotes():
    asking = re.compile(r"remote\.origin|[\"']remote[\"']|ls-remote")
    assert [name for name, source in sources() if asking.search(source)] == []
    assert asking.search("git('remote', '-v')")


@pytest.fixture
def variables(monkeypatch):
    """Return the variables of ranks under Slurm and on this machine, and plant secrets first."""
    from slurm import cluster_file, executors
    from slurm.local_executor import local_executor

    scripts = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join((scripts, os.environ["PATH"])))
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, f"planted-{name}")
    return executors.environment(cluster_file.load("dgx_h100")), local_executor(1).env_vars


def test_jobs_get_no_variable_of_the_shell_by_name(variables):
    assert all(variables)
    assert [value for of in variables for value in of.values() if "planted-" in value] == []


def test_ranks_are_offline(variables):
    assert [of["HF_HUB_OFFLINE"] for of in variables] == ["1", "1"]


def test_ray_is_only_connected_to():
    calls = [
        (name, {word.arg: ast.unparse(word.value) for word in node.keywords})
        for name, source in sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ray.init"
    ]
    assert [name for name, _ in calls] == ["data.preparation.engine"]
    assert calls[0][1]["address"] == "tried or 'auto'"  # without an address Ray starts a cluster
    source = (TREE / "data" / "preparation" / "engine.py").read_text()
    assert 'os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")' in source


VULNERABLE = {"id": "PYSEC-1", "aliases": ["CVE-2099-0001"], "fix_versions": ["2"]}
PACKAGE = {"name": "a", "version": "1"}


def test_an_advisory_that_the_page_answers_is_not_told_again():
    answer = {"dependencies": [PACKAGE | {"vulns": [VULNERABLE]}]}
    assert audit.findings(answer, []) == ["a 1: PYSEC-1 (CVE-2099-0001), fixed in 2"]
    assert audit.findings(answer, ["CVE-2099-0001"]) == []
    assert {"CVE-2026-58659", "GHSA-g4r7-86gm-pgqc", "PYSEC-2024-277"} <= set(audit.accepted())


def test_an_audit_that_asked_nobody_has_not_passed():
    nobody = {"dependencies": [{"name": "a", "skip_reason": "not found"}]}
    with pytest.raises(ValueError, match="knows none of the 1 packages, so nothing was audited"):
        audit.findings(nobody, [])
    some = {"dependencies": [*nobody["dependencies"], {"name": "b", "version": "1", "vulns": []}]}
    assert audit.findings(some, []) == ["a: not audited"]


def test_make_has_an_audit_and_a_bill_of_materials_of_each_lock():
    done = subprocess.run(
        ["make", "--dry-run", "audit", "sbom"],
        cwd=TREE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tests.house.audit" in done.stdout
    assert [lock.name for lock in audit.LOCKS if lock.name not in done.stdout] == []
