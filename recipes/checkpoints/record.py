# SPDX-License-Identifier: Apache-2.0
"""The record of how a checkpoint was made, and the difference of two; imports no torch.

    step=N/reproduce/record.json    versions, processor and GPUs, image, commit, store, start, ranks
    step=N/reproduce/config.yaml    the resolved recipe of the stage, for `longhaul pretrain`
    step=N/reproduce/changes.diff   changes of tracked files against the commit, if there are any
    step=N/reproduce/cluster.yaml   the cluster file that the job was submitted with, if it was

The marker has the SHA-256 of all four. The first rank writes them before each marker; what it
records of itself is from its start, since files may be edited while it trains. A job on a cluster
runs in a copy of the committed tree, without git: its commit is the one that `longhaul` recorded
when it was submitted, in the stage's `submitted.json`.

No secret is recorded: a text in which a line looks like a secret is withheld and named instead.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from custom_modules.checkpoints.index import CheckpointError
from data.files.json_object import json_object
from data.files.sha256 import sha256_of
from data.files.user_file import read_yaml
from data.files.whole import write_bytes, write_text
from recipes.checkpoints.files import saved_files
from recipes.checkpoints.marker import MARKER, RECIPE

FOLDER = "reproduce"
RECORD, CHANGES, CLUSTER = "record.json", "changes.diff", "cluster.yaml"
SUBMITTED = "submitted.json"
"""File of a stage's folder: the commit that its jobs run, and the path of the cluster file."""
FORMAT = 1
START = "start"
"""Entry of a record: the checkpoint that the stage started from (`start_entry`)."""
ABSENT = "absent"
NOT_COMPARED = re.compile(
    r"(format|stage|step|saved|store\.path|store\.train_sha256|machine\.(system|cpus))$"
    r"|(withheld|environment|code\.changed_files)\b"
)
"""Names of entries that may differ, and of those that only records of earlier versions have."""
IMAGE = "LONGHAUL_IMAGE"
"""Variable of our images: release and commit, and tag and digest of the image beneath."""

TREE = Path(__file__).resolve().parents[2]
ROOMS = ("custom_modules", "data", "eval", "longhaul", "recipes", "slurm")
PACKAGES = (
    "longhaul-recipes", "torch", "nemo_toolkit", "megatron-core", "nemo_run", "lightning",
    "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "triton", "transformer-engine",
    "flash-attn", "flash-attn-3", "apex", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas",
)  # fmt: skip
"""Distributions that can change what is computed; those that are not installed are left out."""
SECRET = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|\b(hf_|gh[pousr]_|github_pat_|glpat-|nvapi-|xox[baprs]-|sk-)[A-Za-z0-9_-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|://[^/\s:@]+:[^/\s@]+@"
    r"|(api_?key|secret|passw(or)?d|(access|auth|bearer)_?token)[\"']?\s*[:=]\s*[\"']?[^\s\"']{6,}",
    re.IGNORECASE,
)
"""A line that looks like a secret: known forms of keys, and values under such a name."""
LARGEST_DIFF = 2**20
"""Bytes of changes that are kept; of larger ones the SHA-256 is."""
GIT_SECONDS = 60
CHANGES_UNKNOWN = "git could not say what has changed"
"""Why the changes are withheld if git fails, or takes longer than `GIT_SECONDS`."""


def start_entry(start: Path | None) -> dict[str, Any]:
    """Return the entry of a record on the checkpoint that a stage starts from, null for none.

    A checkpoint of NeMo has no marker: its step is null and the SHA-256 empty.
    """
    if start is None:
        return {START: None}
    return {
        START: {
            "path": str(start.absolute()),
            "step": json_object(start / MARKER).get("step"),
            "marker_sha256": _sha256(start / MARKER),
        }
    }


def start_entry_of(checkpoint: Path) -> dict[str, Any]:
    """Return the entry that a checkpoint's record has, for a stage that resumes from it.

    Records of earlier versions lack it: nothing is returned.
    """
    content = json_object(checkpoint / FOLDER / RECORD)
    return {key: value for key, value in content.items() if key == START}


def write_record(
    checkpoint: Path,
    *,
    stage: Path,
    step: int,
    ranks: int,
    store: Path,
    train_sha256: str,
    start: Mapping[str, Any],
) -> None:
    """Write the record into a checkpoint before its marker.

    `stage` is the stage's folder and `start` what `start_entry` returned when it started.
    """
    here, changes = of_this_process()
    submitted = json_object(stage / SUBMITTED)
    commit, cluster = here["code"]["commit"] or submitted.get("commit", ""), {}
    if "cluster" in submitted:
        sha256_ = _sha256(stage / CLUSTER)
        cluster = {"cluster": {"path": submitted["cluster"], "sha256": sha256_}}
    to = checkpoint / FOLDER
    to.mkdir(parents=True, exist_ok=True)
    withheld = {}
    for name in (RECIPE, CLUSTER):
        if not (stage / name).is_file():
            continue
        text = (stage / name).read_text(encoding="utf-8")
        if why := withheld_text(name, text):
            withheld[name] = why
        else:
            write_text(to / name, text)
    if changes:
        write_bytes(to / CHANGES, changes)
    content = {
        "format": FORMAT,
        "stage": stage.name,
        "step": step,
        "ranks": ranks,
        "saved": shown_time(time.time()),
        "store": {
            "path": str(store.absolute()),
            "manifest_sha256": _sha256(store / "manifest.json"),
            "train_sha256": train_sha256,
        },
        **start,
        **here,
        "code": here["code"] | {"commit": commit},
        **cluster,
        "withheld": withheld,
    }
    write_text(to / RECORD, json.dumps(content, indent=1) + "\n")


def shown_time(seconds: float) -> str:
    """Return a Unix time as records and tables have it, in UTC to the minute."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Return the record of a checkpoint; raise ValueError if it has none, or a damaged one."""
    path = checkpoint / FOLDER / RECORD
    if not path.is_file():
        raise ValueError(
            f"{checkpoint} has no {FOLDER}/{RECORD}: it was saved by an earlier version, imported "
            "or averaged; name a checkpoint that a stage saved"
        )
    for name, saved in (saved_files(checkpoint) or {}).items():
        file = checkpoint / name
        if name.startswith(f"{FOLDER}/") and (found := _sha256(file)) != saved.sha256:
            what = "damaged: its SHA-256 differs from what was written" if found else "missing"
            raise CheckpointError(f"{file} is {what}; restore it from a copy", path=file)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error})", path=path) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a record that this version reads; use the version that wrote it"
        )
    return content


def record_here(record: Mapping[str, Any], store: Path) -> dict[str, Any]:
    """Return what this machine would record in the place of a record; `store` is here.

    Of the start, the store and the cluster file it is what is here under the recorded name.
    """
    here: dict[str, Any] = {
        **of_this_process()[0],
        "ranks": record["ranks"],
        "store": {"manifest_sha256": _sha256(store / "manifest.json")},
    }
    if (cluster := record.get("cluster")) is not None:
        here["cluster"] = cluster | {"sha256": _sha256(Path(cluster["path"]))}
    start = record.get(START)
    if start is not None and Path(start["path"]).is_dir():
        here |= start_entry(Path(start["path"]))
    return here


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the entries that two records do not share, by name, each with its two values.

    Changes of the code that are not known differ from every other.
    """
    values = [dict(_leaves("", record)) for record in (first, second)]
    pairs = {name: tuple(of.get(name, ABSENT) for of in values) for name in values[0] | values[1]}
    return {
        name: (one, other)
        for name, (one, other) in pairs.items()
        if (one != other or one == CHANGES_UNKNOWN) and not NOT_COMPARED.match(name)
    }


def _leaves(name: str, node: Any) -> Iterator[tuple[str, str]]:
    """Yield every value within a record under its dotted name; an empty one is absent."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), value)
    elif isinstance(node, list):
        for at, value in enumerate(node):
            yield from _leaves(f"{name}[{at}]", value)
    elif node not in (None, ""):
        yield name, str(node)


def recorded_recipe(checkpoint: Path) -> dict[str, Any]:
    """Return the recipe of a record, to be compared as a part of it; empty if it has none."""
    path = checkpoint / FOLDER / RECIPE
    return {"recipe": read_yaml(path)} if path.is_file() else {}


def _sha256(file: Path) -> str:
    """Return the SHA-256 of a file, empty if it cannot be read."""
    try:
        return sha256_of([file])[0]
    except OSError:
        return ""


@cache
def of_this_process() -> tuple[dict[str, Any], bytes]:
    """Return what a record says of this process at the first call, and the changes of its code.

    Read from metadata, `/proc` and git, so nothing large is imported.
    """
    found, changes = code()
    gpus: dict[str, int] = {}
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = _first(r"Model:\s*(.+)", file) or "unknown"
        gpus[model] = gpus.get(model, 0) + 1
    cpu = _first(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo")) or platform.machine()
    return {
        "versions": versions(),
        "image": os.environ.get(IMAGE, ""),
        "machine": {"cpu": cpu, "gpus": gpus},
        "code": found,
    }, changes


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA, the driver and the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if "torch" in found:
        file = Path(str(distribution("torch").locate_file("torch/version.py")))
        found["cuda"] = _first(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", file)
    driver = Path("/proc/driver/nvidia/version")
    found["nvidia driver"] = _first(r"NVRM version:.*?\s(\d+\.\d[\d.]*)", driver)
    return {name: text for name, text in found.items() if text}


def code(tree: Path = TREE) -> tuple[dict[str, Any], bytes]:
    """Return the commit of a checkout and how its files differ from it, and the changes.

        commit           empty without git, or if the folder is not a git checkout of its own
        changes_sha256   of `git diff` against the commit; empty if no tracked file differs
        new_files        names and SHA-256 of files of the packages that git does not track
        withheld         why the text of the changes is not kept; empty if it is

    The changes are as `git apply` takes them. The installed files of a wheel have none of these:
    its version tells what it is.
    """
    found: dict[str, Any] = {"commit": "", "changes_sha256": "", "new_files": {}, "withheld": ""}
    if shutil.which("git") is None or not (tree / ".git").exists():
        return found, b""
    found["commit"] = (_git(tree, "rev-parse", "HEAD") or b"").decode().strip()
    if not found["commit"]:
        return found, b""
    changes = _git(tree, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
    new = _git(tree, "ls-files", "--others", "--exclude-standard", "-z", "--", *ROOMS)
    if changes is None or new is None:
        return found | {"withheld": CHANGES_UNKNOWN}, b""
    withheld = withheld_text("the changes", changes.decode(errors="replace"))
    if len(changes) > LARGEST_DIFF:
        withheld = f"the changes have {len(changes):,} bytes, and {LARGEST_DIFF:,} are kept"
    found |= {
        "changes_sha256": sha256(changes).hexdigest() if changes else "",
        "new_files": {
            name: sha256((tree / name).read_bytes()).hexdigest()
            for name in sorted(new.decode(errors="replace").split("\0"))
            if name.endswith((".py", ".yaml", ".jinja")) and (tree / name).is_file()
        },
        "withheld": withheld,
    }
    return found, b"" if withheld else changes


def withheld_text(what: str, text: str) -> str:
    """Return why a text is not recorded, with the line; empty if nothing in it looks secret."""
    for number, line in enumerate(text.splitlines(), start=1):
        if SECRET.search(line):
            return f"line {number} of {what} looks like a secret"
    return ""


def _git(tree: Path, *words: str) -> bytes | None:
    """Return what git prints, None if it refuses or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *words],
            capture_output=True,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _first(pattern: str, file: Path) -> str:
    """Return the first match of a group in a file, empty if there is none or no such file."""
    try:
        found = re.search(pattern, file.read_text(errors="replace"), flags=re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
