# SPDX-License-Identifier: Apache-2.0
"""Read and write the result files of a run folder.

    RUN/run.json                      the ladder, its stages in order, versions and machine
    RUN/stages/<stage>/stage.json     length, RoPE, layout, token budget and start of one stage
    RUN/stages/<stage>/config.yaml    its resolved recipe
    RUN/stages/<stage>/metrics.jsonl  one object per training step
    RUN/eval/<stage>.json             loss by position, mean loss by range, passkey grid
    RUN/eval/base*.json               the same of the weights that training started from
    RUN/eval/other/<stage>/*.json     the same with other settings (`eval.report.evaluations`)
    RUN/eval/ruler/<model>.json       scores of RULER's tasks (`eval.ruler.results`)

The dataclasses below are the schema: a field without a default must be in the file, unknown keys
are ignored, and `null` for a number reads as NaN. Losses are in nats per token. Either run.json or
the stage.json of a stage that `longhaul pretrain` trained is required. The record of a stage that
was not trained or evaluated yet is None.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from data.files.nearest import near_path
from data.files.whole import write_text
from eval.measurements import BaseRecord, ByPosition, ContextGain, Passkey, RangeMean, ShortLoss
from eval.provenance import Provenance
from recipes.checkpoints.marker import RECIPE
from recipes.spec.naming import stage_folder
from recipes.spec.schema import NotJsonError, Number, decode, decode_json

T = TypeVar("T")

BUCKET = 64
"""Positions averaged into one point of the curve; divides every context length in use."""


BASE = "base"
"""Name of a base model with its own rotation; those of others begin with it (`eval.base_model`)."""


class MissingResultError(ValueError):
    """Raised for a missing result file."""


class BrokenResultError(ValueError):
    """Raised for a result file whose content does not fit its schema."""


@dataclass(frozen=True)
class RunRecord:
    """Content of `run.json`; ladder and card are empty if stages were trained separately."""

    ladder: str
    card: str
    stages: tuple[str, ...]
    source: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError unless each stage name is the name of one folder, listed once."""
        for name in self.stages:
            if not name or name in {".", ".."} or "/" in name or "\\" in name:
                raise ValueError(f"stage name {name!r} must be the name of one folder")
        if len(set(self.stages)) != len(self.stages):
            raise ValueError("a stage is listed twice")


@dataclass(frozen=True)
class StageRecord:
    """Content of `stage.json`."""

    name: str
    seq_length: int
    rope: dict[str, Any] = field(default_factory=dict)
    tokens: Number = math.nan
    tokens_per_batch: Number = math.nan
    layout: dict[str, Any] = field(default_factory=dict)
    start: str = ""
    target_length: int | None = None
    """Context length that it trains for, if longer than its sequences."""
    evaluate_every: int | None = None
    """Steps between evaluations while it trains (0: by their own time); None: none are made."""

    def __post_init__(self) -> None:
        """Raise ValueError for a negative number of steps."""
        if self.evaluate_every is not None and self.evaluate_every < 0:
            raise ValueError(f"evaluate_every is {self.evaluate_every}; expected 0 or more steps")

    @property
    def context(self) -> int:
        """Length at which it is evaluated."""
        return self.target_length or self.seq_length


@dataclass(frozen=True)
class Step:
    """Metrics of one training step; NaN if not measured."""

    step: int
    loss: Number
    lr: Number = math.nan
    grad_norm: Number = math.nan
    tokens: Number = math.nan
    seconds: Number = math.nan
    tokens_per_second_per_rank: Number = math.nan
    mfu: Number = math.nan
    peak_memory_bytes: Number = math.nan
    """Of tensors, on the fullest rank; in older logs of the first rank."""
    device_memory_bytes: Number = math.nan
    """Of the process, on the fullest rank."""
    heldout_loss: Number = math.nan
    """This and those below: if the model was evaluated at this step (`eval.while_training`)."""
    heldout_by_quarter: tuple[Number, ...] = ()
    """In each quarter of the window."""
    heldout_by_length: dict[str, Number] = field(default_factory=dict)
    """Of whole documents, by the power of two of their tokens."""
    passkey_nats: Number = math.nan
    evaluation_seconds: Number = math.nan

    @property
    def is_evaluated(self) -> bool:
        """Whether the model was evaluated at this step."""
        return math.isfinite(self.heldout_loss)


@dataclass(frozen=True)
class Evaluation:
    """Content of `eval/<stage>.json`."""

    stage: str
    seq_length: int
    eval_length: int
    documents: int
    tokens: int
    by_position: ByPosition | None = None
    ranges: tuple[RangeMean, ...] = ()
    passkey: Passkey | None = None
    store: str = ""
    """Token store of the documents; empty in files that do not state it."""
    step: int | None = None
    """Step of the evaluated checkpoint; None in files that do not state it."""
    base: BaseRecord | None = None
    """What was evaluated in place of a stage; None for a stage."""
    provenance: Provenance | None = field(default=None, compare=False)
    """How it came about; None in files of earlier versions."""
    context_gain: ContextGain | None = None
    """None if it was not asked for."""
    short: ShortLoss | None = None
    """None if the store has no such held-out documents, and in files of earlier versions."""
    sources: tuple[str, ...] = ()
    """Source of each document; empty if the store has one, and in files of earlier versions."""
    first_tokens: int = 0
    """Tokens before the text of each window, such as a beginning of sequence."""
    identity: str = field(default="", compare=False)
    """SHA-256 of all that tells the model and its documents from others: weights, recipe, rotation,
    store, tokenizer and device; empty in files of earlier versions."""
    kept: dict[str, str] = field(default_factory=dict, compare=False)
    """Parts of an earlier evaluation of the same identity that this one did not measure, and the
    date of that evaluation."""

    def __post_init__(self) -> None:
        """Raise ValueError for ranges whose losses are not of the same documents."""
        stated = [mean for mean in self.ranges if mean.by_document]
        for mean in stated:
            if len(mean.by_document) != len(stated[0].by_document):
                raise ValueError(
                    f"ranges: by_document has {len(stated[0].by_document)} numbers at positions "
                    f"{stated[0].start:,}-{stated[0].stop:,} and {len(mean.by_document)} at "
                    f"{mean.start:,}-{mean.stop:,}; expected one for each document in all of them"
                )


@dataclass(frozen=True)
class StageResults:
    """All results of one stage in a run folder."""

    name: str
    record: StageRecord | None
    steps: tuple[Step, ...]
    config: str | None
    evaluation: Evaluation | None

    def step_tokens(self) -> list[float]:
        """Return the tokens of each step, by default those of a batch."""
        batch = math.nan if self.record is None else self.record.tokens_per_batch
        return [step.tokens if math.isfinite(step.tokens) else batch for step in self.steps]


def run_path(run: Path) -> Path:
    """Return the path of the record of the run."""
    return run / "run.json"


def evaluation_path(run: Path, stage: str) -> Path:
    """Return the path of the latest evaluation of one stage."""
    return run / "eval" / f"{stage}.json"


def write_json(path: Path, obj: Any) -> None:
    """Write dataclasses, mappings and lists as JSON, atomically; NaN and infinity become null."""
    write_text(path, json.dumps(plain(obj), indent=1, allow_nan=False) + "\n")


def append_step(path: Path, step: Step | dict[str, Any]) -> None:
    """Append one step to a `metrics.jsonl`, on a new line even after a truncated one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(plain(step), allow_nan=False).encode() + b"\n"
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)


def require_run(run: Path) -> None:
    """Raise MissingResultError unless there is a folder at the path of a run."""
    if run.is_file():
        raise MissingResultError(f"{run} is a file; expected a run folder, which has a run.json")
    if not run.is_dir():
        raise MissingResultError(
            f"there is no run folder at {run}{near_path(run)}; `longhaul run` makes one, at --out"
        )


def read_run(run: Path) -> RunRecord:
    """Read `run.json`."""
    require_run(run)
    record = _read(RunRecord, run_path(run))
    if record is None:
        raise MissingResultError(f"{run} is not a run folder: it has no run.json")
    return record


def stage_names(run: Path) -> list[str]:
    """Return the stages of `run.json` in order, then those trained or merged apart, by context.

    Raises MissingResultError if there are none.
    """
    listed = list(read_run(run).stages) if run_path(run).is_file() else []
    there = (read_stage(run, file.parent.name) for file in (run / "stages").glob("*/stage.json"))
    apart = {one.name: one.context for one in there if one is not None and one.name not in listed}
    found = [*listed, *sorted(apart, key=lambda name: (apart[name], name))]
    return found or list(read_run(run).stages)


def read_stage(run: Path, stage: str) -> StageRecord | None:
    """Read the `stage.json` of one stage, or return None if it has not started."""
    return stage_at(stage_folder(run, stage))


def stage_at(folder: Path) -> StageRecord | None:
    """Read the `stage.json` of the stage in a folder, or return None if it has not started."""
    return _read(StageRecord, folder / "stage.json")


def read_evaluation(run: Path, stage: str) -> Evaluation | None:
    """Read the latest evaluation of one stage, or return None if it has none yet."""
    return evaluation_at(evaluation_path(run, stage))


def base_evaluations(run: Path) -> list[Evaluation]:
    """Read the evaluations of the base model of a run: with its own rotation first."""
    files = (run / "eval").glob(f"{BASE}*.json")
    found = (evaluation_at(path) for path in files if not path.name.endswith(".gate.json"))
    bases = [each for each in found if each is not None and each.base is not None]
    return sorted(bases, key=lambda each: (len(each.stage), each.stage))


def base_results(run: Path) -> list[StageResults]:
    """Return the evaluations of the base model as results of stages that were never trained."""
    return [StageResults(each.stage, None, (), None, each) for each in base_evaluations(run)]


def evaluation_at(path: Path) -> Evaluation | None:
    """Read the evaluation in a file, or return None if there is none."""
    return _read(Evaluation, path)


def read_steps(path: Path) -> tuple[Step, ...]:
    """Read a `metrics.jsonl` in order of steps, each step once: the last line written for it.

    A kill can truncate a line. Such a line is skipped if nothing is lost by it: at the end of the
    file, or if a resumed run went back to a step that earlier lines already reach.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return ()
    steps: dict[int, Step] = {}
    cut: int | None = None
    last = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            step = decode_json(Step, line, f"{path} line {number}", unknown="ignore")
        except NotJsonError:
            cut = cut or number
            continue
        except ValueError as error:
            raise BrokenResultError(str(error)) from None
        if cut is not None and step.step > last + 1:
            raise BrokenResultError(f"{path} line {cut} is not a JSON object")
        cut = None
        last = step.step
        steps[last] = step
    if cut is not None and not steps:
        raise BrokenResultError(f"{path} has no line that is a step; line {cut} is not JSON")
    return tuple(steps[number] for number in sorted(steps))


def newest_evaluated_step(path: Path) -> Step | None:
    """Return the last step of a `metrics.jsonl` at which the model was evaluated, None without one.

    Lines that are not such a step, or not whole, are skipped.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if b'"heldout_loss"' not in line:
            continue
        try:
            step = decode_json(Step, line, str(path), unknown="ignore")
        except ValueError:
            continue
        if step.is_evaluated:
            return step
    return None


def load(run: Path) -> tuple[RunRecord, list[StageResults]]:
    """Read a whole run folder, its stages in the order of `stage_names`."""
    names = tuple(stage_names(run))
    apart = RunRecord(ladder="", card="", stages=())
    record = replace(read_run(run) if run_path(run).is_file() else apart, stages=names)
    stages = []
    for name in record.stages:
        folder = stage_folder(run, name)
        config = folder / RECIPE
        stages.append(
            StageResults(
                name=name,
                record=read_stage(run, name),
                steps=read_steps(folder / "metrics.jsonl"),
                config=config.read_text("utf-8", errors="replace") if config.is_file() else None,
                evaluation=read_evaluation(run, name),
            )
        )
    return record, stages


def plain(obj: Any) -> Any:
    """Return dataclasses, mappings and lists as JSON types; NaN and infinity become None."""
    if is_dataclass(obj) and not isinstance(obj, type):
        return plain(asdict(obj))
    if isinstance(obj, dict):
        return {key: plain(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [plain(value) for value in obj]
    if isinstance(obj, float) and not math.isfinite(obj):
        return None
    return obj


def _read(kind: type[T], path: Path) -> T | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        again = "restore it, or remove it and run the command that wrote it again"
        raise BrokenResultError(f"{path} is not JSON ({error}); {again}") from None
    try:
        return decode(kind, value, str(path), unknown="ignore")
    except ValueError as error:
        raise BrokenResultError(str(error)) from None
