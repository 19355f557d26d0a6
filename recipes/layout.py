# SPDX-License-Identifier: Apache-2.0
"""How one stage is laid on ranks."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel:
    """How one sequence is shared by several ranks."""

    kind: Literal["ulysses"]
    size: int

    @classmethod
    def ulysses(cls, size: int) -> "ContextParallel":
        """All-to-all from sequence shards to head shards around attention (arXiv 2309.14509)."""
        return cls(kind="ulysses", size=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Ranks by kind of parallelism, and the choices that go with them."""

    tp: int = 1
    """Tensor parallel ranks; sequence parallelism goes with it."""
    cp: ContextParallel = ContextParallel.ulysses(1)
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    """Sequences in one forward."""
    recompute: Literal["none", "full"] = "none"
    precision: Literal["fp32", "bf16"] = "bf16"
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        """Refuse sizes below one."""
        for name in ("tp", "pp", "dp", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"layout {name} is {getattr(self, name)}; it must be at least 1")
        if self.cp.size < 1:
            raise ValueError(f"layout cp is {self.cp.size}; it must be at least 1")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp.size * self.pp * self.dp
