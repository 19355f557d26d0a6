# SPDX-License-Identifier: Apache-2.0
"""Parameter gathering for code that reads a module's weight without calling the module.

Megatron-Core's DDP gathers parameters while the forward already runs, and waits for those of a
module in a hook before the module's forward. Any other code that reads them must wait too.
"""

from torch import nn


def finish_gather(module: nn.Module) -> None:
    """Wait for the parameters of a module as its call would.

    Raises ValueError under Megatron FSDP, which frees parameters again in hooks after the forward.
    """
    if module._forward_pre_hooks_with_kwargs:
        raise ValueError(
            f"{type(module).__name__} is sharded by Megatron FSDP, whose parameters only a call "
            "of the module may read; take sharding optimizer, or leave out what reads its weight: "
            "a tiled loss that of the LM head, head-chunked attention that of the QKV projection"
        )
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
