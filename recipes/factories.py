# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes, each a row that a source or a measurement stands behind."""

from collections.abc import Callable
from typing import TypeVar

import nemo_run as run
from nemo.collections import llm

from custom_modules.activation_memory import Recompute
from recipes.ladders import LLAMA_128K, TINY_LADDER
from recipes.layout import ContextParallel, Layout
from recipes.models import LLAMA31_8B, LLAMA32_1B, TINY
from recipes.pretrain import pretrain
from recipes.units import K

FULL = Recompute(kind="full")
Recipe = TypeVar("Recipe", bound=Callable[..., run.Partial])
FACTORIES: dict[str, Callable[..., run.Partial]] = {}


def factory(recipe: Recipe) -> Recipe:
    """List a recipe, here and for nemo-run's own command line."""
    FACTORIES[recipe.__name__] = recipe
    run.cli.factory(target=llm.pretrain)(recipe)
    return recipe


@factory
def tiny_512(nodes: int = 1) -> run.Partial:
    """Tiny from scratch at 512 tokens: two data ranks on CPU."""
    layout = Layout(dp=2, precision="fp32", device="cpu", micro_batch=4)
    return pretrain(TINY, TINY_LADDER, 512, layout, nodes=nodes)


@factory
def tiny_2k(nodes: int = 1) -> run.Partial:
    """Tiny at 2,048 tokens after a base change: two context ranks on CPU."""
    layout = Layout(cp=ContextParallel.ulysses(2), precision="fp32", device="cpu")
    return pretrain(TINY, TINY_LADDER, 2 * K, layout, nodes=nodes)


@factory
def tiny_8k(nodes: int = 1) -> run.Partial:
    """Tiny at 8,192 tokens with YaRN: two context ranks on CPU."""
    layout = Layout(cp=ContextParallel.ulysses(2), precision="fp32", device="cpu")
    return pretrain(TINY, TINY_LADDER, 8 * K, layout, nodes=nodes)


@factory
def llama31_8b_nemo_16k(nodes: int = 1) -> run.Partial:
    """Llama-3.1-8B at 16K tokens."""
    layout = Layout(tp=2, cp=ContextParallel.ulysses(2), dp=2 * nodes, recompute=FULL)
    return pretrain(LLAMA31_8B, LLAMA_128K, 16 * K, layout, nodes=nodes)


@factory
def llama31_8b_nemo_64k(nodes: int = 1) -> run.Partial:
    """Llama-3.1-8B at 64K tokens."""
    layout = Layout(tp=2, cp=ContextParallel.ulysses(4), dp=nodes, recompute=FULL)
    return pretrain(LLAMA31_8B, LLAMA_128K, 64 * K, layout, nodes=nodes)


@factory
def llama31_8b_nemo_128k(nodes: int = 1) -> run.Partial:
    """Llama-3.1-8B at 128K tokens."""
    layout = Layout(tp=2, cp=ContextParallel.ulysses(4), dp=nodes, recompute=FULL)
    return pretrain(LLAMA31_8B, LLAMA_128K, 128 * K, layout, nodes=nodes)


@factory
def llama32_1b_nemo_16k(nodes: int = 1) -> run.Partial:
    """Llama-3.2-1B at 16K tokens."""
    layout = Layout(cp=ContextParallel.ulysses(2), dp=4 * nodes, recompute=FULL)
    return pretrain(LLAMA32_1B, LLAMA_128K, 16 * K, layout, nodes=nodes)


@factory
def llama32_1b_nemo_64k(nodes: int = 1) -> run.Partial:
    """Llama-3.2-1B at 64K tokens."""
    layout = Layout(cp=ContextParallel.ulysses(4), dp=2 * nodes, recompute=FULL)
    return pretrain(LLAMA32_1B, LLAMA_128K, 64 * K, layout, nodes=nodes)


@factory
def llama32_1b_nemo_128k(nodes: int = 1) -> run.Partial:
    """Llama-3.2-1B at 128K tokens."""
    layout = Layout(cp=ContextParallel.ulysses(8), dp=nodes, recompute=FULL)
    return pretrain(LLAMA32_1B, LLAMA_128K, 128 * K, layout, nodes=nodes)
