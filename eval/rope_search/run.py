# SPDX-License-Identifier: Apache-2.0
"""Search for LongRoPE's divisors of a trained stage and write them as a file a Stage can use.

Runs on every rank of a torchrun job, which `longhaul rope search` launches. All ranks run the same
search; the texts of a score are distributed over data ranks, each text over context ranks.

The scores of a search are biased, as the best of many draws. So start and result are scored again
on texts that the search has not used: other held-out documents or, if the store has no more, other
needles in other windows of the same documents.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from custom_modules.rope.config import RopeScaling
from data.store import Manifest
from data.token_files.held_out import long_documents
from eval import load_model
from eval.answers.tokens import text_encoder
from eval.distributed import parallel_ranks
from eval.rope_search.divisors import Stretching
from eval.rope_search.evolution import Settings, search
from eval.rope_search.scored_loss import mean_loss
from eval.rope_search.scored_text import ScoredText, guess_nats, needle_texts, texts_past
from eval.run_folder import append_step, read_stage
from recipes.checkpoints.marker import newest_checkpoint
from recipes.notation import rope_file
from recipes.spec.naming import stage_folder

Objective = Literal["needle", "documents"]
"""Scored tokens: answers to needles, or all tokens of documents past the trained length."""


def find_factors(
    run: str,
    stage: str,
    store: str,
    target: int,
    out: str,
    *,
    progress: str,
    documents: int = 10,
    needles: int = 4,
    depths: Sequence[float] = (0.0,),
    objective: Objective = "needle",
    settings: Settings | None = None,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    device: str = "cpu",
    verify: bool = True,
) -> None:
    """Write to `out` the best rotation of the stage's weights at `target` tokens.

    One line per iteration is appended to `progress`. Raises ValueError for a target that is not
    longer than the trained length, and for a store without held-out documents of that length.
    """
    with parallel_ranks(tensor_parallel, context_parallel, device):
        rope, about = found_factors(
            Path(run), stage, Manifest.load(store), target,
            documents=documents,
            needles=needles,
            depths=depths,
            objective=objective,
            settings=settings or Settings(),
            bf16=device == "cuda",
            verify=verify,
            watch=lambda done, best: _append(Path(progress), done, best),
        )  # fmt: skip
        if dist.get_rank() == 0:
            rope_file.write(Path(out), rope, about)


def found_factors(
    run: Path,
    stage: str,
    manifest: Manifest,
    target: int,
    *,
    documents: int,
    needles: int,
    depths: Sequence[float],
    objective: Objective,
    settings: Settings,
    bf16: bool,
    verify: bool,
    watch: Callable[[int, float], None],
) -> tuple[RopeScaling, dict[str, Any]]:
    """Return the best rotation and its origin; Megatron's parallel state must be initialised."""
    if objective not in get_args(Objective):
        raise ValueError(f"objective is {objective!r}; it is {' or '.join(get_args(Objective))}")
    folder = stage_folder(run, stage)
    record = read_stage(run, stage)
    if record is None:
        raise ValueError(f"{folder} has no stage.json, which says what was trained")
    held_out = list(islice(long_documents(manifest, min_tokens=target), 2 * documents))
    if not held_out:
        raise ValueError(
            f"{manifest.root} has no held-out document of {target:,} tokens to search on"
        )
    model = load_model.load(folder, seq_length=target, bf16=bf16, verify=verify)
    own = model.rotation
    stretching = Stretching(own.scaling, own.head_dim, trained=record.context, target=target)
    encode, first = text_encoder(manifest.tokenizer_path), manifest.first_tokens

    def texts(chosen: list[NDArray[np.int64]], seed: int) -> dict[str, list[ScoredText]]:
        return {
            "needle": needle_texts(
                encode,
                chosen,
                length=target,
                needles=needles,
                depths=depths,
                seed=seed,
                first=first,
            ),
            "documents": texts_past(
                chosen, length=target, after=record.context, seed=seed, first=first
            ),
        }

    searched_on = held_out[:documents]
    others = held_out[documents:] or searched_on
    seen = texts(searched_on, settings.seed)[objective]
    found = search(
        lambda divisors: mean_loss(model, seen, stretching.by(divisors)),
        start=stretching.start,
        critical=stretching.critical,
        factor=stretching.factor,
        settings=settings,
        watch=watch,
    )
    unseen = texts(others, settings.seed + 1)

    def on_unseen(divisors: Sequence[float]) -> dict[str, float]:
        rope = stretching.by(divisors)
        return {name: mean_loss(model, each, rope) for name, each in unseen.items()}

    about = {
        "stage": stage,
        "checkpoint": str(newest_checkpoint(folder / "checkpoints")),
        "store": {"path": str(manifest.root), "tokenizer": manifest.tokenizer.fingerprint},
        "trained": record.context,
        "target": target,
        "start": "yarn",
        "temperature": "that of yarn, for every candidate",
        "objective": objective,
        "documents": len(searched_on),
        "needles": needles,
        "depths": list(depths),
        **asdict(settings),
        "critical_pairs": [stretching.critical[0], stretching.critical[-1]],
        "critical": None if found.best.divisors == tuple(stretching.start) else found.best.critical,
        "start_score": found.start_score,
        "score": found.score,
        "evaluations": found.evaluations,
        "history": list(found.history),
        "unseen": {
            "documents": len(others),
            "of": "other documents" if held_out[documents:] else "the same documents",
            "start": on_unseen(stretching.start),
            "found": on_unseen(found.best.divisors),
            "guess": guess_nats(unseen["needle"], needles),
        },
    }
    return stretching.by(found.best.divisors), about


def _append(progress: Path, done: int, best: float) -> None:
    if dist.get_rank() == 0 and math.isfinite(best):
        append_step(progress, {"step": done, "loss": best})
