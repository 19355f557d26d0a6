# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi prints, by the formats that its users have published, and a script that does."""

import stat
from pathlib import Path

HERE = Path(__file__).parents[1]
DGX_H100 = (HERE / "dgx_h100_topo.txt").read_text()
"""Eight GPUs by NV18, each with a NIC behind its own PCIe switch."""
BRIDGED = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\tSYS\tPHB\t0-31\t0
GPU1\tNV4\t X \tSYS\tSYS\tPHB\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tNV4\t X \tSYS\t32-63\t1
NIC0\tPHB\tPHB\tSYS\tSYS\t X

Legend:

  X    = Self

NIC Legend:

  NIC0: mlx5_0
"""
"""Four GPUs in PCIe slots, two and two under a bridge of NVLink."""


def listed(
    gpus: int = 8, *, driver: str = "535.161.08", reasons: str = "0x0000000000000001"
) -> str:
    """Return the rows of the query that preflight makes, of H100s."""
    return "".join(
        f"{index}, GPU-{index}a9e1f2c-5f2b-7d11-9c0e-3b1d5e8f7a6{index}, NVIDIA H100 80GB HBM3, "
        f"81559, {driver}, 1980, 0, {reasons}\n"
        for index in range(gpus)
    )


def nvidia_smi(folder: Path, *, rows: str, topology: str = DGX_H100) -> Path:
    """Write an nvidia-smi that prints these; return its folder, to be first on PATH."""
    folder.mkdir(exist_ok=True)
    (folder / "rows").write_text(rows)
    (folder / "topology").write_text(topology)
    script = folder / "nvidia-smi"
    script.write_text(
        f'#!/bin/sh\ncase "$1" in topo) cat "{folder}/topology" ;; *) cat "{folder}/rows" ;; esac\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder
