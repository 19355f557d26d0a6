# SPDX-License-Identifier: Apache-2.0
"""Loss by position and one row of passkeys over 1,048,576 tokens on two CPU ranks.

    python -m benchmarks.evaluation_at_one_million

Claim: the resident sets of the ranks add up to less than 20 GiB.

The functions are those of `longhaul evaluate --cp 2`: `loss_by_position` of
`eval.loss.loss_by_position` over one window, and `score` of `eval.answers.passkey` of a prompt at
each depth. The model has the shape of the tiny card and its initial weights, in fp32: time and
memory do not depend on weights, and the scores are those of a model that has learned nothing. Text
and prompts are bytes, drawn from a seed, so every number of ranks sees the same ones and must
report the same scores.

Each of the 1 + depths forwards attends to half of length^2 pairs of tokens in every head of every
layer, which takes nearly all of the time: two cores take hours for one forward of the whole length.
`--length` runs it shorter, and the page then estimates the time of 1,048,576 tokens by the square
of the length; not their memory, since short runs add little to what the libraries hold. `--layers`
and `--heads` take less of the model: layers follow each other, so that they add time and, at
evaluation, no memory; a head adds its part of queries, keys, values and outputs.
"""

import argparse
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.harness.ranks import on_ranks
from custom_modules.cpu.backend import cpu_backend
from custom_modules.memory.config import Tiling
from custom_modules.rope.config import RopeScaling
from recipes.models import TINY

if TYPE_CHECKING:
    from custom_modules.gpt.model import LongContextGPT

LENGTH = 1_048_576
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SEED = 20_261_125
GIB = 2**30
QUARTERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is evaluated."""

    length: int
    depths: tuple[float, ...]
    layers: int
    heads: int
    kv_heads: int
    timeout_minutes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a rank measured; the scores are those of the whole sequence, the same on all ranks."""

    losses: tuple[float, ...]
    """Mean loss of each quarter of the positions."""
    hits: int
    nats: float
    """Per token of the answers."""
    loss_seconds: float
    passkey_seconds: float
    before_bytes: int
    """Peak of the process with the model in it, before the first forward."""
    resident_bytes: int
    """Peak of the process at the end, its libraries included."""


def text(length: int) -> NDArray[np.int64]:
    """Return a document of lower-case letters, one token longer than a window."""
    draws = np.random.default_rng(SEED)
    return draws.integers(ord("a"), ord("z") + 1, length + 1)


def encoded(words: str) -> list[int]:
    """Return the bytes of a text, which are its tokens here."""
    return list(words.encode())


def _evaluate(run: Run) -> Found:
    """Evaluate on this rank."""
    # Here, since Megatron-Core takes seconds to load and the caller does without.
    from megatron.core import parallel_state

    with cpu_backend(force=True):  # the claim is of CPU ranks, on any machine
        parallel_state.initialize_model_parallel(
            context_parallel_size=dist.get_world_size(),
            distributed_timeout_minutes=run.timeout_minutes,
        )
        try:
            return _scores(_tiny(run), run)
        finally:
            parallel_state.destroy_model_parallel()


def _tiny(run: Run) -> "LongContextGPT":
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from benchmarks.harness.llama import llama_config
    from custom_modules.gpt.model import LongContextGPT

    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)
    config = llama_config(
        num_layers=run.layers,
        hidden_size=TINY.hidden,
        ffn_hidden_size=TINY.ffn_hidden,
        num_attention_heads=run.heads,
        num_query_groups=run.kv_heads,
        kv_channels=TINY.head_dim,
        layernorm_epsilon=TINY.norm_epsilon,
        init_method_std=TINY.init_std,
        context_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    return LongContextGPT(
        config,
        rope=RopeScaling.base_change(500_000_000),
        vocab_size=TINY.vocab,
        max_sequence_length=run.length,
        share_embeddings_and_output_weights=TINY.tied_embeddings,
        tiling=Tiling(loss=True),  # as `eval.load_model` has it
    ).eval()


def _scores(model: "LongContextGPT", run: Run) -> Found:
    from eval.answers.passkey import prompts, score
    from eval.loss.loss_by_position import loss_by_position

    document = text(run.length)
    dist.barrier()
    before, start = _peak(), time.perf_counter()
    losses = loss_by_position(model, [document], run.length)[0]
    middle = time.perf_counter()
    scores = [
        score(model, prompt)
        for depth in run.depths
        for prompt in prompts(encoded, document, length=run.length, depth=depth, trials=1)
    ]
    end = time.perf_counter()
    hits, nats, tokens = (sum(each) for each in zip(*scores, strict=True))
    return Found(
        losses=tuple(float(quarter.mean()) for quarter in np.array_split(losses, QUARTERS)),
        hits=int(hits),
        nats=nats / tokens,
        loss_seconds=middle - start,
        passkey_seconds=end - middle,
        before_bytes=before,
        resident_bytes=_peak(),
    )


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _arguments() -> argparse.Namespace:
    from eval.run_folder import BUCKET

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation_at_one_million",
        description="Loss by position and a row of passkeys over a million tokens on CPU ranks.",
    )
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens over all ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--depths", type=float, nargs="+", default=DEPTHS, help="one prompt each")
    parser.add_argument("--layers", type=int, default=TINY.layers, help="of the card's, or fewer")
    parser.add_argument("--heads", type=int, default=TINY.heads, help="of the card's, or fewer")
    parser.add_argument("--most-gib", type=float, default=20.0, help="resident, over all ranks")
    parser.add_argument("--timeout", type=int, default=2880, help="minutes until ranks are ended")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    unit = QUARTERS * BUCKET * given.ranks
    if given.length < unit or given.length % unit:
        parser.error(
            f"--length {given.length:,} is not a multiple of {unit:,}: {QUARTERS} quarters of "
            f"whole buckets of {BUCKET}, shared by {given.ranks} ranks"
        )
    if not 1 <= given.layers <= TINY.layers:
        parser.error(f"--layers {given.layers}: the card has {TINY.layers}")
    if not 1 <= given.heads <= TINY.heads or given.heads % _kv_heads(given.heads):
        parser.error(f"--heads {given.heads}: the card has {TINY.heads}, in {TINY.kv_heads} groups")
    if not all(0 <= depth <= 1 for depth in given.depths):
        parser.error(f"--depths {given.depths}: a depth is between 0 (first) and 1 (last)")
    return given


def _of(taken: int, whole: int, noun: str) -> str:
    words = f"{taken} {noun}{'s' * (taken != 1)}"
    return words if taken == whole else f"{words} of its {whole}"


def _kv_heads(heads: int) -> int:
    return max(1, heads * TINY.kv_heads // TINY.heads)


def sections(ranks: Sequence[Found], run: Run, most_gib: float) -> list[str]:
    """Return the page's content."""
    first = ranks[0]
    quarters = ", ".join(f"{loss:.6f}" for loss in first.losses)
    rows = [
        [
            str(rank), f"{one.loss_seconds:,.1f}", f"{one.passkey_seconds:,.1f}",
            f"{one.before_bytes / GIB:.2f}", f"{one.resident_bytes / GIB:.2f}",
        ]
        for rank, one in enumerate(ranks)
    ]  # fmt: skip
    slowest = [max(one.loss_seconds for one in ranks), max(one.passkey_seconds for one in ranks)]
    before = sum(one.before_bytes for one in ranks)
    resident = sum(one.resident_bytes for one in ranks)
    rows.append(
        ["all", *(f"{seconds:,.1f}" for seconds in slowest)]
        + [f"{size / GIB:.2f}" for size in (before, resident)]
    )
    made = [
        f"The shape of the tiny card ({_of(run.layers, TINY.layers, 'layer')}, "
        f"{_of(run.heads, TINY.heads, 'head')} of {TINY.head_dim}, "
        f"vocabulary {TINY.vocab}) with its initial weights, fp32. Loss by position of one window, "
        f"means of the quarters: {quarters}. Passkeys: {first.hits} of {len(run.depths)} "
        f"found, {first.nats:.6f} nats per token of the answers. The claim is less than "
        f"{most_gib:g} GiB resident in sum.",
        table(["rank", "loss s", "passkeys s", "GiB before", "resident GiB"], rows),
    ]
    if run.length != LENGTH:
        times = LENGTH / run.length
        hours = [seconds * times**2 / 3600 for seconds in slowest]
        made.append(
            f"Not measured, but estimated from these {run.length:,} tokens for {LENGTH:,}, by the "
            f"square of the length: {hours[0]:.1f} hours for the loss and {hours[1]:.1f} for the "
            "passkeys."
        )
    return made


def main() -> None:
    """Run it, print the page, and fail where it took more memory than claimed."""
    given = _arguments()
    run = Run(
        length=given.length,
        depths=tuple(given.depths),
        layers=given.layers,
        heads=given.heads,
        kv_heads=_kv_heads(given.heads),
        timeout_minutes=given.timeout,
    )
    found = on_ranks(given.ranks, _evaluate, run, timeout_seconds=60 * given.timeout)
    ranks = [found[rank] for rank in range(given.ranks)]
    written = page(
        f"Evaluation over {given.length:,} tokens on {given.ranks} CPU ranks",
        facts(["megatron-core"]),
        sections(ranks, run, given.most_gib),
    )
    print(written, end="")
    if given.out is not None:
        write(given.out, written)
    resident = sum(one.resident_bytes for one in ranks)
    if resident >= given.most_gib * GIB:
        raise SystemExit(f"error: {resident / GIB:.2f} GiB resident, {given.most_gib:g} claimed")


if __name__ == "__main__":
    main()
