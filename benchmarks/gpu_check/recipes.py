# SPDX-License-Identifier: Apache-2.0
"""Every shipped GPU recipe constructed at full size: the steps before the first batch of a rank."""

import logging
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.device_meshes import real_meshes
from benchmarks.gpu_check.fake_cuda import fake_cuda
from benchmarks.gpu_check.fake_ranks import rank_of
from custom_modules.memory.config import Tiling
from recipes.planner.memory import Memory, memory
from recipes.planner.workload import Workload
from recipes.shipped.row import Row
from recipes.shipped.table import ROWS
from recipes.spec import cluster
from recipes.spec.layout import ContextParallel, Fp8

TREE = Path(__file__).resolve().parents[2]

PLAIN: dict[str, Any] = {"cp": ContextParallel.ulysses(4), "tiling": Tiling()}
"""Megatron FSDP does not go with attention that chunks heads."""
VARIANTS: dict[str, dict[str, Any]] = {
    "FP8 delayed": {"fp8": Fp8(recipe="delayed")},
    "optimizer on the host": {"optimizer_offload": 1.0},
    "half of it on the host": {"optimizer_offload": 0.5},
    "optimizer not sharded": {"sharding": "none"},
    "Megatron FSDP, gradients": PLAIN | {"sharding": "gradients"},
    "Megatron FSDP, parameters": PLAIN | {"sharding": "parameters"},
}
"""Layouts by what they change."""
VARIED: dict[str, dict[str, dict[str, Any]]] = {
    "llama3_8b_nemo_64k": VARIANTS,
    "mixtral_8x7b_nemo_16k": {
        "Megatron FSDP of experts, parameters": {
            "tp": 1, "cp": ContextParallel.ulysses(1), "pp": 1, "dp": 16, "ep": 1, "etp": None,
            "sharding": "parameters",
        }
    },
}  # fmt: skip
"""What is varied, by recipe."""
LEAST = {"FP8": 0.5, "_fp8": 0.5, "Megatron FSDP of experts": 0.5, "Megatron FSDP": 0.75}
"""Least ratios of bytes held to the planner's, which counts too what the first step makes: FP8
copies of weights, layers that are gathered, which are large with all experts. Of all others it is
0.99. The first name that is part of a layout's counts."""


@dataclass(frozen=True, kw_only=True)
class Constructed:
    """What one rank of a recipe holds before its first batch, or why it could not be made."""

    name: str
    ranks: int
    modules: dict[str, int] = field(default_factory=dict)
    """Transformer Engine's modules by class."""
    parameters: int = 0
    """Parameters of the rank, whole."""
    held: dict[str, int] = field(default_factory=dict)
    """Bytes by category: weights, gradients, master weights."""
    planned: dict[str, float] = field(default_factory=dict)
    """The planner's bytes of the same."""
    error: str = ""

    @property
    def right(self) -> bool:
        """Whether it was made of Transformer Engine's modules and holds the planner's bytes."""
        if self.error or not self.modules:
            return False
        least = next((share for part, share in LEAST.items() if part in self.name), 0.99)
        return all(least < self.held[n] / self.planned[n] < 1.01 for n in self.held)


def gpu_rows() -> list[Row]:
    """Return the shipped recipes for GPUs."""
    return [row for row in ROWS.values() if row.layout.device == "cuda"]


def labelled(rows: list[Row]) -> list[tuple[str, Row]]:
    """Return the rows by name, then two in the ways that no shipped recipe takes."""
    return [(row.name, row) for row in rows] + [
        (f"{row.name}, {label}", replace(row, layout=replace(row.layout, **changes)))
        for row in rows
        for label, changes in VARIED.get(row.name, {}).items()
    ]


def constructed(call: tuple[str, Row]) -> Constructed:
    """Construct one recipe, after its label, on the rank that the planner calls the fullest."""
    name, row = call
    found = memory(_workload(row))
    ranks = row.layout.world_size
    rank = found.stage * ranks // row.layout.pp  # pipeline stages are outermost
    try:
        quiet()
        recipe = row()
        capability = cluster.load(row.cluster).gpu.capability
        with rank_of(ranks, rank), fake_cuda(capability), real_meshes():
            _, trainer = connected(recipe)
            trainer.strategy.setup_megatron_parallel(trainer)
            chunks = list(trainer.strategy.megatron_parallel)
            if row.layout.sharding in ("gradients", "parameters"):
                held = _sharded(chunks)
            else:
                held = _held(chunks, trainer.strategy.optimizers[0])
            if row.layout.optimizer_offload:
                del held["master weights"]  # parts of it are behind the two optimizers
            modules = _engine_modules(chunks)
            parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    except Exception as raised:  # whatever the code under test raises is the result
        return Constructed(name=name, ranks=ranks, error=error_in_words(raised))
    return Constructed(
        name=name, ranks=ranks,
        modules=modules, parameters=parameters, held=held, planned=_planned(found),
    )  # fmt: skip


def _workload(row: Row) -> Workload:
    return Workload(
        card=row.card,
        seq_length=row.seq_length,
        tokens_per_batch=row.stage.tokens_per_batch,
        layout=row.layout,
        gpus_per_node=cluster.load(row.cluster).gpus_per_node,
    )


def connected(recipe: Any) -> tuple[Any, Any]:
    """Build a recipe's model and trainer as far as the bare model; return both."""
    import fiddle as fdl
    from lightning.pytorch.trainer.states import TrainerFn
    from nemo.lightning import _strategy_lib

    recipe.trainer.strategy.use_gloo_process_groups = False  # gloo would connect to real ranks
    model, trainer, optim = (fdl.build(one) for one in (recipe.model, recipe.trainer, recipe.optim))
    optim.connect(model)
    trainer.state.fn = TrainerFn.FITTING
    trainer.training = True
    model.trainer = trainer
    trainer.strategy.connect(model)
    trainer.strategy.setup_environment()
    _strategy_lib.init_model_parallel(model)  # it ends early where torch.distributed is set up
    model.configure_model()
    return model, trainer


def quiet() -> None:
    """Leave out what NeMo and its libraries log."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def error_in_words(error: Exception) -> str:
    """Return an error with the place that raised it."""
    where = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in where
        if str(TREE) in frame.filename and "site-packages" not in frame.filename
    ]
    text = " ".join(str(error).split())[:200]
    last = (ours or where)[-1]
    return f"{type(error).__name__}: {text} ({last.filename}:{last.lineno})"


def _held(chunks: list[Any], optimizer: Any) -> dict[str, int]:
    """Return the bytes of what is allocated, each storage once."""
    weights = [p for chunk in chunks for p in chunk.parameters()]
    buffers = [
        buffer
        for chunk in chunks
        for buffer in (*chunk.module.buffers, *chunk.module.expert_parallel_buffers)
    ]
    gradients = [
        buffer.grad_data for buffer in buffers if getattr(buffer, "grad_data", None) is not None
    ]
    groups = [p for group in optimizer.param_groups for p in group["params"]]
    master = [p for p in groups if p.dtype == torch.float32 and p.device.type == "cuda"]
    return {
        "weights": _bytes(weights),
        "gradients": _bytes(gradients),
        "master weights": _bytes(master),
    }


def _sharded(chunks: list[Any]) -> dict[str, int]:
    """Return the bytes of Megatron FSDP's buffers."""
    groups = [
        group for chunk in chunks for group in chunk.module.param_and_grad_buffer.parameter_groups
    ]
    return {
        "weights": _of_buffers(group.model_weight_buffer for group in groups),
        "gradients": _of_buffers(group.main_grad_buffer for group in groups),
        "master weights": _of_buffers(group.main_weight_buffer for group in groups),
    }


def _of_buffers(buffers: Iterable[Any]) -> int:
    there = [one.data for one in buffers if one is not None]
    return _bytes([data for data in there if data is not None])


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _engine_modules(chunks: list[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for chunk in chunks:
        for module in chunk.modules():
            for kind in type(module).__mro__:
                if kind.__module__.startswith("transformer_engine.pytorch.module"):
                    found[kind.__name__] = found.get(kind.__name__, 0) + 1
                    break
    return found


def _planned(found: Memory) -> dict[str, float]:
    return {
        "weights": found.categories["weights"],
        "gradients": found.categories["gradients"],
        "master weights": found.categories["optimizer"] / 3,  # the rest is two moments
    }
