# SPDX-License-Identifier: Apache-2.0
"""`longhaul probe memory`: the memory of one training step of a recipe, by category."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from longhaul.local_ranks import run_on_ranks
from longhaul.options import K_IS, Json, length_of, print_json, require_device
from longhaul.terminal.console import loading, show
from longhaul.terminal.messages import note
from recipes.shipped.table import ROWS
from recipes.spec.suggest import lookup

if TYPE_CHECKING:
    import nemo_run

    from custom_modules.profiling.step_memory import Measured

RANKS_PER_CORE = 8
"""Limit for a machine without GPUs: ranks wait for each other, and each is a process."""
MIB, GIB = 2**20, 2**30


def memory(
    context: typer.Context,
    factory: Annotated[str, typer.Option(help="A shipped recipe, such as tiny_8k.")],
    seq: Annotated[
        str,
        typer.Option(
            help=f"Tokens of a sequence, such as 4K ({K_IS}).", show_default="the recipe's"
        ),
    ] = "",
    layers: Annotated[int, typer.Option(min=0, help="Layers; 0: the recipe's.")] = 0,
    hidden: Annotated[
        int, typer.Option(min=0, help="Width; scales all other widths too. 0: the recipe's.")
    ] = 0,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Keep the structure, reduce the sizes to fit a laptop.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="cpu or cuda; without it the recipe's, if this machine has it.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Run one step and print live bytes by category. Overrides follow as KEY=VALUE."""
    require_device(device)
    lookup("recipe", factory, ROWS)
    length = length_of("--seq", seq) if seq else 0
    with loading("NeMo and Megatron-Core"):
        import torch

        from longhaul.jobs import stage_checks
        from longhaul.probe import resize
        from recipes.resolved import overrides, read, single_step, yaml_file
        from recipes.resolved.read import world_size
        from recipes.resolved.stage import ResolvedStage
        from recipes.shipped import factories

        recipe = overrides.override(factories.recipe_named(factory), context.args)
        by_recipe = read.device_of(recipe)
        if not device and by_recipe == "cuda" and not torch.cuda.is_available():
            device = "cpu"
        overrides.on_device(recipe, device or None)
    recipe = resize.resized(recipe, shrunk=shrink, seq=length, layers=layers, hidden=hidden)
    stage_checks.require_device(ResolvedStage.of(recipe))
    ranks, where = world_size(recipe), read.device_of(recipe)
    require_ranks(recipe, ranks, where)
    require_memory(recipe, ranks, where, resize.about_bytes(recipe))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        yaml_file.write(recipe, path)
        measured = measure_on_ranks(ranks, path, where)
    if as_json:
        ranks_bytes = [
            {
                "rank": rank,
                "peak_bytes": one.peak_bytes,
                "peak_in": one.peak_in[0],
                "peak_in_backward": one.peak_in[1],
                "at_peak_bytes": one.at_peak,
                "own_peak_bytes": one.most,
                "allocator_bytes": one.allocator_bytes,
            }
            for rank, one in enumerate(measured)
        ]
        print_json({"recipe": recipe.log.name, "device": where, "ranks": ranks_bytes})
        return
    run, of_step = single_step.micro_batches(recipe)
    config = recipe.model.config
    plain = ", plain kernels" if where == "cpu" != by_recipe else ""
    typer.echo(
        f"{recipe.log.name} on {ranks} {where} ranks{plain}: {config.num_layers} layers of "
        f"{config.hidden_size}, {recipe.data.seq_length:,} tokens x "
        f"{recipe.data.micro_batch_size}, {run} of {of_step} micro-batches"
    )
    typer.echo(resize.settings(recipe))
    _print(measured)


def measure_on_ranks(ranks: int, recipe: Path, device: str) -> "list[Measured]":
    """Run the step of a recipe's file on ranks of this machine; return their results in order."""
    # A process that has initialized CUDA must not be forked.
    imported = ("longhaul.probe.resize", "recipes.resolved.yaml_file") if device == "cpu" else ()
    log = recipe.with_name("output.log")
    note(f"running one step on {ranks} ranks")
    found = run_on_ranks(_rank, ranks, recipe, device, imported=imported, log=log)
    return [measured for _, measured in sorted(found, key=lambda pair: pair[0])]


def _rank(rank: int, ranks: int, folder: str, recipe: Path, device: str, results: Any) -> None:
    """Measure the step on this rank."""
    from contextlib import nullcontext
    from functools import partial

    import torch
    import torch.distributed as dist

    from custom_modules.cpu.backend import cpu_backend
    from custom_modules.profiling.step_memory import measure
    from longhaul.probe import resize
    from recipes.resolved import single_step, yaml_file

    resize.join(rank, ranks, Path(folder) / "store", on_cpu=device == "cpu")
    build = partial(single_step.training, yaml_file.read(recipe), rank=rank, local_rank=rank)
    with cpu_backend(force=True) if device == "cpu" else nullcontext():
        results.put((rank, measure(build, torch.device(device))))
    dist.destroy_process_group()


def require_ranks(recipe: "nemo_run.Partial", ranks: int, device: str) -> None:
    """Raise ValueError, with what would work, if this machine cannot start that many ranks."""
    cores = os.cpu_count() or 1
    if device == "cpu" and ranks > RANKS_PER_CORE * cores:
        from recipes.resolved.read import layout_of

        layout = layout_of(recipe)
        least = layout.world_size // layout.dp
        raise ValueError(
            f"{recipe.log.name} takes {ranks} ranks and the {cores} cores of this machine run at "
            f"most {RANKS_PER_CORE * cores}; trainer.num_nodes=1 trainer.devices={least} leaves "
            "out its data parallelism"
        )
    if device == "cuda" and int(recipe.trainer.num_nodes) > 1:
        raise ValueError(
            f"{recipe.log.name} takes {recipe.trainer.num_nodes} nodes and a probe has one; set "
            "trainer.num_nodes=1"
        )


def require_memory(recipe: "nemo_run.Partial", ranks: int, device: str, bytes_each: int) -> None:
    """Raise ValueError, with what would work, if the step does not fit this machine."""
    import torch

    from custom_modules.memory.pinned_pool import host_memory_left

    if device == "cuda":
        left, needed, what = torch.cuda.mem_get_info()[0], bytes_each, "a GPU"
    else:
        left, needed, what = host_memory_left(), bytes_each * ranks, "this machine"
    if needed > left:
        raise ValueError(
            f"a step of {recipe.log.name} takes about {bytes_each / GIB:.1f} GiB on each of "
            f"{ranks} ranks and {what} has {left / GIB:.1f} GiB left; add --shrink, or --layers, "
            "--hidden and --seq of your own"
        )


def _print(measured: "list[Measured]") -> None:
    worst = max(range(len(measured)), key=lambda rank: measured[rank].peak_bytes)
    shown = measured[worst]
    peaks = sorted(one.peak_bytes for one in measured)
    table = Table("category", "at the peak, MiB", "share", "its own peak, MiB")
    for name, size in shown.at_peak.items():
        share = "" if name == "host" else f"{size / shown.peak_bytes:.1%}"
        table.add_row(name, f"{size / MIB:.2f}", share, f"{shown.most[name] / MIB:.2f}")
    table.add_section()
    table.add_row("all but host", f"{shown.peak_bytes / MIB:.2f}", "100.0%", "")
    if shown.allocator_bytes is not None:
        table.add_row("CUDA's allocator", f"{shown.allocator_bytes / MIB:.2f}", "", "")
    show(lambda _: table)
    category, backward = shown.peak_in
    typer.echo(
        f"rank {worst} of {len(measured)}, which holds most (ranks peak at {peaks[0] / MIB:.2f} to "
        f"{peaks[-1] / MIB:.2f} MiB); its peak is in {'backward of ' if backward else ''}{category}"
    )
