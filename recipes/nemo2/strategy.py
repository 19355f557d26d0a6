# SPDX-License-Identifier: Apache-2.0
"""NeMo's Megatron strategy with validation weighted by tokens, and its version for CPU."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from nemo import lightning as nl
from nemo.lightning import _strategy_lib
from nemo.lightning.ckpt_utils import WEIGHTS_PATH, ckpt_to_dir

import recipes.nemo2.signatures  # noqa: F401  # before the first config of a NeMo class
from custom_modules.checkpoints.results_queue import end_results_queue_with_rank
from custom_modules.cpu.backend import cpu_backend
from custom_modules.memory.optimizer_on_host import mend_copies
from recipes.checkpoints.verified import verified
from recipes.constraints import fp8

OF_THE_STATE = ("params", "step")
"""Keys of a parameter group that are not hyperparameters."""


class LongContextStrategy(nl.MegatronStrategy):
    """NeMo's strategy with the validation loss weighted by tokens, and kernel choices in the log.

    Checkpoints are read without running code, and their checksums are verified.
    """

    verify_checkpoints = True
    """Set by `recipes.nemo2.checkpoint_callback.StageResume`."""
    started_from: Mapping[str, Any] = {}
    """What records say of the checkpoint that the stage started from; set by the same."""

    def connect(self, model: pl.LightningModule) -> None:
        """Attach a model, whose parameters are made in the dtype that it trains in.

        NeMo's precision plugin makes them in fp32 by default: twice the bytes until they are cast.
        Experts under Megatron FSDP are not apart (`custom_modules.gpt.moe_router`).
        """
        dtypes = getattr(self.precision_plugin, "dtype_config", None)
        if dtypes is not None and dtypes.bf16:
            dtypes.params_dtype = torch.bfloat16
        super().connect(model)
        config: Any = model.config
        config.experts_apart = self._fsdp != "megatron"

    def setup_environment(self) -> None:
        """Set up ranks and groups; the first rank then logs kernels and context parallel kinds.

        Raises ValueError if this rank's device does not support the FP8 recipe.
        """
        super().setup_environment()
        self._refuse_fp8()
        chosen = logging.getLogger("custom_modules")
        chosen.setLevel(logging.INFO)
        chosen.propagate = False  # other ranks and NeMo's root handlers would repeat it
        if torch.distributed.get_rank() == 0 and not chosen.handlers:
            chosen.addHandler(logging.StreamHandler())

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Set up the optimizer, and mend the copies of a part of it that is on the host."""
        super().setup_optimizers(trainer)
        for one in self.optimizers:
            mend_copies(getattr(one, "mcore_optimizer", None))

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save as NeMo does; the process that collects the writers' results ends with this rank."""
        end_results_queue_with_rank()
        super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(
        self, checkpoint_path: str | Path, selective_restore: bool = False
    ) -> dict[str, Any]:
        """Return the checkpoint as NeMo does; raise CheckpointError on all ranks if damaged."""
        folder = Path(ckpt_to_dir(checkpoint_path))
        folder = folder.parent if folder.name == WEIGHTS_PATH else folder  # at a resume
        with verified(folder, verify=self.verify_checkpoints):
            state: dict[str, Any] = super().load_checkpoint(checkpoint_path, selective_restore)
            return state

    def load_optimizer_state_dict(
        self, checkpoint: Mapping[str, Any], selective_restore: bool = False
    ) -> None:
        """Load the optimizer's state; a stage that carries it over keeps its own hyperparameters.

        A state has the hyperparameters of its stage, and its last rate among them: with it the
        first step would be taken at the rate of the stage before.
        """
        groups = [group for one in self.optimizers for group in one.param_groups]
        own = [
            {key: value for key, value in group.items() if key not in OF_THE_STATE}
            for group in groups
        ]
        super().load_optimizer_state_dict(checkpoint, selective_restore)
        if selective_restore:
            loaded = [group for one in self.optimizers for group in one.param_groups]
            for group, before in zip(loaded, own, strict=True):
                group.update(before)

    def _refuse_fp8(self) -> None:
        chosen = self.precision_plugin.dtype_config
        cuda = torch.version.cuda
        if not chosen.fp8 or cuda is None:
            return  # without CUDA the recipe was already refused
        major, minor = (int(part) for part in cuda.split(".")[:2])
        why = fp8.refusal(chosen.fp8_recipe, torch.cuda.get_device_capability(), (major, minor))
        if why is not None:
            raise ValueError(why)

    def validation_step(self, dataloader_iter: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of one batch, and log it weighted by its valid tokens.

        Lightning averages over batches by weight, so `val_loss` is sum(loss) / sum(tokens) over
        the whole validation, however uneven the masks of the batches are.
        """
        with self.precision_plugin.val_step_context():
            loss = self.model.validation_step(dataloader_iter, *args, **kwargs)
        counted = self.lightning_module.validation_loss_reduction.valid_tokens
        tokens = torch.zeros_like(loss) if counted is None else counted.clone()
        for value in (loss, tokens):
            _strategy_lib._sync_from_last_pipeline_stage(value, broadcast=True)
        self.lightning_module.log(
            "val_loss", loss, on_epoch=True, prog_bar=True, batch_size=max(1, int(tokens))
        )
        return loss


class CpuStrategy(LongContextStrategy):
    """The same on CPU, inside `cpu_backend()`."""

    def setup_environment(self) -> None:
        """Enter the CPU backend, then set up ranks and groups."""
        self._backend = ExitStack()
        self._backend.enter_context(cpu_backend(force=True))
        super().setup_environment()

    def teardown(self) -> None:
        """Tear down, then leave the CPU backend."""
        try:
            super().teardown()
        finally:
            self._backend.close()
