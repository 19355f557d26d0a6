# SPDX-License-Identifier: Apache-2.0
"""`longhaul probe`: what the modules cost on this machine, measured."""

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from longhaul.console import loading
from longhaul.options import K_IS, length_of, require_device
from longhaul.probe_memory import memory
from longhaul.ranks import results_of

if TYPE_CHECKING:
    from custom_modules.context_parallel_probe import Block, Measured
    from custom_modules.documents import Documents

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
        str, typer.Option(help=f"Tokens of the sequence, over all ranks, as 8K ({K_IS}).")
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
) -> None:
    """Compare the kinds of context parallelism: parity, bytes sent, peak bytes and time."""
    length = length_of("--seq", seq)
    with loading("torch"):
        import torch

        from custom_modules.attention_kernels import kernel_for
        from custom_modules.context_parallel_probe import TOLERANCE, Block

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _require(device=device, ranks=ranks, seq=length, heads=heads, kv_heads=kv_heads, dtype=dtype,
             head_dim=head_dim, documents=documents, gpus=torch.cuda.device_count())  # fmt: skip
    chosen = getattr(torch, dtype or ("bfloat16" if device == "cuda" else "float32"))
    used = kernel_for(torch.device(device), chosen, head_dim, kernel)
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
    typer.echo(
        f"{ranks} ranks on {device}, {length:,} tokens x {batch}, {heads}/{kv_heads} heads of "
        f"{head_dim}, {str(chosen).removeprefix('torch.')}, kernel {used.name}"
        + (f", {documents} documents" if documents > 1 else "")
    )
    _print(measured, TOLERANCE[chosen])
    wrong = [str(one.degrees) for one in measured if not one.error <= TOLERANCE[chosen]]  # or NaN
    if wrong:
        typer.echo(f"error: differs from one rank: {'; '.join(wrong)}", err=True)
        raise typer.Exit(1)


def measure_on_ranks(ranks: int, block: "Block", device: str, repeats: int) -> "list[Measured]":
    """Start the ranks on this machine, joined by a file, and return what the first one measured.

    A rank that fails ends the command: its error in one line, exit code 1.
    """
    measured: list[Measured] = results_of(_rank, ranks, block, device, repeats)[0]
    return measured


def _rank(
    rank: int, ranks: int, folder: str, block: "Block", device: str, repeats: int, results: Any
) -> None:
    """Measure every kind on this rank."""
    import torch
    import torch.distributed as dist

    from custom_modules.context_parallel_probe import Probe, kinds_for

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
    measured = [probe.measure(kind, repeats) for kind in kinds]
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def _require(
    *, device: str, ranks: int, seq: int, heads: int, kv_heads: int, head_dim: int, dtype: str,
    documents: int, gpus: int,
) -> None:  # fmt: skip
    """Raise ValueError, with what would do, for numbers that cannot be probed."""
    require_device(device)
    if device == "cuda" and gpus < ranks:
        raise ValueError(
            f"--ranks {ranks} on cuda needs as many GPUs, and this machine has {gpus}; take "
            "fewer, or --device cpu"
        )
    if dtype and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
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
    from custom_modules.documents import Documents

    draw = random.Random(0)
    rows = []
    for _ in range(batch):
        bounds = [0, *sorted(draw.sample(range(1, seq), documents - 1)), seq]
        rows.append([stop - start for start, stop in pairwise(bounds)])
    return Documents.of(rows)


def _print(measured: "list[Measured]", tolerance: float) -> None:
    table = Table("kind", "all-to-all", "ring", "U", "parity", "sent MiB", "(theory)",
                  "forward MiB", "(formula)", "backward MiB", "(formula)", "forward ms",
                  "backward ms")  # fmt: skip
    for one in measured:
        table.add_row(
            one.degrees.kind,
            str(one.degrees.ulysses),
            str(one.degrees.ring),
            str(one.degrees.heads_per_stage or "all"),
            f"{one.error:.0e}" + (" WRONG" if not one.error <= tolerance else ""),
            *(
                f"{size / 2**20:.2f}"
                for size in (
                    one.sent_bytes, one.sent_formula, one.forward_peak, one.forward_formula,
                    one.backward_peak, one.backward_formula,
                )
            ),
            f"{one.forward_seconds * 1e3:.1f}",
            f"{one.backward_seconds * 1e3:.1f}",
        )  # fmt: skip
    console = Console()
    console.print(table) if console.is_terminal else Console(width=160).print(table)
