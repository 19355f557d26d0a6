# SPDX-License-Identifier: Apache-2.0
"""Peak bytes of a training step by what layers keep, and how they grow with length, on CPU.

    python -m benchmarks.memory_stack

Claim: per token, the peak of the full stack grows by at most 0.74 of the bytes of an ALST-like one.

The model is a Llama in the proportions of Llama-8B, by default 1/32 of its width and
vocabulary, in fp32, on one rank. Every stack runs one step of it at two lengths
(`benchmarks.stacks`), and must find the plain model's loss and gradient norm. The slope is the
difference of the two peaks over that of the tokens: weights, gradients and tiles, alike at both,
have no part in it. It is given in bytes, and in units of one layer input [s, b, hidden]. The full
stack is kept-attention recompute with both of its tensors on the host, tiled MLP and loss, and
attention a few heads at a time.

What shrinks less than the width counts for more here than in Llama-8B: a stage of one head is 1/8
of the heads by default, not 1/32, a log-sum-exp 1/16 of its head's bytes, not 1/64, and the rotary
table 1/8 of a layer input, not 1/16.

Seconds are those of the step at the longer length, once, while its bytes are counted. On two cores
all of it takes some 25 minutes, nearly all of it attention.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness.machine import facts
from benchmarks.harness.page import mebibytes, page, table, write
from benchmarks.stacks import Found, Shape, Stack, one_rank, step
from custom_modules.memory.config import Offload, Recompute, Tiling

MOST_SLOPE = 0.74
"""Of the ALST-like stack's, that the claim allows."""
FULL_STACK, ALST = "full stack", "ALST-like"
FFN_PER_HIDDEN, VOCAB_PER_HIDDEN, HEADS_PER_KV_HEAD = 3.5, 31.3125, 4
"""Llama-8B's proportions."""


def shape_of(layers: int, heads: int, head_dim: int) -> Shape:
    """Return a Llama of so many heads."""
    hidden = heads * head_dim
    return Shape(
        layers=layers,
        hidden=hidden,
        ffn=int(FFN_PER_HIDDEN * hidden),
        heads=heads,
        kv_heads=heads // HEADS_PER_KV_HEAD,
        head_dim=head_dim,
        vocab=int(VOCAB_PER_HIDDEN * hidden),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def stacks(tiles: Tiling, cap_gib: float) -> list[Stack]:
    """Return all that are measured, the plain model first."""
    selective = Recompute(kind="selective", modules=["core_attn"])
    full, kept = Recompute(kind="full"), Recompute(kind="kept_attention")
    inputs = Offload(tensors="inputs", cap_gib=cap_gib)
    both = Offload(tensors="both", cap_gib=cap_gib)
    found = []
    for name, recompute in (("plain", Recompute()), ("selective", selective)):
        found.append(Stack(name=name, recompute=recompute))
        found.append(Stack(name=f"{name}, tiled", recompute=recompute, tiling=tiles))
    for name, recompute, offload in (("full", full, inputs), ("kept attention", kept, both)):
        found += [
            Stack(name=name, recompute=recompute),
            Stack(name=f"{name}, tiled", recompute=recompute, tiling=tiles),
            Stack(name=f"{name}, offload", recompute=recompute, offload=offload),
            Stack(
                name=f"{name}, tiled, offload", recompute=recompute, tiling=tiles, offload=offload
            ),
        ]
    return [
        *found,
        Stack(name=FULL_STACK, recompute=kept, tiling=tiles, offload=both, head_chunked=True),
        Stack(name=ALST, alst=tiles),
    ]


Pair = tuple[Found, Found]
"""Of the shorter and the longer length."""


def measured(shape: Shape, given: Sequence[Stack], lengths: tuple[int, int]) -> dict[str, Pair]:
    """Return what each stack took; the first is the one that the others must agree with."""
    found: dict[str, Pair] = {}
    for stack in given:
        try:
            pair = step(shape, stack, lengths[0]), step(shape, stack, lengths[1])
        except ModuleNotFoundError:
            missing = Found(reason="not installed: pip install -e '.[bench]'")
            found[stack.name] = missing, missing
            continue
        right = next(iter(found.values()), pair)
        if not all(mine.agrees(theirs) for mine, theirs in zip(pair, right, strict=True)):
            for mine in pair:
                mine.reason = f"another model: loss {mine.loss}, gradient {mine.gradient_norm}"
        found[stack.name] = pair
    return found


def slope(pair: Pair, lengths: tuple[int, int]) -> float:
    """Return the bytes by which the peak grows with a token."""
    return (pair[1].peak_bytes - pair[0].peak_bytes) / (lengths[1] - lengths[0])


def sections(shape: Shape, found: dict[str, Pair], lengths: tuple[int, int]) -> list[str]:
    """Return the tables: peaks and slopes, then by category the peak of the two compared."""
    unit = shape.hidden * shape.dtype.itemsize
    rows = []
    for name, pair in found.items():
        if pair[1].reason:
            rows.append([name, pair[1].reason, *["-"] * 6])
            continue
        rows.append(
            [
                name, pair[1].peak_in, *(mebibytes(one.peak_bytes) for one in pair),
                mebibytes(pair[1].host_bytes), f"{slope(pair, lengths):,.0f}",
                f"{slope(pair, lengths) / unit:.2f}", f"{pair[1].seconds:.1f}",
            ]
        )  # fmt: skip
    head = [
        "stack", "peak in", *(f"peak MiB, {length:,}" for length in lengths), "host MiB",
        "bytes per token", "layer inputs per token", "s",
    ]  # fmt: skip
    compared = {name: found[name] for name in (FULL_STACK, ALST) if not found[name][1].reason}
    categories = [
        category for category in next(iter(compared.values()))[1].at_peak
        if any(pair[1].at_peak[category] != pair[0].at_peak[category] for pair in compared.values())
    ]  # fmt: skip
    by_category = [
        [
            name, "",
            *(
                f"{(pair[1].at_peak[name] - pair[0].at_peak[name]) / unit / _tokens(lengths):.2f}"
                for name in categories
            ),
        ]
        for name, pair in compared.items()
    ]  # fmt: skip
    return [
        table(head, rows),
        _verdict(compared, lengths),
        "Layer inputs per token at the peak, by category (`host` has no part in it):",
        table(["stack", "", *categories], by_category),
    ]


def _tokens(lengths: tuple[int, int]) -> int:
    return lengths[1] - lengths[0]


def _verdict(compared: dict[str, Pair], lengths: tuple[int, int]) -> str:
    if len(compared) < len((FULL_STACK, ALST)):
        return f"Not compared: {' and '.join({FULL_STACK, ALST} - compared.keys())} did not run."
    ratio = slope(compared[FULL_STACK], lengths) / slope(compared[ALST], lengths)
    claim = "holds" if ratio <= MOST_SLOPE else "is missed"
    return f"{FULL_STACK} over {ALST}: {ratio:.3f}; the claim of {MOST_SLOPE} {claim}."


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_stack",
        description="Peak bytes of a training step by what its layers keep, on CPU.",
    )
    parser.add_argument("--lengths", type=int, nargs=2, default=[16_384, 32_768])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8, help="four to a KV head")
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--loss-tile", type=int, default=512, help="tokens, ours and DeepSpeed's")
    parser.add_argument("--mlp-tile", type=int, default=512, help="tokens, ours and DeepSpeed's")
    parser.add_argument("--cap-gib", type=float, default=4.0, help="host memory for offload")
    parser.add_argument("--out", type=Path, help="file to write the page to")
    given = parser.parse_args()
    if given.heads < 1 or given.heads % HEADS_PER_KV_HEAD:
        parser.error(f"--heads {given.heads} is not a multiple of {HEADS_PER_KV_HEAD}")
    if not 0 < given.lengths[0] < given.lengths[1]:
        parser.error(f"--lengths {given.lengths} must be a shorter and a longer one")
    return given


def main() -> None:
    """Measure, print the page, and write it where asked to."""
    given = _arguments()
    load = os.getloadavg()[0]
    shape = shape_of(given.layers, given.heads, given.head_dim)
    lengths = (given.lengths[0], given.lengths[1])
    tiles = Tiling(loss=True, loss_tile=given.loss_tile, mlp=True, mlp_tile=given.mlp_tile)
    with one_rank(shape.device):
        found = measured(shape, stacks(tiles, given.cap_gib), lengths)
    of_load = {
        "load": f"{load:.1f} running at the start, {os.getloadavg()[0]:.1f} at the end"
    }  # fmt: skip
    text = page(
        "Memory of a training step",
        facts(["megatron-core", "deepspeed"]) | of_load,
        [
            f"{shape.layers} layers, width {shape.hidden}, FFN {shape.ffn}, {shape.heads} heads "
            f"and {shape.kv_heads} KV heads of {shape.head_dim}, vocabulary {shape.vocab:,}, fp32, "
            f"{torch.get_num_threads()} threads; tiles of {given.loss_tile} tokens in the loss and "
            f"{given.mlp_tile} in the MLP.",
            *sections(shape, found, lengths),
        ],
    )
    print(text, end="")
    if given.out is not None:
        write(given.out, text)


if __name__ == "__main__":
    main()
