# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of a recipe on one device, with what the planner predicts beside them."""

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import nemo_run
import torch
from megatron.core import parallel_state
from torch import Tensor

from benchmarks.gpu.cases import PLANNED
from benchmarks.gpu.sizes import Sizes, ladder_of, machine
from benchmarks.stacks import only_process
from custom_modules.attention import registry
from custom_modules.attention.documents import Documents
from custom_modules.dtypes import accumulation_dtype
from custom_modules.patching import patched
from custom_modules.profiling.memory_by_category import MemoryByCategory
from custom_modules.profiling.step_memory import whole_step
from recipes.notation.layout import layout_from, words_of
from recipes.planner.kernels import FUSED, PLAIN
from recipes.planner.plan import Plan, plan
from recipes.planner.search.alternatives import best
from recipes.planner.workload import Workload
from recipes.pretrain import pretrain
from recipes.resolved import single_step
from recipes.spec.cluster import Cluster
from recipes.spec.layout import Fp8, Fp8Recipe, Layout
from recipes.spec.model_card import ModelCard

STEPS = 3
WORDS = 512
"""Different tokens of the data; a model learns them, and which follows which, in 200 steps."""
SHORTER = 8
"""The longest step is run once, after one of an eighth of its length."""


def step(
    sizes: Sizes, *, card: str, length: int, layout: str, precision: str, attention: str,
    steps: int = STEPS,
) -> dict[str, Any]:  # fmt: skip
    """Return steps' seconds, rate, bytes and losses, with what the planner predicts.

    `layout` is words, or the planner's choice; `precision` is bf16 or a recipe of FP8. The step is
    the recipe's, its optimizer's included, on the same tokens in every precision. With `attention`
    left out its kernels return at once, for the bytes of a step that would take minutes; their
    workspaces are missing.
    Raises ValueError if no layout fits.
    """
    logging.getLogger("nemo_logger").setLevel(logging.WARNING)
    device = torch.device(sizes.device)
    chosen = _plan(sizes, sizes.card_named(card), length, layout, precision)
    long = length >= sizes.longest_step
    with without_products() if attention != "computed" else nullcontext():
        if long:
            _measured(chosen, length // SHORTER, device, steps=1)
        found = _measured(chosen, length, device, steps=1 if long else steps)
    flops = chosen.workload.card.flops_per_token(length) * length
    seconds = statistics.median(found["rounds"][1:] or found["rounds"])  # the first compiles
    return {
        "layout": words_of(chosen.workload.layout),
        "seconds": seconds,
        "tokens_per_second": length / seconds,
        "mfu": flops / seconds / (chosen.cluster.gpu.bf16_tflops * 1e12),
        "predicted": {
            "seconds": chosen.time.step,
            # The reserve is what CUDA and NCCL take beside the allocator.
            "peak_bytes": chosen.memory.total - chosen.memory.categories["reserve"],
            "host_bytes": chosen.memory.host,
        },
        "host_gib": chosen.cluster.host_memory_gib,
        **found,
    }


def _plan(sizes: Sizes, card: ModelCard, length: int, words: str, precision: str) -> Plan:
    cluster = machine(sizes.device)
    fp8 = Fp8() if precision == "bf16" else Fp8(recipe=cast(Fp8Recipe, precision))
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


def _measured(chosen: Plan, length: int, device: torch.device, *, steps: int) -> dict[str, Any]:
    """Return seconds, losses and gradient norms by step, and the peak bytes of the last one."""
    recipe = pretrain(chosen.workload.card, ladder_of(length), length, chosen.workload.layout)
    on_cuda = device.type == "cuda"
    found: dict[str, Any] = {"rounds": [], "losses": [], "gradient_norms": []}
    batches = _batches(single_step._batches)
    with only_process(device), ExitStack() as around:
        around.callback(_release, on_cuda)
        memory = None if on_cuda else around.enter_context(MemoryByCategory(device))
        around.enter_context(patched(single_step, "_batches", batches))
        made = single_step.training(recipe, rank=0, local_rank=0)
        made.optimizer.step()  # without gradients: it makes Adam's moments, which every step has
        for _ in range(steps):
            if memory is None:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            else:
                memory.restart()
            start = time.perf_counter()
            loss, norm = whole_step(made)
            if on_cuda:
                torch.cuda.synchronize()
            found["rounds"].append(time.perf_counter() - start)
            found["losses"].append(float(loss))
            found["gradient_norms"].append(float(norm))
        found["peak_bytes"] = (
            torch.cuda.max_memory_allocated() if memory is None else memory.peak_bytes
        )
        sums = [float(p.detach().float().sum()) for c in made.model for p in c.parameters()]
        found["finite"] = all(map(math.isfinite, sums))
        del made
    return found


def _batches(
    random: Callable[[nemo_run.Partial], Iterator[dict[str, Tensor]]],
) -> Callable[[nemo_run.Partial], Iterator[dict[str, Tensor]]]:
    """Return micro-batches, new ones each step, in which every second token follows from the one
    before it: the loss falls towards half of ln `WORDS`.
    """
    draw = torch.Generator().manual_seed(0)

    def batches(recipe: nemo_run.Partial) -> Iterator[dict[str, Tensor]]:
        for batch in random(recipe):
            first = torch.randint(WORDS, (*batch["tokens"][:, ::2].shape, 1), generator=draw)
            tokens = torch.cat((first, (7 * first + 3) % WORDS), 2).flatten(1)
            yield batch | {"tokens": tokens, "labels": tokens.roll(-1, 1)}

    return batches


def _release(on_cuda: bool) -> None:
    parallel_state.destroy_model_parallel()
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()


@contextmanager
def without_products() -> Iterator[None]:
    """Have every kernel return tensors of the right shape without computing them."""
    emptied = {name: replace(kernel, forward=_forward, backward=_backward)
               for name, kernel in registry.KERNELS.items()}  # fmt: skip
    registry.kernel_for.cache_clear()
    try:
        with patched(registry, "KERNELS", emptied):
            yield
    finally:
        registry.kernel_for.cache_clear()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, documents: Documents | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
