# SPDX-License-Identifier: Apache-2.0
"""Which model of a run a file of predictions is of, and its scores as the run keeps them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from custom_modules.checkpoints.index import CheckpointError
from eval.provenance import Provenance, now
from eval.ruler.predictions import MODEL, job_folder
from eval.ruler.results import RulerResult
from eval.ruler.scoring import Scores
from eval.run_folder import BASE, base_evaluations, stage_names
from longhaul.jobs.origin import origin
from longhaul.run_folder.stage_named import stage_named
from recipes.checkpoints.marker import checkpoint_facts
from recipes.spec.naming import stage_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Whose answers predictions are: a model of a run, and what `ruler predict` recorded of it."""

    model: str
    step: int | None
    record: dict[str, Any]


def answered(run: Path, word: str, predictions: Sequence[Path]) -> Answered:
    """Return which model of a run answered; `word` is its name, or empty to read it.

    Raises ValueError for a model that the run does not have, if the predictions are of several
    models or of another than `word`, and if neither says which model it is.
    """
    records = [_record(path) for path in predictions]
    known = {(each.get("weights"), each.get("weights_sha256")) for each in records}
    if len(known) > 1:
        weights = ", ".join(sorted(str(each) for each, _ in known))
        raise ValueError(
            f"the files of --predictions are of several models ({weights}); score one model alone"
        )
    record, stages = records[0], stage_names(run)
    stage, step = _stage_of(run, stages, str(record.get("weights", "")))
    if not word and not stage:
        raise ValueError(
            f"no record next to {predictions[0]} says that a stage of {run} answered; name the "
            f"model: --model {stages[-1]}, or another of {', '.join([*stages, BASE])}"
        )
    names = [*stages, *dict.fromkeys([BASE, *(each.stage for each in base_evaluations(run))])]
    model = stage_named(run, word, names) if word else stage
    if stage and model != stage:
        raise ValueError(
            f"--model is {model}, and {predictions[0]} has answers of stage {stage}: its record "
            f"names {record['weights']}"
        )
    return Answered(model=model, step=step, record=record)


def result(scores: Scores, of: Answered) -> RulerResult:
    """Return scores as a run keeps them."""
    typed = origin()
    return RulerResult(
        model=of.model,
        scores=scores,
        provenance=Provenance(date=now(), commit=typed["commit"], command=typed["command"]),
        tokenizer_sha256=str(of.record.get("tokenizer", "")),
        weights=str(of.record.get("weights", "")),
        weights_sha256=str(of.record.get("weights_sha256", "")),
        step=of.step,
        precision=str(of.record.get("precision", "")),
    )


def _record(predictions: Path) -> dict[str, Any]:
    """Return what `ruler predict` recorded of the model; empty for answers of another engine."""
    path = job_folder(predictions) / MODEL
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} is not a record of a model; remove it and name the model: --model"
        )
    return found


def _stage_of(run: Path, stages: Sequence[str], weights: str) -> tuple[str, int | None]:
    """Return the stage of a checkpoint, and its step; empty if it is not of this run."""
    for name in stages:
        if weights and Path(weights).is_relative_to(stage_folder(run, name).resolve()):
            try:
                facts = checkpoint_facts(Path(weights))
            except CheckpointError:
                facts = None
            return name, None if facts is None else int(facts["step"])
    return "", None
