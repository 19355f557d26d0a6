# SPDX-License-Identifier: Apache-2.0
"""The oracles that take long: training, weights, evaluations, outcomes, folders of before.

Each function takes no arguments and returns entries by name. They share a model with drawn weights
and a run of the frozen ladder.
"""

import atexit
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .command import AS_HERE, FOLDER, LADDER, answer, ended, process, table, tree
from .frozen import corpus, model
from .quick import Entries

HOOK = FOLDER.parent / "warm_start" / "hook"
BEFORE = [str(HOOK)]
OLD = "LONGHAUL_ORACLE_OLD"
"""Environment variable: the archive of the folders that the base has written."""
PLACE = "LONGHAUL_ORACLE_PLACE"
"""Environment variable: where that archive is unpacked, since a run folder has paths in it."""
OF_THIS_RUN = re.compile(
    r"(^|_)(seconds|wait|slow|bytes|time|mfu|memory|utilization|power|clock|left|host|pid|commit|versions"
    r"|started|written|saved|modified|identity|date|pace|machine|sha256|job|age)(_|$)|per_second|_at$"
)
"""Keys of what differs from run to run."""
STAGE = "stages/frozen_{}"


def environment(place: Path, base: Path) -> dict[str, str]:
    """Return variables of the process that runs them; `base` has the records of the base."""
    from tests import warm_start

    if warm_start.FOLDER not in os.environ:
        os.environ[warm_start.FOLDER] = str(warm_start.make_folder())
        atexit.register(warm_start.tear_down)
    return {
        warm_start.FOLDER: os.environ[warm_start.FOLDER],
        PLACE: str(place / "place"),
        OLD: str(base / "old.tar"),
    }


def plain(value: Any, place: Path) -> Any:
    """Return what does not differ from run to run."""
    if isinstance(value, dict):
        named = ((key.replace(str(place), "FOLDER"), one) for key, one in value.items())
        return {key: plain(one, place) for key, one in named if not OF_THIS_RUN.search(key)}
    if isinstance(value, list):
        return [plain(one, place) for one in value]
    return value.replace(str(place), "FOLDER") if isinstance(value, str) else value


@cache
def shared() -> Path:
    """Return a working folder with a store, the model as published and as imported."""
    place = Path(tempfile.mkdtemp(prefix="oracle-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    made_in(place)
    return place


def made_in(place: Path) -> None:
    """Make store and model in a folder, which becomes the working folder."""
    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    sources = corpus(place / "sources")
    answer(f"prepare --source {sources['lines']} --out store --vocab-size 512 --workers 1").text()
    named = " ".join(f"--source {name}={at}" for name, at in sources.items())
    answer(
        f"prepare {named} --tokenizer store/tokenizer --heldout-fraction 0.3 --workers 1 --out four"
    ).text()
    model(LADDER / "config.json", place / "store/tokenizer", place / "published")
    answer("import --from published --to models/frozen").text()


@cache
def ladder() -> Path:
    """Return the folder of a run of the whole ladder, with its evaluations."""
    shared()
    ended(
        f"run --ladder {LADDER / 'ladder.yaml'} --card models/frozen --device cpu --store four "
        "--out runs/ladder"
    )
    return shared() / "runs/ladder"


def training() -> Entries:
    """Return what each step of each training has computed."""
    shared()
    entries: Entries = {}
    for name, (file, stage, overrides) in table("training.yaml").items():
        out = f"runs/{name.replace(' ', '_').replace(',', '')}"
        line = f"pretrain --card models/frozen --ladder {LADDER / file}.yaml --stage {stage}"
        try:
            ended(f"{line} --device cpu --store four --out {out} {overrides}")
            entries[name] = steps(shared() / out)
        except RuntimeError as error:
            entries[name] = {"error": str(error)}
    entries |= {f"ladder {name}": found for name, found in steps(ladder()).items()}
    return entries


def steps(run: Path) -> Entries:
    """Return the steps of each stage of a run."""
    return {
        path.parent.name: [plain(json.loads(line), run) for line in path.read_text().splitlines()]
        for path in sorted(run.glob("stages/*/metrics.jsonl"))
    }


def weights() -> Entries:
    """Return the tensors of what is imported, exported and averaged, and logits of exports."""
    run, place = ladder(), shared()
    last = f"{run}/{STAGE}"
    entries: Entries = {}
    for name, line in {
        "imported": "export --from models/frozen --to {}",
        "trained": f"export --from {last.format('512')} --to {{}}",
        "scaled": f"export --from {last.format('2k')} --to {{}}",
        "bf16": f"export --from {last.format('1k')} --to {{}} --dtype bfloat16",
    }.items():
        answer(line.format(f"exported/{name}")).text()
        entries |= _exported(name, place / "exported" / name)
    answer(f"merge {last.format('512')} {last.format('2k')} --to merged --share 0.25").text()
    answer("export --from merged --to exported/merged").text()
    entries |= _exported("merged", place / "exported/merged")
    entries |= _exported("published", place / "published")
    return entries


def _exported(name: str, folder: Path) -> Entries:
    """Return name, type and SHA-256 of each tensor, config, and logits of a model."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 not a dictionary
                tensors[key] = _sum(file.get_tensor(key))
    loaded = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(torch.arange(300)[None] % 512).logits
    config = json.loads((folder / "config.json").read_text())
    return {
        f"{name} tensors": tensors,
        f"{name} config": config,
        f"{name} logits": _sum(logits) | {"mean": float(logits.mean()), "std": float(logits.std())},
    }


def _sum(tensor: Any) -> dict[str, Any]:
    import torch

    content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "shape": list(tensor.shape),
        "type": str(tensor.dtype),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def evaluation() -> Entries:
    """Return the results of evaluations, of a suite of tasks and of RULER's samples."""
    run, place = ladder(), shared()
    line = f"evaluate --run {run} --documents 6 --trials 2 --lengths 512,1K,2K --base --device cpu"
    ended(f"{line} --context-gain --tp 2")
    tasks = FOLDER.parent / "eval/harness/tasks"
    ended(f"evaluate --run {run} --stage 2k --suite words_copy --include-path {tasks} --limit 4")
    entries = results(run)
    answer(
        "ruler make --tokenizer store/tokenizer --out samples --lengths 2K --samples 1 "
        "--tasks niah_single_1,vt,cwe"
    ).text()
    ended(f"ruler predict samples --run {run} --stage 2k --out predictions.jsonl")
    lines = (place / "predictions.jsonl").read_text().splitlines()
    entries["predictions"] = [plain(json.loads(line), place) for line in lines]
    scores = answer("ruler score samples --predictions predictions.jsonl --json").text()
    entries["scores"] = plain(json.loads(scores), place)
    return entries


def results(run: Path) -> Entries:
    """Return the results of a run by model, length and documents or by model and task."""
    entries: Entries = {}
    for path in sorted((run / "eval").rglob("*.json")):
        found = json.loads(path.read_text())
        task = found.get("settings", {}).get("task", "")
        words = (found.get("stage") or found.get("model"), found.get("eval_length"), task)
        name = f"{words} {found.get('documents')} documents, {found.get('samples')} samples"
        entries[name] = plain(found, run.parents[1])
    return entries


def before() -> Entries:
    """Return what is read of a run that the base has written, and how it resumes."""
    place, archive = Path(os.environ[PLACE]), Path(os.environ[OLD])
    stage = f"--ladder {LADDER / 'ladder.yaml'} --card models/frozen --device cpu --store four"
    line = f"run {stage} --out runs/old"
    if AS_HERE not in os.environ:
        shutil.rmtree(place, ignore_errors=True)
        made_in(place)
        ended(f"{line} --stage 512")
        _interrupt(f"{line} --stage 1K", place / "runs/old/stages/frozen_1k/metrics.jsonl")
        os.chdir(place.parent)
        with tarfile.open(archive.with_suffix(".part"), "w") as file:
            file.add(place, arcname=".")
        archive.with_suffix(".part").rename(archive)
    shutil.rmtree(place, ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(place)  # noqa: S202 our own archive
    os.chdir(place)
    entries: Entries = {}
    for words in ("status runs/old", "checkpoints runs/old", "census four"):
        entries[words] = plain(json.loads(answer(f"{words} --json").text()), place)
    answer("export --from runs/old/stages/frozen_512 --to exported").text()
    entries |= _exported("exported", place / "exported")
    ended("evaluate --run runs/old --stage 512 --documents 4 --trials 1")
    ended(line)
    entries["resumed"] = steps(place / "runs/old")
    entries |= results(place / "runs/old")
    entries["report"] = plain(json.loads((place / "runs/old/report.json").read_text()), place)
    return entries


def _interrupt(line: str, metrics: Path) -> None:
    """Start a command, and kill it with all it has started after its fourth step."""
    running = process(line, start_new_session=True)
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        if running.poll() is not None:
            raise RuntimeError(f"{line}: ended: {running.stdout.read()[-3000:]}")
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def outcomes() -> Entries:
    """Return how tests of faults, kills, layouts and chains ended, by their names."""
    entries: Entries = {}
    for option, files in table("outcomes.yaml").items():
        with tempfile.TemporaryDirectory() as name:
            page = Path(name) / "page.xml"
            words = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={page}"]
            words += ["--nightly"] if option == "nightly" else []
            subprocess.run(
                [sys.executable, "-m", "pytest", *words, *files],
                cwd=tree(), check=False, env=os.environ | {"PYTHONPATH": str(tree())},
            )  # fmt: skip
            for case in ElementTree.parse(page).getroot().iter("testcase"):
                kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
                test = f"{case.get('classname')} {case.get('name')}"
                entries[test] = min(kinds, default="passed")
    return entries


ORACLES = {
    "training": training,
    "weights": weights,
    "evaluation": evaluation,
    "before": before,
    "outcomes": outcomes,
}
FROZEN = ("ladder/config.json", "ladder/ladder.yaml")
TABLES: dict[str, tuple[str, ...]] = {
    "training": ("training.yaml", *FROZEN, "ladder/mixed.yaml", "ladder/pose.yaml"),
    "weights": FROZEN,
    "evaluation": FROZEN,
    "before": FROZEN,
    "outcomes": ("outcomes.yaml",),
}
