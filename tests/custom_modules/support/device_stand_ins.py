# SPDX-License-Identifier: Apache-2.0
"""A device apart from the host, on a machine that has none: for code that moves tensors between."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

STAYS = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)
"""What makes of a tensor another one in the same place."""


class HostIsApart(TorchFunctionMode):
    """Answer `is_cuda` with False for what was pinned, and its copies, alone."""

    def __init__(self) -> None:
        super().__init__()
        self.on_host: list[torch.Tensor] = []
        self.pinned: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.is_cuda.__get__:
            return not self._has(args[0])
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.pin_memory:
            out = out.clone()
            self.pinned.append(out)
        if func is torch.Tensor.pin_memory or (func in STAYS and self._has(args[0])):
            self.on_host.append(out)
        return out

    def _has(self, tensor: torch.Tensor) -> bool:
        return any(tensor is one for one in self.on_host)
