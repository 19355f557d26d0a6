# SPDX-License-Identifier: Apache-2.0
"""Facts in the folder of a stage, read without NeMo: its recipe, its marker, its samples."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from custom_modules.rope.config import RopeScaling
from data.files.user_file import read_yaml
from data.store import Manifest, StoreError
from eval.run_folder import StageResults
from longhaul.health.monitor import is_garbled
from recipes.checkpoints.marker import RECIPE, checkpoint_facts, newest_checkpoint
from recipes.spec.naming import stage_folder
from recipes.spec.stage import warmup_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFacts:
    """Facts of one stage of a run; None or empty where its files lack them."""

    results: StageResults
    recipe: dict[str, Any] = field(default_factory=dict)
    """The tree of config.yaml."""
    marker: dict[str, Any] | None = None
    """The marker of its newest complete checkpoint."""
    start: dict[str, Any] | None = None
    """The marker of the checkpoint that it started from."""
    samples: tuple[tuple[int, int, int], ...] = ()
    """Step, first and last sample, in the order they were written."""
    garbled: tuple[int, ...] = ()
    """Numbers of the lines of metrics.jsonl with NULs or bytes that are not UTF-8."""

    @property
    def name(self) -> str:
        """Name of the stage."""
        return self.results.name

    def of_recipe(self, path: str) -> Any:
        """Return a value of the recipe by its dotted path, or None."""
        node: Any = self.recipe
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    @property
    def warmup_steps(self) -> int | None:
        """Steps of the stage's warm-up."""
        steps, ratio = (
            self.of_recipe("trainer.max_steps"),
            self.of_recipe("optim.lr_scheduler.warmup_ratio"),
        )
        if steps is None or ratio is None:
            return None
        return warmup_steps(float(ratio), int(steps))

    @property
    def first_rate(self) -> float | None:
        """Return the learning rate of the first step."""
        peak, warmup = self.of_recipe("optim.config.lr"), self.warmup_steps
        # The rate peaks at the step after the last one of the warm-up.
        return None if peak is None or warmup is None else float(peak) / (warmup + 1)

    @property
    def rotation(self) -> dict[str, Any] | None:
        """Return the rotation that the recipe states, in the form of a checkpoint's marker."""
        tree = self.of_recipe("model.config.rope")
        if not isinstance(tree, dict):
            return None
        return RopeScaling.from_dict(_bare(tree)).to_dict()

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer, from the checkpoint or else from the store."""
        if self.marker is not None:
            return str(self.marker["tokenizer"])
        manifest = self.manifest()
        return None if manifest is None else manifest.tokenizer.fingerprint

    def manifest(self) -> Manifest | None:
        """Return the manifest of the store it reads; None if the store is not here."""
        store = self.of_recipe("data.store")
        try:
            return None if store is None else Manifest.load(store)
        except StoreError:
            return None


def stage_facts(run: Path, results: StageResults) -> StageFacts:
    """Read the folder of a stage."""
    folder = stage_folder(run, results.name)
    recipe = _recipe(folder / RECIPE)
    begun = (recipe.get("resume") or {}).get("start")
    return StageFacts(
        results=results,
        recipe=recipe,
        marker=_marker(folder / "checkpoints"),
        start=None if not begun else _marker(Path(begun)),
        samples=_samples(folder / "metrics.jsonl"),
        garbled=tuple(_garbled(folder / "metrics.jsonl")),
    )


def _recipe(path: Path) -> dict[str, Any]:
    """Return the tree of a recipe's file; its targets are not imported."""
    if not path.is_file():
        return {}
    found = read_yaml(path)
    return found if isinstance(found, dict) else {}


def _bare(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of a recipe without the names of what it builds (`_target_`)."""
    return {
        name: _bare(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if not name.startswith("_")
    }


def _marker(folder: Path) -> dict[str, Any] | None:
    newest = newest_checkpoint(folder)
    return None if newest is None else checkpoint_facts(newest)


def _samples(path: Path) -> tuple[tuple[int, int, int], ...]:
    if not path.is_file():
        return ()
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            step = json.loads(line)
            first, last = step["samples"]
            found.append((int(step["step"]), int(first), int(last)))
        except (ValueError, TypeError, KeyError):
            continue  # a truncated line, or one without samples
    return tuple(found)


def _garbled(path: Path) -> Iterator[int]:
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    return (number for number, line in enumerate(lines, 1) if is_garbled(line))
