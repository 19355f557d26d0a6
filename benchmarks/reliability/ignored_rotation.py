# SPDX-License-Identifier: Apache-2.0
"""Is a model that ignores its configured rotation refused, for each RoPE method?

    python -m benchmarks.reliability.ignored_rotation
    python -m benchmarks.reliability.ignored_rotation --methods yarn,dynamic --planted

For each method `longhaul pretrain` trains the tiny model on two CPU ranks, and on the second one
the builder of models ignores a setting: factor 16 is configured and 8 is used (another base for
plain RoPE, the short divisors in place of the long ones for LongRoPE). The fault is in the ranks'
processes alone, put there by a `sitecustomize` on their path: command, recipe and configuration
are right. For `tables` the model's settings are right too, and the cos and sin that attention gets
are not.

Then a stage is trained without a fault, the rotation that its checkpoint records is changed to
factor 8, and the commands that open it are run. `unchanged` are the same commands before that.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.machine import TREE, facts
from benchmarks.harness.page import page, table, write
from custom_modules.rope import rotary
from custom_modules.rope.config import RopeScaling
from recipes.checkpoints.marker import write_marker
from recipes.models import TINY
from recipes.notation import rope_file

LENGTH, ORIGINAL, PAIRS = 512, 128, TINY.head_dim // 2
SIZES: dict[str, Any] = {"base": 10_000.0, "factor": 16.0, "original_length": ORIGINAL}
SHORT = [1 + pair / 64 for pair in range(PAIRS)]
LONG = [1.0 + pair for pair in range(PAIRS)]
LONGROPE = RopeScaling(method="longrope", **SIZES, short_factor=SHORT, long_factor=LONG)
METHODS = {
    "default": RopeScaling.base_change(80_000.0),
    "linear": RopeScaling.linear(**SIZES),
    "ntk": RopeScaling.ntk(**SIZES),
    "dynamic": RopeScaling.dynamic(**SIZES),
    "ntk_by_parts": RopeScaling.ntk_by_parts(**SIZES),
    "yarn": RopeScaling.yarn(**SIZES),
    "llama3": RopeScaling.llama3(**SIZES),
    "longrope": LONGROPE,
    "tables": RopeScaling.yarn(**SIZES),
}
REFUSED = "does not rotate by"
HEAD = ["case", "fault", "exit code", "steps", "checkpoints", "seconds", "message"]
PLANT = """
import sys
sys.path.append({tree!r})
from benchmarks.reliability.ignored_rotation import plant
plant()
"""
VARIABLE = "LONGHAUL_PLANTED_ROTATION"


class Row(NamedTuple):
    """What came of one command."""

    case: str
    fault: str
    code: int
    steps: int
    checkpoints: int
    seconds: float
    message: str

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        numbers = (self.code, self.steps, self.checkpoints)
        return [self.case, self.fault, *map(str, numbers), f"{self.seconds:.0f}", self.message]


def used(method: str) -> RopeScaling:
    """Return what the second rank's model is built with."""
    stated = METHODS[method]
    if method == "default":
        return replace(stated, base=10_000.0)
    if method == "longrope":
        return replace(stated, long_factor=SHORT)
    return replace(stated, factor=8.0)


def plant() -> None:
    """Make the builder of this process ignore the recipe, once it is imported; for rank 1."""
    method = os.environ.get(VARIABLE, "")
    if not method or os.environ.get("RANK") != "1":
        return
    if method == "tables":
        rotary.Rotation.table = _other_table(rotary.Rotation.table)  # type: ignore[method-assign]
        return
    import importlib.util

    name = "recipes.nemo2.model"

    class Finder:
        def find_spec(self, asked: str, *_: object) -> object:
            if asked != name:
                return None
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            spec = importlib.util.find_spec(asked)
            assert spec is not None
            assert spec.loader is not None
            run = spec.loader.exec_module

            def then_change(module: Any) -> None:
                run(module)
                _ignore_the_recipe(module.LongContextMixin, method)

            spec.loader.exec_module = then_change  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]


def _other_table(table: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: table(rotary.Rotation(used("tables"), self.head_dim), *args)


def _ignore_the_recipe(mixin: Any, method: str) -> None:
    built = mixin.configure_model

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        stated, self.rope = self.rope, used(method)
        try:
            return built(self, *args, **kwargs)
        finally:
            self.rope = stated

    mixin.configure_model = build


def longhaul(folder: Path, *words: object, method: str = "") -> tuple[int, str, float]:
    """Return exit code, last message and seconds of a command, with a fault in its ranks."""
    path = os.pathsep.join((str(folder / "plant"), os.environ.get("PYTHONPATH", "")))
    began = time.monotonic()
    done = subprocess.run(
        [Path(sys.executable).with_name("longhaul"), *map(str, words)],
        env=os.environ | ({"PYTHONPATH": path, VARIABLE: method} if method else {}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = re.findall(r"^error: (.+)$", done.stderr, flags=re.MULTILINE)
    said = " ".join(errors).split("; the output of its ranks")[0].replace(f"{folder}/", "")
    return done.returncode, said.replace("|", "/"), time.monotonic() - began


def trained(folder: Path, out: str, method: str, rope: RopeScaling) -> Row:
    """Train two steps and return what came of it."""
    rotation = folder / f"{out}.json"
    rope_file.write(rotation, rope, {})
    recipe = ("--factory", "tiny_512", "--store", folder / "store", "--out", folder / out)
    code, said, seconds = longhaul(
        folder, "pretrain", *recipe, "--rope", rotation,
        "trainer.max_steps=2", "trainer.val_check_interval=2", method=method,
    )  # fmt: skip
    steps = sum(
        len(path.read_text().splitlines()) for path in (folder / out).rglob("metrics.jsonl")
    )
    saved = len(list((folder / out).rglob("longhaul.json")))
    fault = "none" if not method else _fault(method)
    return Row(method or "without", fault, code, steps, saved, seconds, said)


def _fault(method: str) -> str:
    return {
        "default": "base 10,000 for 80,000",
        "longrope": "short divisors for long ones",
        "tables": "cos and sin of yarn with 8 for 16",
    }.get(method, "factor 8 for 16")


def opened(folder: Path) -> Iterator[Row]:
    """Train a stage without a fault; yield what comes of opening it, before and after a change."""
    yield trained(folder, "run", "", METHODS["yarn"])
    stage = folder / "run" / "stages" / "tiny_512"
    marker = stage / "checkpoints" / "step=2" / "longhaul.json"
    store = folder / "store"
    commands = {
        "export": ("export", "--from", stage, "--to", folder / "exported"),
        "evaluation": (
            "evaluate", "--run", folder / "run", "--stage", "tiny_512", "--store", store,
            "--lengths", LENGTH, "--documents", 2, "--trials", 0,
        ),
        "resume": ("pretrain", "--yaml", stage / "config.yaml"),
        "hand-over": (
            "pretrain", "--factory", "tiny_2k", "--store", store, "--out", folder / "next",
            f"resume.start={stage / 'checkpoints'}", "trainer.max_steps=1",
            "trainer.val_check_interval=1",
        ),
    }  # fmt: skip
    changed = json.loads(marker.read_text())
    changed["rotation"] = rotary.stated_rotation(used("yarn"), TINY.head_dim, LENGTH).to_dict()
    for name in ("export", "evaluation"):
        code, said, seconds = longhaul(folder, *commands[name])
        yield Row(name, "unchanged", code, 0, 0, seconds, said)
    (folder / "exported").rename(folder / "exported before")
    write_marker(marker.parent, changed)
    for name, words in commands.items():
        code, said, seconds = longhaul(folder, *words)
        yield Row(name, "factor 8 recorded for 16", code, 0, 0, seconds, said)


def wrong(row: Row) -> bool:
    """Return whether a row is not what it should be."""
    if row.fault in ("none", "unchanged"):
        return row.code != 0
    said = REFUSED if row.case in METHODS else "trained with another rotation than its stage"
    before_the_second_step = row.steps <= 1 and row.checkpoints == 0
    return row.code == 0 or said not in row.message or not before_the_second_step


def main() -> None:
    """Run the cases, write the page, and fail if one is not refused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", default=",".join(METHODS), help="cases with a planted fault")
    parser.add_argument("--planted", action="store_true", help="only these cases")
    parser.add_argument("--out", type=Path, help="write the page there as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rotation-") as name:
        folder = Path(name)
        (folder / "plant").mkdir()
        (folder / "plant" / "sitecustomize.py").write_text(PLANT.format(tree=str(TREE)))
        code, said, _ = longhaul(folder, "prepare", "--vocab-size", 512, "--out", "store")
        if code:
            raise SystemExit(said)
        rows = [
            trained(folder, f"run_{method}", method, METHODS[method])
            for method in given.methods.split(",")
        ]
        rows += [] if given.planted else opened(folder)
    text = page(
        "A rotation that is not the configured one",
        facts(("megatron-core", "nemo_toolkit", "transformers")),
        [
            f"{sum(map(wrong, rows))} of {len(rows)} cases are not as they should be: those with a "
            "fault refused before a second step and before anything is saved, the others done.",
            table(HEAD, [row.cells for row in rows]),
        ],
    )
    sys.stdout.write(text)
    if given.out is not None:
        write(given.out, text)
    raise SystemExit(1 if any(map(wrong, rows)) else 0)


if __name__ == "__main__":
    main()
