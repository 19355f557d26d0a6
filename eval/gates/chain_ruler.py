# SPDX-License-Identifier: Apache-2.0
"""Answer RULER's samples with a stage of a chain, score the answers, and judge the stage by them.

    RUN/eval/ruler/answers/<stage>-<digest>/    predictions, a file for each data-parallel rank

`longhaul run` launches it on every rank of a job, here or on Slurm. Answers that are there are not
made again; the digest is that of weights and precision, and an id names the text of its sample.
Scores are written as by `longhaul ruler score --run` (`eval.ruler.results`), unless they are there
with more, and the judgement as `eval.gates.ruler_scores` says.
"""

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from data.files.sha256 import sha256_of
from data.tokenization.tokenizer import load
from eval import load_model
from eval.answers.end_tokens import end_tokens
from eval.answers.ruler import by_stage, own_samples, unanswered, write_answers
from eval.distributed import parallel_ranks
from eval.gates.ruler_scores import judge, pass_scores
from eval.provenance import Provenance, now
from eval.ruler.length import RulerError
from eval.ruler.predictions import answered, questions, require_tokenizer, whole_lines
from eval.ruler.results import RulerResult, covers, result_at, result_path, write_result
from eval.ruler.scoring import Scores, score
from eval.ruler.tokens import Tokens
from eval.run_folder import BrokenResultError
from recipes.checkpoints.marker import MARKER, newest_checkpoint, steps_taken
from recipes.hugging_face.source_checkpoint import published_folder
from recipes.spec.naming import stage_folder

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How often the first rank looks whether the others have answered all of their samples."""


def run_ruler(
    run: str,
    stage: str,
    tokenizer: str,
    files: Sequence[str],
    least: Mapping[str, float],
    limit: int | None = None,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    device: str = "cpu",
    verify: bool = True,
    command: str = "",
    commit: str = "",
) -> None:
    """Write the scores of a stage, and judge it; raises GateShutError if a threshold is not met."""
    folder, paths = Path(run), [Path(file) for file in files]
    facts = facts_of(folder, stage, device)
    checkpoint = Path(facts["weights"])
    place = answers_folder(folder, stage, facts)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        asked = questions(paths, limit)
        require_tokenizer(asked, load(tokenizer), f"stage {stage}")
    with parallel_ranks(tensor_parallel, context_parallel, device):
        if first:
            place.mkdir(parents=True, exist_ok=True)
            for out in place.glob("*.jsonl"):
                whole_lines(out)
        left = unanswered(paths, sorted(place.glob("*.jsonl")) if first else [], limit)
        if left:
            unit = 2 * tensor_parallel * context_parallel
            model = load_model.load(
                stage_folder(folder, stage),
                seq_length=-(-max(length for _, length in left) // unit) * unit,
                bf16=device == "cuda",
                verify=verify,
            )
            out = place / f"{parallel_state.get_data_parallel_rank()}.jsonl"
            read = Tokens(load(tokenizer))
            ends = end_tokens(read.tokenizer.hugging_face, published_folder(checkpoint))
            answer = by_stage(model, read, ends.of_model)
            write_answers(own_samples(paths, left, limit), answer, out)
        if first:
            _wait(place, set(asked.lengths))
    if first:
        scores = scores_of(place, paths, limit)
        about = Provenance(date=now(), commit=commit, command=command)
        result = RulerResult(
            model=stage, scores=scores, provenance=about, tokenizer_sha256=asked.tokenizer, **facts
        )
        if not _has(folder, stage, scores, facts) and (lost := write_result(folder, result)):
            path = result_path(folder, stage)
            log.warning("%s: earlier scores of %s are replaced", path, ", ".join(lost))
        pass_scores(folder, stage, least, scores)


def facts_of(run: Path, stage: str, device: str) -> dict[str, Any]:
    """Return what identifies the model; raise ValueError without a checkpoint."""
    checkpoint = newest_checkpoint(stage_folder(run, stage) / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"{stage} of {run} has no complete checkpoint; train the stage first")
    return {
        "weights": str(checkpoint.resolve()),
        "weights_sha256": sha256_of([checkpoint / MARKER])[0],
        "step": steps_taken(checkpoint.parent),
        "precision": "bf16" if device == "cuda" else "fp32",
    }


def answers_folder(run: Path, stage: str, facts: Mapping[str, Any]) -> Path:
    """Return the folder of a stage's predictions; other weights have another."""
    of = f"{facts['weights_sha256']} {facts['precision']}"
    digest = hashlib.sha256(of.encode()).hexdigest()[:12]
    return run / "eval" / "ruler" / "answers" / f"{stage}-{digest}"


def scores_of(place: Path, files: Sequence[Path], limit: int | None) -> Scores:
    """Return the scores of the predictions in a folder; raise ValueError if samples have none."""
    return score(files, sorted(place.glob("*.jsonl")), limit)[0]


def have_passed(
    run: Path,
    stage: str,
    files: Sequence[Path],
    least: Mapping[str, float],
    limit: int | None,
    device: str,
) -> bool:
    """Whether the scores are of the newest checkpoint and these samples, and the gate is open."""
    facts = facts_of(run, stage, device)
    place = answers_folder(run, stage, facts)
    asked = questions(files, limit).lengths.keys()
    try:
        if asked - _answered(place):
            return False
    except RulerError:  # an interruption cut off a line, which the job removes
        return False
    scores = scores_of(place, files, limit)
    if not _has(run, stage, scores, facts):
        return False
    return all(each.passed for each in judge(least, scores))


def _has(run: Path, stage: str, scores: Scores, facts: Mapping[str, Any]) -> bool:
    """Whether the run has these scores of a stage, or scores of more samples."""
    try:
        kept = result_at(result_path(run, stage))
    except BrokenResultError:
        return False
    return covers(kept, scores, facts["weights_sha256"], facts["precision"])


def _answered(place: Path) -> set[str]:
    return set().union(*(answered(out) for out in place.glob("*.jsonl")))


def _wait(place: Path, asked: set[str]) -> None:
    """Wait until the other ranks have written their answers; if one fails, the job ends."""
    while True:
        with suppress(RulerError):  # another node's file may show a part of a line
            if not asked - _answered(place):
                return
        time.sleep(LOOK_SECONDS)
