# SPDX-License-Identifier: Apache-2.0
"""A stage one of whose training samples has no number for a loss, wherever it is read."""

import torch
from megatron.core.datasets.utils import Split

from data.nemo_module import NumberedDataset
from longhaul.jobs.watched_training import train_watched


def train(config: str, place: int, alert: str = "") -> None:
    """Train the stage of a recipe file; the sample at a place of the data is the bad one."""
    read = NumberedDataset.__getitem__

    def poisoned(self: NumberedDataset, idx: int | None) -> dict[str, torch.Tensor]:
        sample = read(self, idx)
        if idx is not None and self.index_split == Split.train and self.place_of(idx) == place:
            sample["loss_mask"] = torch.full_like(sample["loss_mask"], torch.nan)
        return sample

    NumberedDataset.__getitem__ = poisoned
    train_watched(config, alert=alert)
