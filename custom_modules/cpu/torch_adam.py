# SPDX-License-Identifier: Apache-2.0
"""Megatron's distributed optimizer over torch's Adam: checkpoints that load.

Transformer Engine's Adam keeps its step count in the parameter group; torch's keeps one per
parameter. Megatron-Core 0.15.3 handles torch's in part (`DistributedOptimizer`, if neither
Transformer Engine nor Apex is installed). Three things are missing and added here:

* before a load it reads the step from a state that is still empty: the state is filled as by
  Adam's first step, at step 0;
* a load gives one step tensor to all parameters, and Adam, counting in place, would then count it
  once for each of them: every parameter gets its own;
* `fully_reshardable` and `fully_sharded_model_space` loads skip the step of each parameter, then
  ask for it: it is the one that the load has already set.

Limit: Megatron's `dp_reshardable` format asserts on the step at save; use `fully_reshardable`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from custom_modules.patching import patched


@contextmanager
def sharded_torch_adam() -> Iterator[None]:
    """Make `DistributedOptimizer` save and load torch's Adam inside this context."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    bare_state_dict = DistributedOptimizer.state_dict
    bare_load = DistributedOptimizer.load_state_dict
    bare_set = DistributedOptimizer._set_main_param_and_optimizer_states

    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        for parameter in _parameters(self.optimizer):
            if not self.optimizer.state[parameter]:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return bare_state_dict(self)

    def load_state_dict(self: DistributedOptimizer, loaded: dict[str, Any]) -> None:
        bare_load(self, loaded)
        for parameter in _parameters(self.optimizer):
            state = self.optimizer.state[parameter]
            state["step"] = state["step"].clone()

    def set_states(
        self: DistributedOptimizer, model_parameter: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        group, order = self.model_param_group_index_map[model_parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        bare_set(self, model_parameter, {"step": state["step"], **tensors})

    with ExitStack() as stack:
        for name, value in (
            ("state_dict", state_dict),
            ("load_state_dict", load_state_dict),
            ("_set_main_param_and_optimizer_states", set_states),
        ):
            stack.enter_context(patched(DistributedOptimizer, name, value))
        yield


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
