# SPDX-License-Identifier: Apache-2.0
"""Measured steps and peaks of a run or a file, and a cluster file with what they show."""

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from data.files.user_file import read_yaml
from data.files.whole import write_text
from eval.run_folder import MissingResultError, Step, read_steps, stage_names
from longhaul.terminal.console import loading
from recipes.checkpoints.marker import RECIPE
from recipes.notation.layout import layout_from
from recipes.planner.byte_calibration import MeasuredBytes
from recipes.planner.calibration import MeasuredStep
from recipes.planner.feasibility import before_planning
from recipes.planner.workload import Workload
from recipes.spec import cluster as clusters
from recipes.spec.cluster import Cluster
from recipes.spec.efficiency import Efficiency
from recipes.spec.layout import Layout
from recipes.spec.memory_constants import MemoryConstants
from recipes.spec.model_card import ModelCard
from recipes.spec.naming import length_from, stage_folder
from recipes.spec.schema import decode
from recipes.spec.units import GiB

METRICS = "metrics.jsonl"
WARM_UP, LEAST_STEPS = 2, 3
"""First steps, in which kernels compile, and steps that are needed after them."""
DIGITS, COMMENT = 4, "# calibrated"
"""Of the shares in a cluster file; how the comment above them begins."""


@dataclass(frozen=True)
class _Listed:
    """A measurement in a file."""

    seq: str
    layout: str
    tokens_per_batch: str
    step_seconds: float
    peak_gib: float = 0.0
    """Of the fullest GPU, as nvidia-smi counts it; 0 if not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """What a run or a file tells."""

    steps: list[MeasuredStep]
    peaks: list[MeasuredBytes]
    """Of the steps whose memory was logged."""


def measurements(source: Path, card: ModelCard, cluster: Cluster) -> Measurements:
    """Return those of each stage of a run folder, its median step, or of a YAML file.

    Raises ValueError for a source that is neither, a run without enough steps, of another card, or
    whose number of ranks changes within a stage.
    """
    if source.is_dir():
        return _of_run(source, card, cluster)
    if source.suffix not in (".yaml", ".yml"):
        what = "is not there" if not source.exists() else "is neither"
        raise ValueError(f"{source} {what}; name a run folder, or a YAML file of measured steps")
    return _of_file(source, card, cluster)


def _of_run(run: Path, card: ModelCard, cluster: Cluster) -> Measurements:
    there = {
        name: [one for one in read_steps(stage_folder(run, name) / METRICS) if _is_timed(one)]
        for name in stage_names(run)
        if (stage_folder(run, name) / RECIPE).is_file()
    }
    enough = {name: steps for name, steps in there.items() if len(steps) >= WARM_UP + LEAST_STEPS}
    if not enough:
        has = ", ".join(f"{name} has {len(steps)}" for name, steps in there.items())
        said = f" ({has})" if has else ""
        raise MissingResultError(
            f"{run} has no stage with {WARM_UP + LEAST_STEPS} timed steps{said}; name a run folder "
            "with longer stages"
        )
    with loading("NeMo and Megatron-Core"):
        from recipes.resolved import yaml_file
        from recipes.resolved.stage import ResolvedStage

    found = Measurements(steps=[], peaks=[])
    for name, steps in enough.items():
        stage = ResolvedStage.of(yaml_file.read(stage_folder(run, name) / RECIPE))
        _require_card(stage.recipe.model.config, card, f"{run}, stage {name}")
        _require_ranks(steps, stage.layout, f"{run}, stage {name}")
        workload = Workload(
            card=card,
            seq_length=stage.seq_length,
            tokens_per_batch=stage.tokens_per_batch,
            layout=stage.layout,
            gpus_per_node=cluster.gpus_per_node,
        )
        seconds = median(step.seconds for step in steps[WARM_UP:])
        found.steps.append(MeasuredStep(name=name, workload=workload, seconds=seconds))
        process = _largest(step.device_memory_bytes for step in steps)
        if process:
            on_gpu = stage.layout.device != "cpu"  # on CPU the resident set stands for both
            tensors = _largest(step.peak_memory_bytes for step in steps) if on_gpu else None
            peak = MeasuredBytes(name=name, workload=workload, process=process, tensors=tensors)
            found.peaks.append(peak)
    return found


def _largest(sizes: Iterable[float]) -> float:
    """Return the largest of some bytes; 0 if none was logged."""
    return max((size for size in sizes if math.isfinite(size) and size > 0), default=0.0)


def _is_timed(step: Step) -> bool:
    """Return whether a step records how long it took, and at what rate."""
    return all(
        math.isfinite(number) and number > 0
        for number in (step.tokens, step.seconds, step.tokens_per_second_per_rank)
    )


def _require_card(config: Any, card: ModelCard, where: str) -> None:
    """Raise ValueError unless a stage's model has the card's sizes."""
    sizes = {
        "layers": (config.num_layers, card.layers),
        "hidden": (config.hidden_size, card.hidden),
        "ffn_hidden": (config.ffn_hidden_size, card.ffn_hidden),
        "heads": (config.num_attention_heads, card.heads),
        "kv_heads": (config.num_query_groups or config.num_attention_heads, card.kv_heads),
    }
    other = [f"{name} {a:,} and not {b:,}" for name, (a, b) in sizes.items() if a != b]
    if other:
        raise ValueError(
            f"{where} trained another model than {card.name}: {', '.join(other)}; name its card"
        )


def _require_ranks(steps: Sequence[Step], layout: Layout, where: str) -> None:
    """Raise ValueError if the steps were taken by other numbers of ranks than the layout's."""
    ranks = {
        round(step.tokens / (step.seconds * step.tokens_per_second_per_rank)) for step in steps
    }
    if ranks != {layout.world_size}:
        counted = " and ".join(map(str, sorted(ranks)))
        raise ValueError(
            f"{where}: steps were taken by {counted} ranks and its recipe has {layout.world_size}; "
            "the layout changed within the stage, so its times are of no single one"
        )


def _of_file(path: Path, card: ModelCard, cluster: Cluster) -> Measurements:
    listed = decode(list[_Listed], read_yaml(path), str(path))
    found = Measurements(steps=[], peaks=[])
    for number, one in enumerate(listed, start=1):
        where = f"{path}, step {number}"
        try:
            workload = Workload(
                card=card,
                seq_length=length_from(one.seq),
                tokens_per_batch=length_from(one.tokens_per_batch),
                layout=layout_from(one.layout),
                gpus_per_node=cluster.gpus_per_node,
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not one.step_seconds > 0:
            raise ValueError(f"{where}: step_seconds is {one.step_seconds}; it must be positive")
        if not (one.peak_gib >= 0 and math.isfinite(one.peak_gib)):
            raise ValueError(f"{where}: peak_gib is {one.peak_gib}; it must be positive")
        if broken := before_planning(workload, cluster):
            raise ValueError(f"{where}: layout {one.layout}: {broken}")
        found.steps.append(MeasuredStep(name=where, workload=workload, seconds=one.step_seconds))
        if one.peak_gib:
            size = one.peak_gib * GiB
            found.peaks.append(MeasuredBytes(name=where, workload=workload, process=size))
    return found


def require_kind(steps: Sequence[MeasuredStep], machine: Cluster, path: Path) -> None:
    """Raise ValueError for steps of CPU ranks and a cluster file of GPUs, and the reverse."""
    for step in steps:
        on_cpu = step.workload.layout.device == "cpu"
        if on_cpu and not machine.efficiency.layer_seconds:
            raise ValueError(
                f"{step.name} was trained on CPU ranks and {path} describes GPUs; name a cluster "
                "file of CPU ranks, with rates of this machine: longhaul calibrate --cluster "
                f"{shlex.quote(str(path))} --device cpu"
            )
        if machine.efficiency.layer_seconds and not on_cpu:
            raise ValueError(
                f"{step.name} was trained on GPUs and {path} has the rates of CPU ranks "
                "(layer_seconds); name the cluster file of the GPUs"
            )


def own_file(name: str) -> Path:
    """Return the path of a cluster file to write to; raise ValueError for a shipped one."""
    path = clusters.path_of(name)
    if path.resolve().parent == clusters.FOLDER.resolve():
        raise ValueError(
            f"a calibration is written into the cluster file, and {name} is a shipped one; copy "
            f"{path} and name your copy"
        )
    return path


def write_shares(
    path: Path, shares: Efficiency, said: str, *, memory: MemoryConstants | None = None
) -> None:
    """Write shares, and memory constants, into the section `hardware` of a cluster file.

    All other text stays, also older memory constants if none are given. `said` becomes the comment
    above them. Raises ValueError, with what to write by hand, for a file whose hardware is not
    written with a line for each field.
    """
    text = path.read_text(encoding="utf-8")
    written = {"efficiency": _changed(shares, Efficiency())}
    if memory is not None:
        written["memory"] = _changed(memory, MemoryConstants())
    lines = [f"{COMMENT} {date.today().isoformat()}: {said}"]
    for name, values in written.items():
        lines.append(f"{name}:")
        lines += [f"  {line}" for line in yaml.safe_dump(values, sort_keys=False).splitlines()]
    made = _replaced(text.splitlines(), lines, tuple(f"{name}:" for name in written))
    wanted: dict[str, Any] = yaml.safe_load(text)
    wanted["hardware"] = {**wanted["hardware"], **written}
    if yaml.safe_load(made) != wanted:
        told = yaml.safe_dump(written, default_flow_style=True, width=10_000).strip()[1:-1]
        raise ValueError(
            f"{path} does not state its hardware with a line for each field; write into it: {told}"
        )
    write_text(path, made)


def _changed(
    found: Efficiency | MemoryConstants, plain: Efficiency | MemoryConstants
) -> dict[str, float | str]:
    """Return the fields that differ from those without a calibration, with few digits."""
    changed = {}
    for name in found.__dataclass_fields__:
        value = getattr(found, name)
        if value != getattr(plain, name):
            changed[name] = value if isinstance(value, str) else float(f"{value:.{DIGITS}g}")
    return changed


def _replaced(text: Sequence[str], lines: Sequence[str], keys: tuple[str, ...]) -> str:
    """Return the text with these lines as the first of its hardware, in place of older ones.

    `keys` begin the fields that they replace.
    """
    kept: list[str] = []
    within, inside, indent = False, False, ""
    for line in text:
        depth = len(line) - len(line.lstrip())
        if within and line.strip() and not depth:
            within = inside = False
        if within and not indent and line.strip() and not line.lstrip().startswith("#"):
            indent = line[:depth]
            kept += [indent + one for one in lines]
        if within and inside and line.strip() and depth <= len(indent):
            inside = False
        if within and depth == len(indent) and line.lstrip().startswith(keys):
            inside = True
        older = within and line.lstrip().startswith(COMMENT)
        if not inside and not older:
            kept.append(line)
        within = within or line.startswith("hardware:")
    return "\n".join(kept) + "\n"
