# SPDX-License-Identifier: Apache-2.0
"""`longhaul probe`: measure what the modules cost on this machine."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from longhaul.local_ranks import run_on_ranks
from longhaul.options import K_IS, Json, length_of, print_json, require_device
from longhaul.probe.memory import memory
from longhaul.terminal.console import loading, show
from longhaul.terminal.messages import is_quiet, note

if TYPE_CHECKING:
    from custom_modules.attention.documents import Documents
    from custom_modules.context_parallel.config import ContextParallelKind
    from custom_modules.context_parallel.measure import Block, Measured

app = typer.Typer(help="Measure what a module costs on this machine.", no_args_is_help=True)
DTYPES = ("float64", "float32", "bfloat16", "float16")


@app.callback()
def probe() -> None:
    """Measure what a module costs on this machine."""


app.command(context_settings={"allow_extra_args": True})(memory)


@app.command("cp")
def context_parallelism(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share a sequence.")] = 4,
    seq: Annotated[
        str, typer.Option(help=f"Tokens of the sequence, over all ranks, such as 8K ({K_IS}).")
    ] = "8K",
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=2, help="Size of a head.")] = 32,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the layer's input.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    documents: Annotated[
        int, typer.Option(min=1, help="Documents of each sequence, kept apart.")
    ] = 1,
    dtype: Annotated[
        str, typer.Option(help="float64, float32, bfloat16 or float16; by device if not given.")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; cuda where there is one.")] = "",
    kernel: Annotated[str, typer.Option(help="Attention kernel, by name.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each kind.")] = 3,
    as_json: Json = False,
) -> None:
    """Compare the kinds of context parallelism: parity, bytes sent, peak bytes and time."""
    length = length_of("--seq", seq)
    with loading("torch"):
        import torch

        from custom_modules.attention.registry import kernel_for
        from custom_modules.context_parallel.measure import TOLERANCE, Block

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _require(device=device, ranks=ranks, seq=length, heads=heads, kv_heads=kv_heads, dtype=dtype,
             head_dim=head_dim, documents=documents, gpus=torch.cuda.device_count())  # fmt: skip
    chosen = getattr(torch, dtype or ("bfloat16" if device == "cuda" else "float32"))
    used = kernel_for(torch.device(device), chosen, head_dim, kernel, documents=documents > 1)
    block = Block(
        seq_length=length,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        dtype=chosen,
        documents=_cut(length, batch, documents) if documents > 1 else None,
        kernel=kernel,
    )
    measured = measure_on_ranks(ranks, block, device, repeats)
    wrong = [str(one.degrees) for one in measured if not one.error <= TOLERANCE[chosen]]  # or NaN
    if as_json:
        print_json(
            {
                "ranks": ranks,
                "device": device,
                "seq_length_tokens": length,
                "dtype": str(chosen).removeprefix("torch."),
                "kernel": used.name,
                "kinds": [_content(one, TOLERANCE[chosen]) for one in measured],
            }
        )
        raise typer.Exit(1 if wrong else 0)
    typer.echo(
        f"{ranks} ranks on {device}, {length:,} tokens x {batch}, {heads}/{kv_heads} heads of "
        f"{head_dim}, {str(chosen).removeprefix('torch.')}, kernel {used.name}"
        + (f", {documents} documents" if documents > 1 else "")
    )
    _print(measured, TOLERANCE[chosen])
    if wrong:
        typer.echo(f"error: differs from one rank: {'; '.join(wrong)}", err=True)
        raise typer.Exit(1)


def measure_on_ranks(ranks: int, block: "Block", device: str, repeats: int) -> "list[Measured]":
    """Start ranks on this machine, joined through a file, and return the results of the first.

    A failing rank ends the command with its error in one line and exit code 1.
    """
    quiet = is_quiet()
    measured: list[Measured] = run_on_ranks(_rank, ranks, block, device, repeats, quiet)[0]
    return measured


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    block: "Block",
    device: str,
    repeats: int,
    quiet: bool,
    results: Any,
) -> None:
    """Measure every kind on this rank; the first rank prints progress unless `quiet`."""
    import torch
    import torch.distributed as dist

    from custom_modules.context_parallel.measure import Probe, kinds_for

    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
    )
    group = dist.group.WORLD
    assert group is not None
    probe = Probe(block, group, where)
    kinds = kinds_for(ranks, block.heads, block.kv_heads)
    measured = []
    for number, kind in enumerate(kinds, start=1):
        if rank == 0 and not quiet:
            note(f"measuring {number} of {len(kinds)}: {_described(kind)}")
        measured.append(probe.measure(kind, repeats))
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def _described(kind: "ContextParallelKind") -> str:
    """Return a kind with the sizes that it states."""
    inner = "" if kind.ulysses is None else f", all-to-all {kind.ulysses}"
    heads = "" if kind.heads_per_stage is None else f", {kind.heads_per_stage} heads a stage"
    return f"{kind.kind}{inner}{heads}"


def _require(
    *, device: str, ranks: int, seq: int, heads: int, kv_heads: int, head_dim: int, dtype: str,
    documents: int, gpus: int,
) -> None:  # fmt: skip
    """Raise ValueError, with a valid alternative, for numbers that cannot be probed."""
    require_device(device)
    if device == "cuda" and gpus < ranks:
        raise ValueError(
            f"--ranks {ranks} on cuda needs as many GPUs, and this machine has {gpus}; take "
            "fewer, or --device cpu"
        )
    if dtype and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    if seq % (2 * ranks):
        raise ValueError(
            f"--seq {seq:,} is not divisible by 2 x ranks = {2 * ranks}; "
            f"{max(1, seq // (2 * ranks)) * 2 * ranks:,} would do"
        )
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} cannot share --kv-heads {kv_heads} evenly")
    if head_dim % 2:
        raise ValueError(f"--head-dim {head_dim} is odd; rotation pairs dimensions")
    if documents > seq:
        raise ValueError(f"--documents {documents:,} is more than the {seq:,} tokens of a sequence")


def _cut(seq: int, batch: int, documents: int) -> "Documents":
    """Return tables of that many documents of random lengths, the same on every run."""
    from custom_modules.attention.documents import Documents

    draw = random.Random(0)
    rows = []
    for _ in range(batch):
        bounds = [0, *sorted(draw.sample(range(1, seq), documents - 1)), seq]
        rows.append([stop - start for start, stop in pairwise(bounds)])
    return Documents.of(rows)


def _print(measured: "list[Measured]", tolerance: float) -> None:
    lines = [_line(one, tolerance) for one in measured]

    def table(without: Sequence[str]) -> Table:
        made = Table()
        titles = [title for title in lines[0] if title not in without]
        for title in titles:
            made.add_column(title, no_wrap=True)
        for line in lines:
            made.add_row(*(line[title] for title in titles))
        return made

    # Dropped one after the other until the table fits; the measured sizes go last.
    show(
        table,
        (
            "backward formula", "forward formula", "sent formula", "backward MiB", "sent MiB",
            "forward MiB",
        ),
    )  # fmt: skip


def _content(one: "Measured", tolerance: float) -> dict[str, Any]:
    """Return the table's row of one kind in numbers."""
    return {
        "kind": one.degrees.kind,
        "all_to_all_ranks": one.degrees.ulysses,
        "ring_ranks": one.degrees.ring,
        "heads_per_stage": one.degrees.heads_per_stage,
        "error": one.error,
        "same_as_one_rank": one.error <= tolerance,
        "sent_bytes": one.sent_bytes,
        "sent_formula_bytes": one.sent_formula,
        "forward_bytes": one.forward_peak,
        "forward_formula_bytes": one.forward_formula,
        "backward_bytes": one.backward_peak,
        "backward_formula_bytes": one.backward_formula,
        "forward_seconds": one.forward_seconds,
        "backward_seconds": one.backward_seconds,
    }


def _line(one: "Measured", tolerance: float) -> dict[str, str]:
    """Return the table's row of one kind, by column."""
    sizes = {
        "sent MiB": one.sent_bytes,
        "sent formula": one.sent_formula,
        "forward MiB": one.forward_peak,
        "forward formula": one.forward_formula,
        "backward MiB": one.backward_peak,
        "backward formula": one.backward_formula,
    }
    return {
        "kind": one.degrees.kind,
        "all-to-all": str(one.degrees.ulysses),
        "ring": str(one.degrees.ring),
        "U": str(one.degrees.heads_per_stage or "all"),
        "parity": f"{one.error:.0e}" + (" WRONG" if not one.error <= tolerance else ""),
        **{name: f"{size / 2**20:.2f}" for name, size in sizes.items()},
        "forward ms": f"{one.forward_seconds * 1e3:.1f}",
        "backward ms": f"{one.backward_seconds * 1e3:.1f}",
    }
