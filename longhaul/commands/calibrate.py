# SPDX-License-Identifier: Apache-2.0
"""`longhaul calibrate`: rates and bytes in a cluster file, measured or fitted to a run."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from longhaul.defaults import planned_cluster
from longhaul.options import Json, print_json, require_device
from longhaul.terminal.console import busy, loading, plain_console, show
from recipes.spec import cluster as clusters
from recipes.spec.cluster import Cluster
from recipes.spec.efficiency import AttentionKernel, Efficiency, of_small_heads
from recipes.spec.memory_constants import MemoryConstants
from recipes.spec.naming import length_shown
from recipes.spec.units import GiB

if TYPE_CHECKING:
    from recipes.planner.byte_calibration import CalibratedBytes, MeasuredBytes
    from recipes.planner.calibration import Calibrated, MeasuredStep

ON_CPU = {"layer_seconds": 2e-3}
"""What a fit to a run begins with on CPU ranks, which wait for the host."""

ClusterFile = Annotated[
    str,
    typer.Option(help="Your cluster file, which it is written to.", show_default="longhaul.toml's"),
]


def calibrate(
    cluster: ClusterFile = "",
    run: Annotated[
        list[Path] | None,
        typer.Option(help="Fit to this run folder, or YAML file of measured steps; repeatable."),
    ] = None,
    card: Annotated[str, typer.Option(help="The model card of --run.")] = "",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks to measure on.", show_default="a node's GPUs, or 2 on CPU"),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda, or cpu for a file of CPU ranks.", show_default="cuda")
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure this node's rates, or fit the planner to measured steps; write the cluster file."""
    from longhaul.jobs.calibration import own_file

    named = planned_cluster(cluster)
    if not named:
        raise ValueError("--cluster is missing; name your cluster file, which is written to")
    path = own_file(named)
    machine = clusters.load(named)
    if run:
        if not card:
            raise ValueError("--card is missing; name the model that --run trained")
        if ranks is not None or device:
            raise ValueError("--ranks and --device are of a measurement; leave them out, or --run")
        fitted = fit_to(path, machine, card, run, quiet=as_json)
        if as_json:
            print_json({
                "efficiency": asdict(fitted.efficiency), "memory": asdict(fitted.memory),
                "cluster_file": str(path),
            })  # fmt: skip
        return
    if card:
        raise ValueError("--card is that of a run; add --run, or leave it out")
    require_device(device)
    _measure(path, machine, ranks, device, as_json=as_json)


def fit_to(
    path: Path, machine: Cluster, card: str, sources: Sequence[Path], *, quiet: bool = False
) -> Cluster:
    """Fit a cluster's shares and memory constants to measured steps and peaks, and return it.

    Writes them into its file, and prints the steps with their predictions before and after, unless
    `quiet`. The constants of memory stay where no peak was logged.
    """
    from longhaul.jobs.calibration import measurements, require_kind, write_shares
    from recipes.planner.byte_calibration import calibrated_bytes
    from recipes.planner.calibration import calibrated
    from recipes.shipped.named import card_named

    model = card_named(card)
    read = [measurements(source, model, machine) for source in sources]
    steps = [step for one in read for step in one.steps]
    peaks = [peak for one in read for peak in one.peaks]
    require_kind(steps, machine, path)
    found = calibrated(steps, machine)
    sizes = calibrated_bytes(peaks, machine) if peaks else None
    memory = sizes.constants if sizes else None
    write_shares(
        path, found.efficiency, f"to {len(steps)} measured steps of {model.name}, "
        + ", ".join(str(source) for source in sources), memory=memory,
    )  # fmt: skip
    if not quiet:
        _print_fit(path, machine, steps, found)
        if sizes:
            _print_bytes(path, machine, peaks, sizes)
        else:
            typer.echo(
                "bytes are not fitted: no step has device_memory_bytes in its log, or peak_gib"
            )
    return replace(machine, efficiency=found.efficiency, memory=memory or machine.memory)


def _print_fit(
    path: Path, machine: Cluster, steps: "Sequence[MeasuredStep]", found: "Calibrated"
) -> None:
    lines = [
        {
            "step": step.name,
            "length": length_shown(step.workload.seq_length),
            "measured s": f"{step.seconds:,.3g}",
            "before": f"{before / step.seconds:.2f}",
            "after": f"{after / step.seconds:.2f}",
            "left out": f"{left / step.seconds:.2f}" if left else "-",
        }
        for step, before, after, left in zip(
            steps, found.before, found.after, found.left_out or (0.0,) * len(steps), strict=True
        )
    ]
    _print("predicted over measured seconds; left out: by the other steps", lines)
    _written(path, machine.efficiency, found.efficiency, "efficiency")
    error = f"{found.efficiency.time_error:.0%}"
    if found.left_out:
        typer.echo(f"predicted times are within about {error}, by leaving one step out")
    else:
        typer.echo(f"predicted times are assumed to be within {error}: one step cannot be left out")


def _print_bytes(
    path: Path, machine: Cluster, peaks: "Sequence[MeasuredBytes]", found: "CalibratedBytes"
) -> None:
    lines = [
        {
            "step": peak.name,
            "length": length_shown(peak.workload.seq_length),
            "measured GiB": f"{peak.process / GiB:,.2f}",
            "before": f"{before / peak.process:.2f}",
            "after": f"{after / peak.process:.2f}",
            "left out": f"{left / peak.process:.2f}" if left else "-",
        }
        for peak, before, after, left in zip(
            peaks, found.before, found.after, found.left_out or (0.0,) * len(peaks), strict=True
        )
    ]
    _print("predicted over measured bytes of the fullest rank", lines)
    _written(path, machine.memory, found.constants, "memory")
    error = f"{found.constants.error:.0%}"
    if found.left_out:
        typer.echo(f"predicted bytes are within about {error}, by leaving one step out")
    else:
        typer.echo(f"predicted bytes are assumed to be within {error}: one step cannot be left out")


def _measure(
    path: Path, machine: Cluster, ranks: int | None, device: str, *, as_json: bool
) -> None:
    """Measure the rates of this node's ranks and write their shares."""
    from longhaul.jobs.calibration import write_shares
    from longhaul.probe.rates import rates

    with loading("torch"):
        import torch
    gpus = torch.cuda.device_count()
    device = device or "cuda"
    if device == "cuda" and not gpus:
        raise ValueError(
            "this machine has no GPU; measure on a node of the cluster, or add --device cpu if "
            f"{path} describes CPU ranks"
        )
    ranks = ranks or (min(gpus, machine.gpus_per_node) if device == "cuda" else 2)
    if device == "cuda" and ranks > gpus:
        raise ValueError(f"--ranks is {ranks} and this machine has {gpus} GPUs; take {gpus}")
    with busy(plain_console(stderr=True), f"measuring on {ranks} ranks"):
        found, kernel = rates(ranks, device)
    peaks = {
        "matmul": (found.product, machine.gpu.bf16_tflops * 1e12, "TFLOP/s"),
        "attention_forward": (found.attention_forward, machine.gpu.bf16_tflops * 1e12, "TFLOP/s"),
        "attention_backward": (
            found.attention_backward, machine.gpu.bf16_tflops * 1e12, "TFLOP/s",
        ),
        "memory": (found.memory, machine.gpu.memory_gbps * 1e9, "GB/s"),
        "nvlink": (found.exchange, machine.nvlink_gbps * 1e9, "GB/s"),
    }  # fmt: skip
    shares = {name: rate / peak for name, (rate, peak, _) in peaks.items() if rate}
    shares |= ON_CPU if device == "cpu" else {"layer_seconds": 0.0}
    named = cast(AttentionKernel, kernel)
    made = replace(
        machine.efficiency, **shares, attention_kernel=named, time_error=0.0,
        attention_small_heads=of_small_heads(machine.gpu.capability, named),
    )  # fmt: skip
    write_shares(path, made, f"rates of {ranks} ranks, attention by {kernel}")
    if as_json:
        print_json({
            "ranks": ranks, "device": device, "attention_kernel": kernel,
            "rates_per_second": asdict(found), "efficiency": asdict(made),
            "cluster_file": str(path),
        })  # fmt: skip
        return
    lines = [
        {
            "rate": name,
            "measured": f"{rate / (1e12 if unit == 'TFLOP/s' else 1e9):,.3g} {unit}",
            "share of the peak": f"{rate / peak:.3f}",
        }
        for name, (rate, peak, unit) in peaks.items()
        if rate
    ]
    _print(f"{ranks} ranks on {device}, attention by {kernel}", lines)
    _written(path, machine.efficiency, made, "efficiency")


def _print(title: str, lines: Sequence[dict[str, str]]) -> None:
    def table(without: Sequence[str]) -> Table:
        made = Table(title=title)
        for name in lines[0]:
            made.add_column(name, no_wrap=True, justify="left" if name == "step" else "right")
        for line in lines:
            made.add_row(*line.values())
        return made

    show(table)


def _written(
    path: Path,
    before: Efficiency | MemoryConstants,
    after: Efficiency | MemoryConstants,
    section: str,
) -> None:
    changed: dict[str, Any] = {
        name: value for name, value in asdict(after).items() if value != getattr(before, name)
    }
    said = ", ".join(
        f"{name} {value if isinstance(value, str) else f'{value:.3g}'}"
        for name, value in changed.items()
    )
    typer.echo(f"{path}: {section}: {said or 'as before'}")
