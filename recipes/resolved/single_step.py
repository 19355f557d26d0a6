# SPDX-License-Identifier: Apache-2.0
"""One training step of a recipe without NeMo's trainer: model, optimizer and step of one rank.

Model, precision, data parallelism, optimizer and step are those that NeMo's strategy builds from
the recipe, without data store, checkpoints, logs and validation. Tokens are random.
`custom_modules.profiling.step_memory` counts the bytes of such a step.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import fiddle as fdl
import nemo_run
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core import parallel_state
from nemo.lightning import _strategy_lib
from nemo.lightning.megatron_parallel import MegatronParallel

from custom_modules.memory.optimizer_on_host import mend_copies
from custom_modules.profiling.step_memory import Training
from recipes.resolved.read import layout_of


def micro_batches(recipe: nemo_run.Partial) -> tuple[int, int]:
    """Return how many micro-batches are run, and how many the recipe has in a step.

    As many are run as can be in flight in the pipeline, twice PP if it is interleaved; more do not
    change the memory.
    """
    layout = layout_of(recipe)
    of_step = recipe.data.global_batch_size // (layout.micro_batch * layout.dp)
    return min(of_step, layout.pp * (2 if layout.vpp > 1 else 1)), of_step


def training(recipe: nemo_run.Partial, *, rank: int, local_rank: int) -> Training:
    """Return this rank's part of the recipe's model, optimizer and step, as NeMo builds them."""
    strategy = fdl.build(recipe.trainer.strategy)
    precision = strategy.precision_plugin = fdl.build(recipe.trainer.plugins)
    module = fdl.build(recipe.model)
    fdl.build(recipe.optim).connect(module)
    strategy.connect(module)
    _strategy_lib.init_parallel_ranks(
        dist.get_world_size(), rank, local_rank, strategy.parallelism, seed=1
    )
    _strategy_lib.init_model_parallel(module)
    module.configure_model()
    parallel = MegatronParallel(
        module,
        precision_plugin=precision,
        cpu=recipe.trainer.accelerator == "cpu",
        ddp_config=strategy.ddp_config,
        fsdp=strategy._fsdp,
        vp_size=strategy.virtual_pipeline_model_parallel_size,
        convert_module_fn=precision.convert_module,
    )
    fitting = SimpleNamespace(fn=TrainerFn.FITTING)
    parallel.trainer = SimpleNamespace(state=fitting, global_step=0)
    parallel.init_model_parallel()
    module.optim.on_fit_start(parallel.trainer, module)
    optimizer = module.optim.optimizers(parallel)[0].mcore_optimizer
    mend_copies(optimizer)

    def step() -> torch.Tensor:
        return parallel.training_step(
            _batches(recipe),
            seq_length=recipe.data.seq_length,
            micro_batch_size=recipe.data.micro_batch_size,
            num_microbatches=micro_batches(recipe)[0],
        )

    return Training(model=[chunk.module for chunk in parallel], optimizer=optimizer, step=step)


def _batches(recipe: nemo_run.Partial) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random micro-batches of whole sequences, the same on the ranks that share one."""
    draw = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    shape = recipe.data.micro_batch_size, recipe.data.seq_length
    while True:
        tokens = torch.randint(0, recipe.model.config.vocab_size, shape, generator=draw)
        positions = torch.arange(shape[1]).expand(shape).contiguous()
        batch = {
            "tokens": tokens,
            "labels": tokens.roll(-1, 1),
            "loss_mask": torch.ones(shape),
            "sample_id": torch.arange(shape[0]),
        }
        if recipe.data.documents == "within":  # two documents, cut in the middle
            positions = positions % (shape[1] // 2)
            batch["document_starts"] = positions == 0
        yield {**batch, "position_ids": positions}
