# SPDX-License-Identifier: Apache-2.0
"""Constants of the time model: the share of its peak that each kind of work reaches.

They are fractions of the peaks in the cluster file, fitted to published step times (tests check
this), not measured here. State your own measurements, or another attention kernel, in your cluster
file:

    hardware:
      efficiency: {attention_forward: 0.65}
      efficiency: {attention_kernel: flash_attn_2}

Shares of attention, forward and backward, by kernel and GPU. cuDNN's on Hopper are fitted to steps;
the others follow from it by the ratio of published rates of the kernels alone, head size 128:

    Hopper      FlashAttention-3, 2 and cuDNN at 16K tokens on an H100: 648, 370 and 595 TFLOP/s
                forward, 561, 322 and 516 backward (arXiv 2407.08608, figures 5 and 6)
    Blackwell   FlashAttention-4 on a B200 takes 1/1.95 of FlashAttention-3's time on an H200,
                forward and backward at 32K (ml-engineering, insights/when-to-upgrade-gpus), of a
                peak 2.28 times as high; cuDNN has 0.95 of its rate (flash-attention, pull request
                2605: 1,115 and 1,176 TFLOP/s, head size 64, causal, 16K). FlashAttention-2 has 345
                TFLOP/s forward (tritonbench, pull request 171), and 0.88 of its forward rate
                backward (flash-attention, issue 1589)

PyTorch's own kernel is a copy of FlashAttention-2, and Transformer Engine calls cuDNN. On Ampere
and Ada all count as cuDNN on Hopper.

Heads of 64 reach less on Hopper: five steps of Llama 3.2 1B on an H100 take the predicted time, to
9%, if its attention has 0.71 of those shares (benchmarks/results/gpu_h100_2026-11-26.md). Between
64 and 128 the share is interpolated.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

AttentionKernel = Literal[
    "", "cpu_flash", "flash_attn_3", "cudnn", "flash_attn_2", "transformer_engine", "cuda_flash"
]
"""Names of `custom_modules.attention.registry`; empty: what training takes on the GPU."""
DEFAULT_KERNEL: AttentionKernel = "cudnn"
"""What training takes on GPUs, unless FlashAttention-3 is installed, which no extra brings."""
NEWEST = 9
"""Major compute capability whose shares count for those that are not listed."""
ATTENTION: dict[int, dict[AttentionKernel, tuple[float, float]]] = {
    8: {
        "cudnn": (0.60, 0.50),
        "flash_attn_2": (0.60, 0.50),
        "transformer_engine": (0.60, 0.50),
        "cuda_flash": (0.60, 0.50),
    },
    9: {
        "cudnn": (0.60, 0.50),
        "flash_attn_3": (0.65, 0.54),
        "flash_attn_2": (0.37, 0.31),
        "transformer_engine": (0.60, 0.50),
        "cuda_flash": (0.37, 0.31),
    },
    10: {
        "cudnn": (0.53, 0.44),
        "flash_attn_2": (0.15, 0.13),
        "transformer_engine": (0.53, 0.44),
        "cuda_flash": (0.15, 0.13),
    },
}
"""Shares of the bf16 peak, forward and backward, by major compute capability and kernel."""
SMALL, LARGE = 64, 128
"""Head sizes: one that some kernels are slower with, and the one that `ATTENTION` is of."""
OF_SMALL_HEADS: dict[int, dict[AttentionKernel, float]] = {
    9: {"cudnn": 0.71, "transformer_engine": 0.71},
}
"""Share of those that heads of 64 reach, where it is known to be less than 1."""
MAY_BE_ZERO = (
    "layer_seconds", "time_error", "attention_forward", "attention_backward",
    "attention_small_heads",
)  # fmt: skip


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
    attention_kernel: AttentionKernel = ""
    """The kernel whose shares the next two are."""
    attention_forward: float = 0.0
    """Of the bf16 peak; 0: the kernel's on the GPU of the cluster."""
    attention_backward: float = 0.0
    attention_small_heads: float = 0.0
    """Share of those two that heads of 64 reach; 0: the kernel's, or 1 if those two are stated."""
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
            if isinstance(value, str):
                continue
            least = value >= 0 if field.name in MAY_BE_ZERO else value > 0
            if not (least and value < math.inf):
                kind = "at least 0" if field.name in MAY_BE_ZERO else "positive"
                raise ValueError(f"{field.name} is {value}; it must be {kind}, and finite")

    def attention_of(self, head_dim: int) -> tuple[float, float]:
        """Return attention's shares of the bf16 peak, forward and backward, for heads of a size."""
        small = self.attention_small_heads or 1.0
        missing = (LARGE - min(max(head_dim, SMALL), LARGE)) / (LARGE - SMALL)
        share = 1 - (1 - small) * missing
        return self.attention_forward * share, self.attention_backward * share

    def on(self, capability: tuple[int, int]) -> "Efficiency":
        """Return these shares with those of attention on a GPU of a compute capability.

        Raises ValueError for a kernel that does not run on it.
        """
        if self.attention_kernel == "cpu_flash" and not self.attention_forward:
            raise ValueError(
                "attention_kernel is cpu_flash, of CPU ranks, and attention_forward is not stated; "
                "measure it: longhaul calibrate --device cpu"
            )
        of_gpu = ATTENTION.get(capability[0], ATTENTION[NEWEST])
        name = self.attention_kernel or DEFAULT_KERNEL
        if name not in of_gpu and name != "cpu_flash":
            raise ValueError(
                f"attention_kernel is {name}, which does not run on compute capability "
                f"{capability[0]}.{capability[1]}; choose from {', '.join(of_gpu)}"
            )
        forward, backward = of_gpu.get(name, (0.0, 0.0))
        stated = self.attention_forward or self.attention_backward
        small = 1.0 if stated else of_small_heads(capability, name)
        return replace(
            self,
            attention_kernel=name,
            attention_small_heads=self.attention_small_heads or small,
            attention_forward=self.attention_forward or forward,
            attention_backward=self.attention_backward or backward or self.attention_forward,
        )


def of_small_heads(capability: tuple[int, int], kernel: AttentionKernel) -> float:
    """Return the share of a kernel's rates that heads of 64 reach on a GPU; 1 if not known."""
    return OF_SMALL_HEADS.get(capability[0], {}).get(kernel, 1.0)


HOPPER = Efficiency().on((9, 0))
"""H100 and H200 with kernels of 2025."""
NEMO_2024 = replace(
    HOPPER, attention_forward=0.42, attention_backward=0.36, attention_small_heads=1.0
)
"""NeMo 24.03 on H100: Transformer Engine's attention of early 2024."""
