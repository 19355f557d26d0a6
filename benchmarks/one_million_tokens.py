# SPDX-License-Identifier: Apache-2.0
"""One Megatron layer over 1,000,000 tokens on two CPU ranks, forward and backward.

    python -m benchmarks.one_million_tokens

Claim: the resident sets of the ranks add up to less than 20 GiB. Scores of one head alone would be
4 TB, and 2 TB of them causal.

The model is `LongContextGPT` with one layer and heads of 16: embedding, attention, MLP, LM head and
loss, trained in fp32. A rank makes the ids, labels and positions of its own zigzag shard; nothing
of the whole length exists anywhere. An id is a function of its position, so every number of ranks
and every kind sees the same sequence, and must report the same loss and gradient norm.

Attention takes nearly all of the time: about 2 ns for each pair of tokens, head and core, so two
cores take some 20 minutes for one head. `--seq` runs it shorter.
"""

import argparse
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.harness.ranks import on_ranks
from custom_modules.attention.documents import tokens_of
from custom_modules.context_parallel.config import ContextParallelKind, Kind
from custom_modules.cpu.backend import cpu_backend
from custom_modules.rope.config import RopeScaling

LENGTH = 1_000_000
VOCAB, HEAD_DIM = 64, 16
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One forward and backward."""

    seq: int
    kind: Kind
    heads: int
    timeout_minutes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a rank saw; loss and gradient norm are of the whole sequence, alike on all."""

    loss: float
    gradient_norm: float
    forward_seconds: float
    backward_seconds: float
    resident_bytes: int
    """Peak of the process, its libraries included."""


def shard(seq: int, rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels and positions [1, s] of a rank's two chunks."""
    positions = tokens_of(rank, size, seq)[None]
    return _id(positions), _id(positions + 1), positions


def _id(positions: Tensor) -> Tensor:
    """Return ids that look drawn: the middle bits of a product with an odd constant."""
    return (positions * 2_654_435_761 >> 13) % VOCAB


def _step(run: Run) -> Found:
    """Run the model of this rank forward and backward once."""
    # Here, since Megatron-Core takes seconds to load and the caller does without.
    from megatron.core import parallel_state

    with cpu_backend(force=True):  # the claim is of CPU ranks, on any machine
        parallel_state.initialize_model_parallel(
            context_parallel_size=dist.get_world_size(),
            distributed_timeout_minutes=run.timeout_minutes,
        )
        try:
            return _forward_backward(run)
        finally:
            parallel_state.destroy_model_parallel()


def _forward_backward(run: Run) -> Found:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from benchmarks.harness.llama import llama_config
    from custom_modules.gpt.model import LongContextGPT

    model_parallel_cuda_manual_seed(1)
    config = llama_config(
        num_layers=1,
        hidden_size=run.heads * HEAD_DIM,
        ffn_hidden_size=4 * run.heads * HEAD_DIM,
        num_attention_heads=run.heads,
        kv_channels=HEAD_DIM,
        context_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    model = LongContextGPT(
        config,
        rope=RopeScaling.base_change(500_000_000),
        vocab_size=VOCAB,
        max_sequence_length=run.seq,
        cp=ContextParallelKind(kind=run.kind),
    )
    ids, labels, positions = shard(run.seq, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    start = time.perf_counter()
    loss = model(ids, positions, None, labels=labels).sum() / run.seq
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    total = loss.detach()
    dist.all_reduce(total)
    squares = torch.zeros(())
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        squares += parameter.grad.square().sum()
    return Found(
        loss=float(total),
        gradient_norm=float(squares.sqrt()),
        forward_seconds=middle - start,
        backward_seconds=end - middle,
        resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_million_tokens",
        description="A layer over a million tokens on CPU ranks, forward and backward.",
    )
    parser.add_argument("--seq", type=int, default=LENGTH, help="tokens over all ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kind", choices=("ring", "ulysses", "head_chunked"), default="ring")
    parser.add_argument("--heads", type=int, default=1, help=f"heads of {HEAD_DIM}")
    parser.add_argument("--most-gib", type=float, default=20.0, help="resident, over all ranks")
    parser.add_argument("--timeout", type=int, default=120, help="minutes until ranks are ended")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    if given.seq % (2 * given.ranks):
        parser.error(f"--seq {given.seq:,} is not divisible by 2 x ranks = {2 * given.ranks}")
    if given.kind != "ring" and given.heads % given.ranks:
        parser.error(
            f"--kind {given.kind} cannot share --heads {given.heads} over {given.ranks} ranks; "
            f"take --heads {given.ranks}, or --kind ring"
        )
    return given


def main() -> None:
    """Run it, print the page, and fail where it took more memory than claimed."""
    given = _arguments()
    run = Run(
        seq=given.seq, kind=given.kind, heads=given.heads, timeout_minutes=given.timeout
    )  # fmt: skip
    found = on_ranks(given.ranks, _step, run, timeout_seconds=60 * given.timeout)
    ranks = [found[rank] for rank in range(given.ranks)]
    resident = sum(one.resident_bytes for one in ranks)
    rows = [
        [
            str(rank), f"{one.forward_seconds:,.1f}", f"{one.backward_seconds:,.1f}",
            f"{one.resident_bytes / GIB:.2f}",
        ]
        for rank, one in enumerate(ranks)
    ]  # fmt: skip
    slowest = [
        max(one.forward_seconds for one in ranks),
        max(one.backward_seconds for one in ranks),
    ]
    rows.append(["all", *(f"{seconds:,.1f}" for seconds in slowest), f"{resident / GIB:.2f}"])
    text = page(
        f"{given.seq:,} tokens on {given.ranks} CPU ranks",
        facts(["megatron-core"]),
        [
            f"One layer, heads: {given.heads} of {HEAD_DIM}, fp32, {given.kind}: loss "
            f"{ranks[0].loss:.6f}, gradient norm {ranks[0].gradient_norm:.6f}; the claim is "
            f"less than {given.most_gib:g} GiB resident in sum.",
            table(["rank", "forward s", "backward s", "resident GiB"], rows),
        ],
    )
    print(text, end="")
    if given.out is not None:
        write(given.out, text)
    if resident >= given.most_gib * GIB:
        raise SystemExit(f"error: {resident / GIB:.2f} GiB resident, {given.most_gib:g} claimed")


if __name__ == "__main__":
    main()
