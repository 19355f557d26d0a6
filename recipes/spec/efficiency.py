# SPDX-License-Identifier: Apache-2.0
"""What share of a peak a kind of work reaches: the constants of the time model, by name.

Shares of the peaks in the cluster file. They are set so that published step times come out (tests
hold them to it), not measured here: put your own measurement into a cluster file of yours,

    hardware:
      efficiency: {attention_forward: 0.65}
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of peak rates."""

    matmul: float = 0.72
    """bf16 products of large shapes."""
    matmul_fp8: float = 0.50
    """Of the FP8 peak, casts and scales included."""
    experts: float = 0.50
    """Of bf16 products where tokens are permuted to experts that are wide."""
    expert_width: float = 2048
    """Inner width of an expert on a rank at which its products reach half of that."""
    attention_forward: float = 0.60
    """FlashAttention-3 and cuDNN reach 0.62 to 0.75 alone at long lengths (arXiv 2407.08608)."""
    attention_backward: float = 0.50
    ring_block: float = 1024
    """Tokens of a ring's step at which its kernels reach half of those rates."""
    memory: float = 0.75
    """Of device memory's bandwidth, for norms, rotation, activations, residuals."""
    nvlink: float = 0.70
    network: float = 0.80
    staged: float = 0.85
    """Of those, all-to-alls that carry a few heads at a time: smaller messages, more of them."""
    compute_overlapped: float = 0.80
    """Of a micro-batch's compute that gradients and parameters travel under."""
    host_adam_gbps: float = 20.0
    """GB/s of state that Adam on the host goes through, a GPU's share of the host."""


HOPPER = Efficiency()
"""Kernels of 2025 on H100 and H200."""
NEMO_2024 = Efficiency(attention_forward=0.42, attention_backward=0.36)
"""NeMo 24.03 on H100: Transformer Engine's attention of early 2024."""
