# SPDX-License-Identifier: Apache-2.0
"""Masks so uneven that the second of two context ranks holds a single valid token."""

import json
from pathlib import Path

import torch
from lightning.pytorch import Callback
from megatron.core import parallel_state

from data.nemo_module import NumberedDataset, StoreDataModule
from tests.runs.train import SEQUENCES


class UnevenDataset(NumberedDataset):
    """Zigzag over two ranks cuts S into 4 chunks: rank 0 has the outer two, rank 1 the inner."""

    def __getitem__(self, idx):
        sample = super().__getitem__(idx)
        length = len(sample["loss_mask"])
        sample["loss_mask"][length // 4 : 3 * length // 4] = 0
        if idx is not None and idx % SEQUENCES == 0:  # one sequence of each batch
            sample["loss_mask"][length // 2] = 1
        return sample


class UnevenDataModule(StoreDataModule):
    """The store with uneven masks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dataset_cls = UnevenDataset


class SaveGradients(Callback):
    """Save every gradient of the first step and the validation losses, from rank 0."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        path = self.folder / "gradients.pt"
        if torch.distributed.get_rank() == 0 and not path.exists():
            gradients = {
                name: parameter.main_grad.clone()
                for name, parameter in pl_module.module.named_parameters()
            }
            torch.save(gradients, path)

    def on_validation_end(self, trainer, pl_module):
        if parallel_state.get_context_parallel_rank() == 0:
            loss = trainer.callback_metrics["val_loss"].item()
            with (self.folder / "validation.jsonl").open("a") as file:
                file.write(json.dumps(loss) + "\n")
