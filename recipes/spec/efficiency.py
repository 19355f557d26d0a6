# SPDX-License-Identifier: Apache-2.0
"""Constants of the time model: the share of its peak that each kind of work reaches.

They are fractions of the peaks in the cluster file, fitted to published step times (tests check
this), not measured here. State your own measurements in your cluster file:

    hardware:
      efficiency: {attention_forward: 0.65}
"""

import math
from dataclasses import dataclass, fields

MAY_BE_ZERO = ("layer_seconds", "time_error")


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of peak rates."""

    matmul: float = 0.72
    """bf16 products of large shapes."""
    matmul_fp8: float = 0.50
    """Of the FP8 peak, including casts and scaling."""
    experts: float = 0.50
    """bf16 products of wide experts, including the permutation of tokens."""
    expert_width: float = 2048
    """Inner width of an expert on one rank at which its products reach half of that."""
    attention_forward: float = 0.60
    """FlashAttention-3 and cuDNN reach 0.62 to 0.75 alone at long lengths (arXiv 2407.08608)."""
    attention_backward: float = 0.50
    ring_block: float = 1024
    """Tokens of a ring step at which its kernels reach half of those rates."""
    memory: float = 0.75
    """Of device memory bandwidth: norms, rotation, activations, residuals."""
    nvlink: float = 0.70
    network: float = 0.80
    staged: float = 0.85
    """Of those, all-to-alls of a few heads at a time: more and smaller messages."""
    compute_overlapped: float = 0.80
    """Share of a micro-batch's compute that can hide gradient and parameter communication."""
    host_adam_gbps: float = 20.0
    """GB/s of optimizer state that Adam processes on the host, per GPU."""
    layer_seconds: float = 0.0
    """Seconds of a layer's forward and backward in a micro-batch, whatever its length, that the
    host takes and nothing hides; GPUs run behind the host, CPU ranks wait for it."""
    time_error: float = 0.0
    """Relative error of predicted times, by calibration; 0 if these shares were not calibrated."""

    def __post_init__(self) -> None:
        """Raise ValueError for a share that is not a positive number."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = value >= 0 if field.name in MAY_BE_ZERO else value > 0
            if not (least and value < math.inf):
                kind = "at least 0" if field.name in MAY_BE_ZERO else "positive"
                raise ValueError(f"{field.name} is {value}; it must be {kind}, and finite")


HOPPER = Efficiency()
"""H100 and H200 with kernels of 2025."""
NEMO_2024 = Efficiency(attention_forward=0.42, attention_backward=0.36)
"""NeMo 24.03 on H100: Transformer Engine's attention of early 2024."""
