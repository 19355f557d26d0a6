# SPDX-License-Identifier: Apache-2.0
"""Recipes as configurations of Megatron-Bridge, built by Megatron-Bridge itself.

    make bridge RECIPES='llama3_8b_nemo_16k tiny_512' OUT=page.md

Each recipe is written as `longhaul show --to-bridge` writes it, read by Bridge's
`ConfigContainer.from_yaml`, which refuses a key that it does not know, and completed and validated
for the ranks of its layout as Bridge's `pretrain` does first (`runtime_config_update`). Of a recipe
for CPU ranks the provider then builds the model, which takes one step forward and backward on one
rank. Runs in an environment with Bridge, without NeMo and without a GPU (`tests.every_megatron`).
"""

import argparse
import math
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from data.cuda_extension import prepare_process
from recipes.megatron_bridge.config import left_out, text
from recipes.shipped.row import Row
from recipes.shipped.table import ROWS
from recipes.spec.suggest import lookup

LORA = "megatron.bridge.peft.lora_layers"
"""The one module of Bridge that a configuration imports and that needs Transformer Engine."""


def without_lora() -> None:
    """Put an empty module in the place of `LORA` if Transformer Engine is not installed.

    Bridge's LoRA adapters take names from it, and no recipe here has an adapter.
    """
    if find_spec("transformer_engine") is None:
        module = ModuleType(LORA)
        module.__getattr__ = _no_adapter  # type: ignore[method-assign]
        sys.modules[LORA] = module


def _no_adapter(name: str) -> type:
    """Return a class for the name of an adapter; names of Python's own, as `__file__`, are none."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


class Built(NamedTuple):
    """What Bridge made of a recipe."""

    name: str
    ranks: int
    provider: str
    data_ranks: int
    layer: str
    """Class of a layer that the provider's spec names."""
    weights: str
    """Weights of the model that was built, if one was, and the card's."""
    loss: str


def build(row: Row) -> Built:
    """Read, validate and, for CPU ranks, build the model of one recipe."""
    from megatron.bridge.training.config import ConfigContainer, runtime_config_update
    from megatron.bridge.utils.instantiate_utils import (
        InstantiationMode,
        register_allowed_target_prefix,
    )

    register_allowed_target_prefix("custom_modules.")
    os.environ["WORLD_SIZE"] = str(row.layout.world_size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{row.name}.yaml"
        path.write_text(text(row.card, row.ladder, row.seq_length, row.layout))
        container = ConfigContainer.from_yaml(str(path), mode=InstantiationMode.STRICT)
    try:
        runtime_config_update(container)
    except AssertionError as error:  # such as the checkpoint of a stage before, which is not here
        raise ValueError(f"{row.name} is refused by Bridge: {error}") from error
    layer, weights, loss = "", "", ""
    if row.layout.device == "cpu":
        layer, weights, loss = one_step(container.model, row)
    return Built(
        row.name, row.layout.world_size, type(container.model).__name__,
        container.data_parallel_size, layer, weights, loss,
    )  # fmt: skip


def one_step(provider: Any, row: Row) -> tuple[str, str, str]:
    """Build a model on one CPU rank and take a forward and a backward; return what was seen."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from custom_modules.cpu.backend import cpu_backend

    provider.context_parallel_size = 1
    with cpu_backend(force=True):
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        model = provider.provide(pre_process=True, post_process=True)
        generator = torch.Generator().manual_seed(0)
        shape = (1, row.seq_length + 1)
        tokens = torch.randint(row.card.vocab, shape, generator=generator)
        positions = torch.arange(row.seq_length)[None]
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous())
        losses.mean().backward()
        without = [name for name, each in model.named_parameters() if each.grad is None]
        if without or not torch.isfinite(losses).all():
            raise ValueError(f"{row.name}: no gradient of {without}, or a loss that is not finite")
        weights = sum(each.numel() for each in model.parameters())
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return (
        type(model.decoder.layers[0].self_attention.core_attention).__name__,
        f"{weights:,} of {row.card.parameters:,}",
        f"{losses.mean().item():.3f} (ln of the vocabulary {math.log(row.card.vocab):.3f})",
    )


def main() -> int:
    """Build the recipes and print the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bridge_build", description=__doc__)
    parser.add_argument("recipes", nargs="+", help="names of shipped recipes")
    parser.add_argument("--out", type=Path, help="page to write")
    asked = parser.parse_args()
    prepare_process()
    without_lora()
    try:
        rows = [lookup("recipe", name, ROWS) for name in asked.recipes]
        built = [build(row) for row in rows]
    except (ValueError, KeyError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    cells = [
        [each.name, each.provider, f"{each.ranks:,}", f"{each.data_ranks:,}", each.layer,
         each.weights, each.loss]
        for each in built
    ]  # fmt: skip
    head = ["recipe", "provider", "ranks", "data ranks", "attention", "weights", "loss"]
    of_what: dict[str, list[str]] = {}
    for row in rows:
        for what in left_out(row.stage, row.layout):
            of_what.setdefault(what, []).append(row.name)
    missing = "\n".join(
        f"* {'all' if len(names) == len(rows) else ', '.join(names)}: {what}."
        for what, names in of_what.items()
    )
    said = page(
        "Recipes as configurations of Megatron-Bridge",
        facts(["megatron-bridge", "megatron-core", "transformers"]),
        [table(head, cells), f"## Not in the configuration\n\n{missing}"],
    )
    print(said)
    if asked.out:
        write(asked.out, said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
