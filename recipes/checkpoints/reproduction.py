# SPDX-License-Identifier: Apache-2.0
"""The record with which a checkpoint can be made again, next to its weights; imports no torch.

    step=N/reproduce/record.json    versions, machine, commit, environment, store, start, ranks
    step=N/reproduce/config.yaml    the resolved recipe of the stage, for `longhaul pretrain`
    step=N/reproduce/changes.diff   changes of tracked files against the commit, if there are any
    step=N/reproduce/cluster.yaml   the cluster file that the job was submitted with, if it was

The marker has the SHA-256 of all four. The first rank writes them before each marker; versions,
commit and changes are those of the process that trains. A job on a cluster runs in a copy of the
committed tree, without git: its commit is the one that `longhaul` recorded when it was submitted,
in the stage's `submitted.json`.
"""

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from custom_modules.checkpoints.index import CheckpointError
from data.files.json_object import json_object
from data.files.sha256 import sha256_of
from data.files.user_file import read_yaml
from data.files.whole import write_bytes, write_text
from recipes.checkpoints import surroundings
from recipes.checkpoints.files import saved_files
from recipes.checkpoints.marker import MARKER, RECIPE, is_marked

FOLDER = "reproduce"
RECORD, CHANGES, CLUSTER = "record.json", "changes.diff", "cluster.yaml"
SUBMITTED = "submitted.json"
"""File of a stage's folder with the commit that its jobs run."""
FORMAT = 1
SET_BY_JOBS = frozenset({
    "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS",
    "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DESYNC_DEBUG",
})  # fmt: skip
"""Variables that Longhaul or torchrun sets for ranks, which a shell need not have."""
ABSENT = "absent"
START = "start"
"""Entry of a record: the checkpoint that the stage started from (`start_entry`)."""


class Difference(NamedTuple):
    """One fact that is not here as it was recorded."""

    group: str
    """versions, code, store, start, machine or environment."""
    what: str
    recorded: str
    here: str


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
    found, changes = surroundings.of_this_process()
    code = dict(found["code"])
    if not code["commit"]:
        code |= _submitted(stage)
    to = checkpoint / FOLDER
    to.mkdir(parents=True, exist_ok=True)
    withheld = {}
    for name in (RECIPE, CLUSTER):
        if not (stage / name).is_file():
            continue
        text = (stage / name).read_text(encoding="utf-8")
        if why := surroundings.withheld_text(name, text):
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
            "manifest_sha256": manifest_sha256(store),
            "train_sha256": train_sha256,
        },
        **start,
        **found,
        "code": code,
        "withheld": withheld,
    }
    write_text(to / RECORD, json.dumps(content, indent=1) + "\n")


def shown_time(seconds: float) -> str:
    """Return a Unix time as records and tables have it, in UTC to the minute."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _submitted(stage: Path) -> dict[str, Any]:
    commit = json_object(stage / SUBMITTED).get("commit")
    return {"commit": commit} if isinstance(commit, str) else {}


def manifest_sha256(store: Path) -> str:
    """Return the SHA-256 of a store's manifest, empty if there is none."""
    return _sha256(store / "manifest.json")


def _sha256(file: Path) -> str:
    """Return the SHA-256 of a file, empty if it cannot be read."""
    try:
        return sha256_of([file])[0]
    except OSError:
        return ""


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Return the record of a checkpoint; raise ValueError if it has none, or a damaged one."""
    path = checkpoint / FOLDER / RECORD
    if not path.is_file():
        raise ValueError(
            f"{checkpoint} has no {FOLDER}/{RECORD}: it was saved by an earlier version, imported "
            "or merged; name a checkpoint that a stage saved"
        )
    for name, saved in (saved_files(checkpoint) or {}).items():
        file = checkpoint / name
        if name.startswith(f"{FOLDER}/"):
            if not file.is_file():
                raise CheckpointError(f"{file} is missing; restore it from a copy", path=file)
            if sha256_of([file])[0] != saved.sha256:
                raise CheckpointError(
                    f"{file} is damaged: its SHA-256 differs from what was written; restore it "
                    "from a copy",
                    path=file,
                )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error})", path=path) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a record that this version reads; use the version that wrote it"
        )
    return content


def differences(record: Mapping[str, Any], store: Path) -> Iterator[Difference]:
    """Yield what is not here as it was recorded; `store` is where the store is here."""
    here, _ = surroundings.surroundings()
    yield from _of_group("versions", record, here)
    yield from _of_code(record.get("code", {}), here["code"])
    stated, found = record.get("store", {}).get("manifest_sha256", ""), manifest_sha256(store)
    if stated != found:
        yield Difference("store", f"manifest of {store}", stated or ABSENT, found or ABSENT)
    yield from _of_start(record.get(START))
    yield from _of_group("machine", record, here)
    for each in _of_group("environment", record, here):
        if each.what not in SET_BY_JOBS:
            yield each


def _of_group(
    group: str, record: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[Difference]:
    stated, found = record.get(group, {}), here[group]
    for name in {**stated, **found}:
        if stated.get(name) != found.get(name):
            yield Difference(group, name, _shown(stated.get(name)), _shown(found.get(name)))


def _of_code(stated: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Difference]:
    pairs = (stated.get("commit", ""), found["commit"])
    if pairs[0] != pairs[1]:
        yield Difference("code", "commit", *(each or "not known" for each in pairs))
    pairs = (stated.get("changes_sha256", ""), found["changes_sha256"])
    unknown = surroundings.CHANGES_UNKNOWN in (stated.get("withheld"), found["withheld"])
    if pairs[0] != pairs[1] or unknown:
        yield Difference("code", "changes against the commit", _changed(stated), _changed(found))
    if unknown:
        return
    new, new_here = stated.get("new_files", {}), found["new_files"]
    for name in sorted({*new, *new_here}):
        if new.get(name) != new_here.get(name):
            shown = (_shown(each.get(name)) for each in (new, new_here))
            yield Difference("code", f"{name}, not in git", *shown)


def _of_start(stated: Mapping[str, Any] | None) -> Iterator[Difference]:
    """Yield that the checkpoint of the start is another or gone; nothing if none is recorded."""
    if stated is None:
        return
    path = Path(stated["path"])
    there = is_marked(path) if stated["marker_sha256"] else path.is_dir()
    here = start_entry(path)[START] if there else None
    if here is None or here["marker_sha256"] != stated["marker_sha256"]:
        shown = (ABSENT if each is None else _of_marker(each) for each in (stated, here))
        yield Difference("start", f"checkpoint {path}", *shown)


def _of_marker(start: Mapping[str, Any]) -> str:
    return f"step {start['step']}, {start['marker_sha256'] or 'no marker'}"


def _changed(code: Mapping[str, Any]) -> str:
    if code.get("withheld") == surroundings.CHANGES_UNKNOWN:
        return "not known"
    sha256, files = code.get("changes_sha256", ""), code.get("changed_files", [])
    if not sha256:
        return "none"
    return f"{sha256[:12]} in {', '.join(files[:3])}{', ...' if len(files) > 3 else ''}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{count} x {name}" for name, count in value.items()) or "none"
    return ABSENT if value is None else str(value)


def recipe_elsewhere(
    recipe: Path, run: Path, store: Path | None, start: Mapping[str, Any] | None = None
) -> tuple[Any, str]:
    """Return a stage's recipe with its outputs in another run folder, and the name of the stage.

    `store` replaces the one that the recipe names, and `start` of the record the folder in which it
    would take the newest checkpoint. Raises ValueError for a file that is not a recipe.
    """
    content = read_yaml(recipe)
    try:
        before = Path(content["resume"]["resume_from_directory"]).parent
        content["data"]["store"] = str((store or Path(content["data"]["store"])).absolute())
    except (KeyError, TypeError) as error:
        raise ValueError(f"{recipe} is not the recipe of a stage: it lacks {error}") from None
    after = run.absolute() / "stages" / before.name

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(each) for key, each in value.items()}
        if isinstance(value, list):
            return [moved(each) for each in value]
        if isinstance(value, str) and Path(value).is_relative_to(before):
            return str(after / Path(value).relative_to(before))
        return value

    made = moved(content)
    made["resume"]["start"] = content["resume"].get("start") if start is None else start["path"]
    return made, before.name
