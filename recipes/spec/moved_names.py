# SPDX-License-Identifier: Apache-2.0
"""Where classes lie today that files written by earlier versions name; light.

A run folder's `config.yaml` names the classes of its recipe by module. Whoever reads a name out of
a file asks here first, so that run folders of earlier versions are resumed, evaluated and exported.
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
"""The module that files before 22 November 2026 name, and today's."""


def current_name(name: str) -> str:
    """Return today's dotted name of a class; a name that has not moved is returned as it is."""
    module, _, attribute = name.rpartition(".")
    return f"{MODULES[module]}.{attribute}" if module in MODULES else name
