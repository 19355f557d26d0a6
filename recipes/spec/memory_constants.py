# SPDX-License-Identifier: Apache-2.0
"""Constants of the memory model: bytes that no formula gives.

`longhaul calibrate --run` fits them to the bytes that a run logged, and writes them into the
cluster file:

    hardware:
      memory: {reserve_gib: 3.2, unknown_inputs: 0.8, error: 0.03}
"""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConstants:
    """Bytes of a GPU in addition to those of the formulas."""

    reserve_gib: float = 4.0
    """CUDA's context, NCCL's buffers, workspaces, and fragmentation of the allocator. The default
    is a guess, not measured yet."""
    unknown_inputs: float = 0.0
    """Buffers of kernels that the formulas do not know, in inputs of a layer; negative if the
    formulas count too much."""
    error: float = 0.0
    """Relative error of predicted bytes, by calibration; 0 if these were not calibrated."""

    def __post_init__(self) -> None:
        """Raise ValueError for a negative reserve or error, and for infinite values."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = -math.inf if field.name == "unknown_inputs" else 0
            if not (math.isfinite(value) and value >= least):
                kind = "" if field.name == "unknown_inputs" else "at least 0, and "
                raise ValueError(f"memory {field.name} is {value}; it must be {kind}finite")
