# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of a recipe on one device, with what the planner predicts beside them."""

import gc
import logging
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state

from benchmarks.gpu.cases import PLANNED
from benchmarks.gpu.sizes import SHORTER, Sizes, ladder_of, machine
from benchmarks.stacks import only_process
from custom_modules.profiling.memory_by_category import MemoryByCategory
from custom_modules.profiling.step_memory import whole_step
from recipes.notation.layout import layout_from, words_of
from recipes.planner.kernels import FUSED, PLAIN
from recipes.planner.plan import Plan, plan
from recipes.planner.search.alternatives import best
from recipes.planner.workload import Workload
from recipes.pretrain import pretrain
from recipes.resolved.single_step import training
from recipes.spec.cluster import Cluster
from recipes.spec.layout import Fp8, Layout
from recipes.spec.model_card import ModelCard

FP8 = Fp8(recipe="tensorwise")


def step(sizes: Sizes, *, card: str, length: int, layout: str, precision: str) -> dict[str, Any]:
    """Return a step's seconds, rate and bytes, with the planner's; raise ValueError if none fits.

    `layout` is words, or the planner's choice; a step is that of the recipe, its optimizer's
    included, on random tokens.
    """
    logging.getLogger("nemo_logger").setLevel(logging.WARNING)
    chosen = _plan(sizes, sizes.cards[card], length, layout, precision)
    long = length in sizes.longest_steps
    shorter = length // SHORTER
    device = torch.device(sizes.device)
    if long:
        _measured(chosen, shorter, device, steps=1)
    seconds, peak, finite = _measured(chosen, length, device, steps=1 if long else 2)
    model = chosen.workload.card
    flops = model.flops_per_token(length) * length
    return {
        "layout": words_of(chosen.workload.layout),
        "seconds": seconds,
        "warmed_by": shorter if long else length,
        "tokens_per_second": length / seconds,
        "mfu": flops / seconds / (chosen.cluster.gpu.bf16_tflops * 1e12),
        "peak_bytes": peak,
        "finite": finite,
        "predicted": {
            "seconds": chosen.time.step,
            # The reserve is what CUDA and NCCL take beside the allocator.
            "peak_bytes": chosen.memory.total - chosen.memory.categories["reserve"],
            "host_bytes": chosen.memory.host,
        },
        "host_gib": chosen.cluster.host_memory_gib,
    }


def _plan(sizes: Sizes, card: ModelCard, length: int, words: str, precision: str) -> Plan:
    cluster, fp8 = machine(sizes.device), FP8 if precision == "fp8" else Fp8()
    stage = ladder_of(length).stages[0]
    if words == PLANNED:
        layout = best(card, stage, cluster, gpus=1, fp8=fp8).workload.layout
    else:
        layout = replace(layout_from(words), fp8=fp8)
    if sizes.device == "cpu":
        layout = replace(layout, device="cpu", precision="fp32")
    return _planned(card, length, layout, cluster)


def _planned(card: ModelCard, length: int, layout: Layout, cluster: Cluster) -> Plan:
    workload = Workload(
        card=card, seq_length=length, tokens_per_batch=length, layout=layout, gpus_per_node=1
    )  # fmt: skip
    return plan(workload, cluster, kernels=PLAIN if layout.device == "cpu" else FUSED)


def _measured(
    chosen: Plan, length: int, device: torch.device, *, steps: int
) -> tuple[float, int, bool]:
    """Return seconds and peak bytes of the last step, and whether weights are finite after it."""
    recipe = pretrain(chosen.workload.card, ladder_of(length), length, chosen.workload.layout)
    on_cuda = device.type == "cuda"
    with only_process(device), ExitStack() as around:
        around.callback(_release, on_cuda)
        memory = None if on_cuda else around.enter_context(MemoryByCategory(device))
        made = training(recipe, rank=0, local_rank=0)
        made.optimizer.step()  # without gradients: it makes Adam's moments, which every step has
        for _ in range(steps):
            if memory is None:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            else:
                memory.restart()
            start = time.perf_counter()
            whole_step(made)
            if on_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if memory is None else memory.peak_bytes
        sums = [float(p.detach().float().sum()) for c in made.model for p in c.parameters()]
        del made
    return seconds, peak, all(map(math.isfinite, sums))


def _release(on_cuda: bool) -> None:
    parallel_state.destroy_model_parallel()
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
