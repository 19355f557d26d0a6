# SPDX-License-Identifier: Apache-2.0
"""Bytes and rates that others have published, each with the step that the planner is asked about.

A point is `fitted` if a number of the planner was chosen by it. Rates of NeMo's pages are published
as TFLOPS; tokens are theirs by the model FLOPS that those pages count, without the causal half.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.models import CARDS
from recipes.notation.layout import layout_from
from recipes.planner.kernels import FLASH_3, FUSED, HUGGING_FACE, LIGER, Kernels
from recipes.planner.memory import memory
from recipes.planner.time import time
from recipes.planner.workload import Workload
from recipes.spec import cluster
from recipes.spec.efficiency import HOPPER, NEMO_2024, Efficiency
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.units import GiB, K, M

Family = Literal[
    "Megatron, H100", "Megatron, B200", "Megatron, experts", "DeepSpeed with Liger", "FSDP"
]

ALST = "ALST, arXiv 2506.13996"
ALST_RECIPES = "ArcticTraining, projects/sequence-parallelism"
HEAD_CHUNKED = "arXiv 2602.21196"
LONG_SEQUENCE = "NeMo, performance_long_sequence.md"
SUMMARY = "Megatron-Bridge, performance-summary.md"
ARCHIVE = "Megatron-Bridge, performance-summary-archive.md"
TRL = "TRL 1.13, its script for long sequences"
TORCHTITAN = "torchtitan, docs/performance.md"

TILED_LOSS = Tiling(loss=True, loss_tile=4096)
TILED = Tiling(loss=True, loss_tile=4096, mlp=True, mlp_tile=4096)
INPUTS = Offload(tensors="inputs", cap_gib=1e6)
WITH_FLASH_2 = Efficiency(attention_kernel="flash_attn_2")
"""ALST, whose paper names flash-attn 2.7.4."""
WITH_PYTORCH_S = Efficiency(attention_kernel="cuda_flash")
"""torchtitan, whose attention is PyTorch's."""
ALONE = ("weights", "gradients")
"""State on the host where one GPU holds all of it."""
WITH_ITS_OWN_MLP = replace(
    LIGER,
    mlp_kept=HUGGING_FACE.mlp_kept,
    gelu_kept=HUGGING_FACE.gelu_kept,
    mlp_gradients=HUGGING_FACE.mlp_gradients,
)
"""Liger's SwiGLU is left out where the MLP is tiled."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A published figure."""

    name: str
    family: Family
    source: str
    workload: Workload
    published: float
    unit: Literal["GiB", "tokens/s"]
    fitted: bool = False
    kernels: Kernels = field(default=FUSED)
    """For bytes."""
    machine: str = "dgx_h100"
    """For rates."""
    efficiency: Efficiency | None = None
    """For rates; None for the machine's."""

    @property
    def predicted(self) -> float:
        """The planner's figure in the same unit, a GPU."""
        if self.unit == "GiB":
            return memory(self.workload, self.kernels).total / GiB
        machine = cluster.load(self.machine)
        machine = replace(machine, efficiency=self.efficiency or machine.efficiency)
        return time(self.workload, machine).tokens_per_gpu_second

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published


def peer_step(card: str, seq: int, **layout: object) -> Workload:
    """Return a step of ALST's stack: ZeRO-3 with Adam on the host, checkpointing, one sequence."""
    given = Layout(
        recompute=Recompute(kind="full"), sharding="parameters", optimizer_offload=1.0,
        **layout,  # type: ignore[arg-type]
    )  # fmt: skip
    return _step(card, seq, seq * given.dp, given)


def _step(card: str, seq: int, batch: int, layout: Layout) -> Workload:
    return Workload(
        card=CARDS[card], seq_length=seq, tokens_per_batch=batch, layout=layout, gpus_per_node=8
    )


def _bytes(
    name: str, gib: float, kernels: Kernels, workload: Workload, *, fitted: bool = False,
    source: str = ALST_RECIPES,
) -> Point:  # fmt: skip
    return Point(
        name=name, family="DeepSpeed with Liger", source=source, workload=workload, published=gib,
        unit="GiB", fitted=fitted, kernels=kernels,
    )  # fmt: skip


def bytes_of_peers() -> Iterator[Point]:
    """Yield the bytes of a GPU that ALST's recipes state, by NVML, and TRL's."""
    one = replace(HUGGING_FACE, on_host=ALONE)
    on_h200 = replace(one, attention=FLASH_3)
    liger = replace(LIGER, on_host=ALONE, attention=FLASH_3)
    tiled = replace(WITH_ITS_OWN_MLP, on_host=ALONE, attention=FLASH_3)
    eight, inputs = "llama31_8b", {"tiling": TILED_LOSS, "offload": INPUTS}
    yield _bytes("8B on one H100, 32K", 71.91, one, peer_step(eight, 32_000))
    yield _bytes("8B on one H200, 65K", 137.36, on_h200, peer_step(eight, 65_000))
    yield _bytes(
        "8B on one H200, 300K, tiled loss", 134.96, liger,
        peer_step(eight, 300_000, tiling=TILED_LOSS),
    )  # fmt: skip
    yield _bytes(
        "8B on one H200, 650K, inputs away too", 126.81, liger, peer_step(eight, 650_000, **inputs)
    )
    everything = {"tiling": TILED, "offload": INPUTS}
    yield _bytes(
        "8B on one H200, 1.2M, tiled MLP too", 136.15, tiled,
        peer_step(eight, 1_200_000, **everything),
    )  # fmt: skip
    for name, card, ranks, seq, gib in (
        ("70B on 32 H100, 4M", "llama3_70b", 32, 4_000_000, 47.70),
        ("70B on 64 H100, 10M", "llama3_70b", 64, 10_000_000, 53.83),
        ("Qwen3-32B on 32 H100, 7M", "qwen3_32b", 32, 7_000_000, 71.55),
        ("Qwen3-32B on 64 H100, 15M", "qwen3_32b", 64, 15_000_000, 71.00),
    ):
        shared = ContextParallel.ulysses(ranks)
        asked = peer_step(card, seq, cp=shared, **everything)
        yield _bytes(name, gib, WITH_ITS_OWN_MLP, asked, fitted=True)
    layout = replace(layout_from("ring8 full zero3"), tiling=TILED_LOSS, offload=INPUTS)
    # Its script shards with FSDP, Adam and gradients on the GPU, and checkpoints without reentry,
    # which does not hold the output.
    by_fsdp = replace(HUGGING_FACE, on_host=(), holds_output=False)
    yield Point(
        name="Qwen3-8B on 8 H100, 1M, ring", family="FSDP", source=TRL, unit="GiB",
        workload=_step("qwen3_8b", M, M, layout), published=56.2e9 / GiB, kernels=by_fsdp,
    )  # fmt: skip


def lengths_of_peers() -> Iterator[Point]:
    """Yield lengths that ran on 8 H100, with the bytes of a GPU as the published figure.

    How much of a GPU was left is not known: ALST (arXiv 2506.13996), table 1, in the thousands of
    its recipes, and head-chunked attention (arXiv 2602.21196).
    """
    shared = {"cp": ContextParallel.ulysses(8)}
    gib = cluster.load("dgx_h100").gpu.memory_gib
    inputs, everything = ({"tiling": one, "offload": INPUTS} for one in (TILED_LOSS, TILED))
    steps = (
        ("baseline, 32K", HUGGING_FACE, peer_step("llama31_8b", 32_000, dp=8)),
        ("tiled loss, 160K", LIGER, peer_step("llama31_8b", 160_000, dp=8, tiling=TILED_LOSS)),
        ("Ulysses, 1.1M", LIGER, peer_step("llama31_8b", 1_100_000, tiling=TILED_LOSS, **shared)),
        ("inputs away, 2.4M", LIGER, peer_step("llama31_8b", 2_400_000, **inputs, **shared)),
        (
            "tiled MLP too, 3.8M", WITH_ITS_OWN_MLP,
            peer_step("llama31_8b", 3_800_000, **everything, **shared),
        ),
        (
            "head-chunked, 5,120K", WITH_ITS_OWN_MLP,
            peer_step("llama31_8b", 5 * M, cp=ContextParallel.head_chunked(8), **everything),
        ),
    )  # fmt: skip
    for name, kernels, workload in steps:
        source = HEAD_CHUNKED if "head-chunked" in name else ALST
        yield _bytes(name, gib, kernels, workload, source=source)


def rates() -> Iterator[Point]:
    """Yield tokens a second of a GPU."""
    yield from _megatron_on_h100()
    yield from _megatron_on_b200()
    yield from _with_experts()
    for cp, seq, rate in ((1, 32, 3_890), (2, 64, 2_540), (4, 128, 1_071), (8, 256, 548)):
        words = f"{f'ring{cp} ' if cp > 1 else ''}{f'dp{8 // cp} ' if cp < 8 else ''}full zero3"
        yield _rate(
            f"Llama-3.1-8B, FP8, {seq}K, CP {cp}", "FSDP", TORCHTITAN, "llama31_8b", seq * K,
            8 // cp, f"{words} fp8:tensorwise", rate, efficiency=WITH_PYTORCH_S,
        )  # fmt: skip
    yield _rate(
        "Qwen3-8B, 1M, ring 8, inputs away", "FSDP", TRL, "qwen3_8b", M, 1,
        "ring8 full tile-loss offload-inputs:200 zero3", M / 8 / 380,
    )  # fmt: skip
    yield _rate(
        "Llama-3.1-8B on one H100, 500K", "DeepSpeed with Liger", ALST, "llama31_8b", 500_000, 1,
        "full tile-loss tile-mlp offload-inputs:200 adam-on-host:1 zero3", 495,
        efficiency=WITH_FLASH_2,
    )  # fmt: skip


def _megatron_on_h100() -> Iterator[Point]:
    for tp, cp, dp, seq, rate in (
        (2, 1, 8, 16, 10_090), (4, 2, 8, 64, 4_022), (4, 4, 8, 128, 2_258), (4, 8, 8, 256, 1_215),
        (8, 32, 4, 1024, 317),
    ):  # fmt: skip
        ring = f" ring{cp}" if cp > 1 else ""
        yield _rate(
            f"Llama-2-7B, FP8, {seq}K, TP {tp}, CP {cp}, DP {dp}", "Megatron, H100", LONG_SEQUENCE,
            "llama2_7b", seq * K, 4 * M // (seq * K), f"tp{tp}{ring} dp{dp} fp8:delayed", rate,
            fitted=True, efficiency=NEMO_2024,
        )  # fmt: skip
    yield _rate(
        "Llama-3-8B, FP8, 8K, FSDP on 8", "Megatron, H100", SUMMARY, "llama3_8b", 8 * K, 128,
        "dp8 zero3 fp8:tensorwise", 14_451, fitted=True, efficiency=HOPPER,
    )  # fmt: skip
    for name, card, seq, sequences, words, rate in (
        ("Llama-3-70B, FP8, 8K, TP 4, PP 8, DP 2", "llama3_70b", 8 * K, 256,
         "tp4 pp8 dp2 fp8:tensorwise", 1_664),
        ("Llama-3.1-405B, FP8, 8K, TP 8, PP 8, CP 2, DP 8", "llama31_405b", 8 * K, 1536,
         "tp8 ring2 pp8 dp8 fp8:tensorwise", 328),
    ):  # fmt: skip
        yield _rate(name, "Megatron, H100", SUMMARY, card, seq, sequences, words, rate)


def _megatron_on_b200() -> Iterator[Point]:
    for seq, tp, cp, dp, rate in (
        (8, 1, 1, 2, 28_854), (16, 1, 1, 4, 24_252), (32, 1, 2, 4, 16_817), (64, 1, 4, 4, 10_803),
        (128, 2, 4, 4, 6_322), (256, 4, 4, 4, 3_477), (512, 4, 8, 4, 1_862), (1024, 4, 16, 4, 949),
    ):  # fmt: skip
        sizes = "".join(f"{name}{size} " for name, size in (("tp", tp), ("ring", cp)) if size > 1)
        yield _rate(
            f"Llama-3-8B, FP8, {seq}K, TP {tp}, CP {cp}, DP {dp}", "Megatron, B200", LONG_SEQUENCE,
            "llama3_8b", seq * K, 4 * M // (seq * K), f"{sizes}dp{dp} fp8:tensorwise", rate,
            machine="dgx_b200",
        )  # fmt: skip


def _with_experts() -> Iterator[Point]:
    """Yield releases of one model: in FP8, from 26.02.01 on with DeepEP; predicted in bf16."""
    for release, machine, sequences, words, rate in (
        ("25.11", "dgx_h100", 512, "pp2 dp8 ep8 mb2", 5_275),
        ("26.02", "dgx_h100", 1024, "pp2 dp8 ep8", 5_113),
        ("26.02.01", "dgx_h100", 1024, "pp2 dp8 ep8", 9_058),
        ("26.04.01", "dgx_h100", 1024, "dp16 ep16", 8_960),
        ("25.11", "dgx_b200", 512, "dp8 ep8", 9_299),
    ):
        yield _rate(
            f"Qwen3-30B-A3B, FP8, 4K, {words}, {machine}, release {release}", "Megatron, experts",
            ARCHIVE, "qwen3_30b_a3b", 4 * K, sequences, words, rate, machine=machine,
        )  # fmt: skip


def _rate(
    name: str, family: Family, source: str, card: str, seq: int, sequences: int, words: str,
    tokens_per_second: float, *, machine: str = "dgx_h100", fitted: bool = False,
    efficiency: Efficiency | None = None,
) -> Point:  # fmt: skip
    return Point(
        name=name, family=family, source=source, published=tokens_per_second, unit="tokens/s",
        workload=_step(card, seq, max(1, sequences) * seq, layout_from(words)), machine=machine,
        fitted=fitted, efficiency=efficiency,
    )  # fmt: skip
