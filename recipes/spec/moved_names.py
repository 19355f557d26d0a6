# SPDX-License-Identifier: Apache-2.0
"""Current modules of classes that files of earlier versions name.

A run folder's `config.yaml` names the classes of its recipe by module. Readers of such files
translate each name first, so that run folders of earlier versions can be resumed, evaluated and
exported.
"""

MODULES = {
    "custom_modules.activation_memory": "custom_modules.memory.config",
    "custom_modules.context_parallel_kind": "custom_modules.context_parallel.config",
    "custom_modules.positions": "custom_modules.rope.skipped_positions",
    "custom_modules.rope_scaling": "custom_modules.rope.config",
    "data.module": "data.nemo_module",
    "data.sentences": "data.train_short.sentences",
    "recipes.checkpoints": "recipes.nemo2.checkpoint_callback",
    "recipes.gpt": "recipes.nemo2.model",
    "recipes.schedule": "recipes.nemo2.lr_schedule",
    "recipes.strategy": "recipes.nemo2.strategy",
}
"""Module in files from before 22 November 2026, and its current name."""

CLASSES = {
    "recipes.weight_sums.WeightSums": "recipes.checkpoints.weight_checksums.WeightChecksums",
}
"""Classes that were renamed as well."""


def current_name(name: str) -> str:
    """Return the current dotted name of a class; unchanged if it has not moved."""
    if name in CLASSES:
        return CLASSES[name]
    module, _, attribute = name.rpartition(".")
    return f"{MODULES[module]}.{attribute}" if module in MODULES else name
