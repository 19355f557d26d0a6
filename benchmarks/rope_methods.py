# SPDX-License-Identifier: Apache-2.0
"""What each way to extend the context is worth on a small model: loss by position, on CPU.

    python -m benchmarks.rope_methods --run runs/tiny --work FOLDER

The model is the `tiny_512` stage of `make demo`: 512 tokens, base 10,000. It is stretched 16 times,
to 8,192. For every method the table has the mean loss of held-out text by position, of the model
as it is (only its rotation changed) and after the same short stage at 8,192 tokens. Position
transforms train on sequences of 30% of the target instead (GeNE 25%), on as many tokens, and are
evaluated at all of it; beside them stands the same short stage without one.

Stages are the recipe `tiny_8k` with another rotation, so what is compared is that alone: data,
order, rate and steps are one for all. Finished stages are not trained again.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run
import torch

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.stacks import one_rank
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.gene import gene_rotation
from custom_modules.rope.rotary import Rotation
from data.store import Manifest
from data.token_files.held_out import long_documents
from eval import load_model
from eval.loss.loss_by_position import loss_by_position, mean_over
from recipes.checkpoints.marker import is_finished, newest_checkpoint
from recipes.models import TINY
from recipes.nemo2.settings import place
from recipes.notation import rope_file
from recipes.pretrain import pretrain
from recipes.resolved import yaml_file
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.stage import Cosine, Ladder, Stage
from recipes.spec.train_short import Positions

BASE, ORIGINAL, TARGET = 10_000, 512, 8192
FACTOR = TARGET / ORIGINAL
SHORT = 2460
"""30% of the target, a multiple of what zigzag sharding over two ranks needs."""
QUARTER = 2048
"""Of the target: GeNE draws multiples of length over original length, the factor one of them."""
RANGES = ((0, 512), (512, 2048), (2048, 4096), (4096, 8192))


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to extend: a rotation, and the positions of its short stage."""

    name: str
    rope: RopeScaling
    positions: Positions = Positions()
    seq_length: int = TARGET
    """Tokens of its stage's sequences."""
    full: str = ""
    """The way that trains the same rotation at the whole length, where this one trains short."""


def ways(found: Path | None) -> list[Way]:
    """Return all that are compared; `found` is a file of `longhaul rope search`."""
    sizes: dict[str, Any] = {"base": BASE, "factor": FACTOR, "original_length": ORIGINAL}
    yarn = RopeScaling.yarn(**sizes)
    gene = gene_rotation(**sizes, head_dim=TINY.head_dim)
    rotations = {
        "none": RopeScaling.base_change(BASE),
        "base change, times 16": RopeScaling.base_change(BASE * FACTOR),
        "linear": RopeScaling.linear(**sizes),
        "ntk": RopeScaling.ntk(**sizes),
        "dynamic": RopeScaling.dynamic(**sizes),
        "ntk_by_parts": RopeScaling.ntk_by_parts(**sizes),
        "yarn": yarn,
        "llama3": RopeScaling.llama3(**sizes),
        "gene's own": gene,
    }
    if found is not None:
        rotations["longrope, searched"] = rope_file.read(found)
    return [
        *(Way(name=name, rope=rope) for name, rope in rotations.items()),
        *(
            Way(
                name=f"yarn, {name} at 30%", rope=yarn, positions=how, seq_length=SHORT, full="yarn"
            )
            for name, how in {
                "nothing else": Positions(),
                "PoSE": Positions.pose(TARGET),
                "LongRecipe's positions": Positions.longrecipe(TARGET, sentences="all"),
                "LongRecipe by digits": Positions.longrecipe(
                    TARGET, sentences="digits", keep_others=0.5
                ),
            }.items()
        ),
        Way(
            name="GeNE at 25%",
            rope=gene,
            positions=Positions.gene(TARGET),
            seq_length=QUARTER,
            full="gene's own",
        ),
    ]


def recipe(way: Way, start: Path, store: Path, folder: Path, steps: int) -> nemo_run.Partial:
    """Return the short stage: as many tokens a step, whatever its length."""
    per_batch = TARGET // way.seq_length  # sequences
    taken = round(steps * TARGET / (per_batch * way.seq_length))
    stage = Stage(
        seq_length=way.seq_length,
        rope=way.rope,
        positions=way.positions,
        tokens=taken * per_batch * way.seq_length,
        tokens_per_batch=per_batch * way.seq_length,
        lr=Cosine(peak=1e-3),
        start="scratch",
    )
    ladder = Ladder(name="methods", source="ours", stages=(stage,))
    layout = Layout(cp=ContextParallel.ulysses(2), precision="fp32", device="cpu")
    made = pretrain(TINY, ladder, way.seq_length, layout)
    place(made, TINY, ladder, stage, run_to=folder, store=store)
    made.resume.start = str(newest_checkpoint(start))
    made.trainer.val_check_interval = taken
    made.trainer.limit_val_batches = 1
    return made


def train(made: nemo_run.Partial, folder: Path) -> Path:
    """Train the stage on two ranks unless it has been, and return its folder."""
    stage = Path(made.trainer.callbacks[0].path).parent
    if is_finished(stage / "checkpoints", made.trainer.max_steps):
        return stage
    yaml_file.write(made, stage / "config.yaml")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "benchmarks.rope_methods", "--rank", str(stage / "config.yaml"),
    ]  # fmt: skip
    with (folder / "output.log").open("a") as log:
        subprocess.run(
            command, stdout=log, stderr=log, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    return stage


def losses(stage: Path, rope: RopeScaling | None, texts: Sequence[object]) -> list[float]:
    """Return the mean loss in each of RANGES of the stage's model, by another rotation if given."""
    model = load_model.load(stage, seq_length=TARGET)
    if rope is not None:
        model.rotation = Rotation(rope, TINY.head_dim)
    found = loss_by_position(model, texts, TARGET).mean(0).tolist()  # type: ignore[arg-type]
    return [mean_over(found, start, stop) for start, stop in RANGES]


Result = dict[str, Any]
"""Steps of a way's stage, and its losses in RANGES `before` and `after` it."""


def measured(given: argparse.Namespace) -> dict[str, tuple[Way, Result]]:
    """Return what each way came to; one measured before with the same settings is read."""
    settings = {"steps": given.steps, "documents": given.documents, "run": str(given.run)}
    start = given.run / "stages" / "tiny_512"
    store = given.store or Path(yaml_file.read(start / "config.yaml").data.store)
    manifest = Manifest.load(store)
    texts = list(islice(long_documents(manifest, min_tokens=TARGET + 1), given.documents))
    results = {}
    for way in ways(given.longrope):
        if given.only and way.name not in given.only:
            continue
        folder = given.work / way.name.replace(" ", "_").replace(",", "").replace("'", "")
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "losses.json"
        found: Result = json.loads(kept.read_text()) if kept.is_file() else {}
        if found.get("settings") != settings:
            made = recipe(way, start / "checkpoints", store, folder, given.steps)
            after = train(made, folder)
            with one_rank(torch.device("cpu")):
                found = {
                    "settings": settings,
                    "before": losses(start, way.rope, texts),
                    "after": losses(after, way.rope, texts),
                    "steps": made.trainer.max_steps,
                }
            kept.write_text(json.dumps(found))
        results[way.name] = way, found
        print("  ".join(_row(way, found)), file=sys.stderr, flush=True)
    return results


def _row(way: Way, found: Result) -> list[str]:
    cells = [f"{loss:.3f}" for when in ("before", "after") for loss in found[when]]
    return [way.name, f"{way.seq_length:,}", str(found["steps"]), *cells]


def gaps(results: dict[str, tuple[Way, Result]]) -> list[list[str]]:
    """Return, for each way that trains short, by how much it stays behind the whole length."""
    rows = []
    for way, found in results.values():
        if way.full not in results:
            continue
        whole = results[way.full][1]["after"]
        apart = (mine - theirs for mine, theirs in zip(found["after"], whole, strict=True))
        rows.append([way.name, way.full, *(f"{gap:+.3f}" for gap in apart)])
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rope_methods",
        description="Loss by position of every way to extend a context, before and after a stage.",
    )
    parser.add_argument(
        "--run", type=Path, help="run folder of the tiny ladder, its first stage done"
    )
    parser.add_argument("--work", type=Path, help="folder for the short stages")
    parser.add_argument("--store", type=Path, help="token store; without it the run's")
    parser.add_argument("--longrope", type=Path, help="file of `longhaul rope search`")
    parser.add_argument("--steps", type=int, default=30, help="steps of the short stages at 8,192")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--only", nargs="*", help="names of the ways to measure")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # a rank of a stage
    given = parser.parse_args()
    if given.rank is None and (given.run is None or given.work is None):
        parser.error("name --run and --work")
    return given


def main() -> None:
    """Measure, print the page, and write it where asked to; or be a rank of a stage."""
    given = _arguments()
    if given.rank is not None:
        fdl.build(yaml_file.read(given.rank))()
        return
    results = measured(given)
    names = [f"{start:,}-{stop:,}" for start, stop in RANGES]
    head = ["way", "trained at", "steps", *names, *(f"{name}, after" for name in names)]
    text = page(
        f"A model of {ORIGINAL} tokens at {TARGET:,}, by every method",
        facts(["nemo_toolkit", "megatron-core"]),
        [
            f"The `tiny_512` stage of the demo, factor {FACTOR:g}; mean loss of held-out documents "
            "in nats per token, by position, before and after the short stage.",
            table(head, [_row(way, found) for way, found in results.values()]),
            "What training short leaves behind the same rotation trained at the whole length, in "
            "nats per token after the stage:",
            table(["way", "beside", *names], gaps(results)),
        ],
    )
    print(text, end="")
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
