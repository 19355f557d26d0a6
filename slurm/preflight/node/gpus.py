# SPDX-License-Identifier: Apache-2.0
"""Checks of a node's GPUs by nvidia-smi: number, memory, driver and clocks.

Bits of the throttle reasons are NVML's (nvmlClocksEventReasons in its reference guide).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.version import Version

from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.machine import Machine
from slurm.preflight.requirements import CONNECTIONS_FREE_FROM, Expected

FIELDS = (
    "index", "uuid", "name", "memory.total", "driver_version", "clocks.max.sm",
    "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Field names of drivers since 535, and before."""
SLOWED_BY = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
CHECK_GPUS = "run nvidia-smi there; drain the node if a GPU has fallen off (Xid errors in dmesg)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi lists it; None for N/A."""

    index: int
    uuid: str
    name: str
    memory_gib: float | None
    driver: str
    sm_clock_mhz: int | None
    uncorrected: int | None
    """Memory errors since the driver was loaded."""
    reasons: int
    """Throttle reasons, as NVML's bits."""


def gpus(machine: Machine) -> list[Gpu] | None:
    """Return the GPUs of this node; None if nvidia-smi does not answer."""
    for reasons in REASONS:
        query = ",".join((*FIELDS, reasons))
        said = machine.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
        if said is not None:
            return parsed(said)
    return None


def parsed(said: str) -> list[Gpu]:
    """Return the GPUs of a query of FIELDS and one of REASONS, without header and units."""
    found = []
    for line in said.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(FIELDS) + 1 or not values[0].isdigit():
            continue  # nvidia-smi mixes warnings with its rows
        memory = _number(values[3])
        found.append(
            Gpu(
                index=int(values[0]),
                uuid=values[1],
                name=values[2],
                memory_gib=None if memory is None else memory / 1024,
                driver=values[4],
                sm_clock_mhz=_number(values[5]),
                uncorrected=_number(values[6]),
                reasons=int(values[7], 16) if values[7].startswith("0x") else 0,
            )
        )
    return found


def _number(said: str) -> int | None:
    return int(said) if said.isdigit() else None


def gpu_checks(expected: Expected, found: list[Gpu] | None) -> Iterator[PreflightCheck]:
    """Yield the checks of a node's GPUs; none if no GPU is expected or found."""
    if found is None:
        if expected.gpus_per_node:
            yield PreflightCheck.failure(
                Group.GPUS, "GPUs", f"nvidia-smi does not answer; {expected.gpus_per_node} needed",
                "install the driver, or start the container with GPUs (pyxis does, on GPU nodes)",
            )  # fmt: skip
        return
    names = ", ".join(dict.fromkeys(gpu.name for gpu in found)) or "none"
    said = f"{len(found)} ({names})"
    if len(found) < expected.gpus_per_node:
        yield PreflightCheck.failure(
            Group.GPUS, "GPUs", f"{said}; {expected.gpus_per_node} needed", CHECK_GPUS
        )
    else:
        yield PreflightCheck.ok(Group.GPUS, "GPUs", said)
    if found:
        yield from _memory(expected, found)
        yield from _driver(expected, found)
        yield from _clocks(expected, found)


def _memory(expected: Expected, found: list[Gpu]) -> Iterator[PreflightCheck]:
    least = min((gpu.memory_gib for gpu in found if gpu.memory_gib is not None), default=None)
    if expected.gpu_memory_gib and least is not None:
        said = f"{least:.1f} GiB on the smallest"
        if least < expected.gpu_memory_gib:
            yield PreflightCheck.failure(
                Group.GPUS, "GPU memory", f"{said}; {expected.gpu_memory_gib:.1f} GiB needed",
                "name the cluster file of these GPUs, or switch MIG off",
            )  # fmt: skip
        else:
            yield PreflightCheck.ok(Group.GPUS, "GPU memory", said)
    broken = [f"GPU {gpu.index}: {gpu.uncorrected}" for gpu in found if gpu.uncorrected]
    if broken:
        yield PreflightCheck.failure(
            Group.GPUS, "GPU memory errors", f"uncorrected: {', '.join(broken)}",
            "drain the node and reset those GPUs",
        )  # fmt: skip


def _driver(expected: Expected, found: list[Gpu]) -> Iterator[PreflightCheck]:
    drivers = sorted({gpu.driver for gpu in found})
    said = ", ".join(drivers)
    if expected.least_driver and Version(drivers[0]) < Version(expected.least_driver):
        yield PreflightCheck.failure(
            Group.GPUS, "driver", f"{said}; at least {expected.least_driver} needed",
            "update the driver of the node, or use a container with an older CUDA",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(Group.GPUS, "driver", said)


def _clocks(expected: Expected, found: list[Gpu]) -> Iterator[PreflightCheck]:
    slowed = [
        f"GPU {gpu.index}: {', '.join(why)}"
        for gpu in found
        if (why := [word for bit, word in SLOWED_BY.items() if gpu.reasons & bit])
    ]
    clocks = [gpu.sm_clock_mhz for gpu in found if gpu.sm_clock_mhz is not None]
    said = f"up to {min(clocks)} MHz on the slowest" if clocks else "not reported"
    if slowed:
        yield PreflightCheck.failure(
            Group.GPUS, "clocks", f"held back on {'; '.join(slowed)}",
            "look at cooling and power of the node, and drain it",
        )  # fmt: skip
    elif clocks and min(clocks) < expected.least_sm_clock_mhz:
        yield PreflightCheck.failure(
            Group.GPUS, "clocks", f"{said}; {expected.least_sm_clock_mhz} MHz needed",
            "name the cluster file of these boards, or lift a limit: nvidia-smi --reset-gpu-clocks",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(Group.GPUS, "clocks", said)


def visible(said: str) -> list[str]:
    """Return the devices of CUDA_VISIBLE_DEVICES: numbers, or (MIG-)GPU-... names."""
    return [word for word in (part.strip() for part in said.split(",")) if word]


def visible_checks(
    expected: Expected, machine: Machine, found: Sequence[Gpu] | None
) -> Iterator[PreflightCheck]:
    """Yield the check of CUDA_VISIBLE_DEVICES if it is set and GPUs are expected or found."""
    said = machine.environ.get(VISIBLE)
    if said is None or (found is None and not expected.gpus_per_node):
        return
    wrong = visible_fault(visible(said), expected, found)
    if wrong:
        yield PreflightCheck.failure(
            Group.GPUS, "visible devices", f"{VISIBLE}={said}: {wrong}",
            "unset it, and leave binding to the launcher: every rank needs to see the GPUs of all "
            "ranks of its node (srun without --gpus-per-task and --gpu-bind)",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(Group.GPUS, "visible devices", said)


def visible_fault(
    devices: list[str], expected: Expected, found: Sequence[Gpu] | None
) -> str | None:
    """Return the fault of a list of visible devices; None if it has none."""
    twice = sorted({device for device in devices if devices.count(device) > 1})
    if twice:
        return f"{', '.join(twice)} is listed twice"
    for device in devices:
        if device.isdigit():
            if found is not None and int(device) >= len(found):
                return f"there is no GPU {device}, the last is {len(found) - 1}"
        elif not device.startswith(("GPU-", "MIG-")):
            return f"{device!r} is not a device, and hides all after it"
        elif device.startswith("GPU-") and found is not None and not _is_one(device, found):
            return f"{device} is not a prefix of exactly one UUID"
    needed = expected.ranks_per_node or expected.gpus_per_node
    if len(devices) < needed:
        return f"{len(devices)} devices for {needed} ranks"
    return None


def _is_one(beginning: str, found: Sequence[Gpu]) -> bool:
    """Return whether exactly one GPU's UUID begins so, as CUDA requires."""
    return sum(gpu.uuid.startswith(beginning) for gpu in found) == 1


def connection_checks(expected: Expected, machine: Machine) -> Iterator[PreflightCheck]:
    """Yield the check of CUDA_DEVICE_MAX_CONNECTIONS by Megatron-LM's rule.

    With TP or CP, GPUs before Blackwell need 1, so that a collective is launched before the matrix
    product that it overlaps with; Megatron FSDP needs a value other than 1.
    """
    if expected.capability is None or (expected.tp == 1 and expected.cp == 1):
        return
    said = machine.environ.get(CONNECTIONS)
    shown = f"{CONNECTIONS} is {said or 'not set'}"
    old = expected.capability < CONNECTIONS_FREE_FROM
    if expected.megatron_fsdp and said == "1":
        yield PreflightCheck.warning(
            Group.GPUS, "connections", f"{shown}, with Megatron FSDP", f"unset {CONNECTIONS}"
        )
    elif old and not expected.megatron_fsdp and said != "1":
        yield PreflightCheck.failure(
            Group.GPUS, "connections", f"{shown}, with TP {expected.tp}, CP {expected.cp}",
            f"set {CONNECTIONS}=1 in the environment of the cluster file",
        )  # fmt: skip
    elif not old and said == "1":
        yield PreflightCheck.warning(
            Group.GPUS, "connections", f"{shown}, which no Blackwell GPU needs",
            f"set {CONNECTIONS}=32, as NeMo does for them",
        )  # fmt: skip
    else:
        yield PreflightCheck.ok(Group.GPUS, "connections", shown)
