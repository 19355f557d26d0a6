# SPDX-License-Identifier: Apache-2.0
"""Point-to-point messages of a process group: what all-to-all and ring attention are made of.

An all-to-all here is one grouped batch of sends and receives, which is also what NCCL makes of
`all_to_all`. Writing it as such lets a rank receive straight into slices of its result, where
`all_to_all_single` needs one flat block and a copy of the whole tensor after it.

Every message is a contiguous tensor. What is sent must not change, and what is received must not
be read, before the messages have ended.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Messages:
    """Messages under way; `wait` returns when all have ended."""

    def __init__(self, works: Iterable[Any], kept: Sequence[Tensor]) -> None:
        """Hold the works, and the tensors that they read and write."""
        self._works, self._kept = list(works), list(kept)

    def wait(self) -> None:
        """Wait for all; on CUDA the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._kept.clear()


def post(
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    group: dist.ProcessGroup,
) -> Messages:
    """Start sending and receiving (rank in the group, tensor) pairs; return at once.

    Between two ranks messages match in their order. Every rank of the group must post together,
    and between the same two ranks the same number both ways.
    """
    operations = []
    for function, messages in ((dist.isend, sent), (dist.irecv, received)):
        counts: dict[int, int] = {}
        for peer, tensor in messages:
            tag = counts[peer] = counts.get(peer, -1) + 1
            operations.append(
                dist.P2POp(
                    function, tensor, dist.get_global_rank(group, peer), group=group, tag=tag
                )
            )
    works = dist.batch_isend_irecv(operations) if operations else []
    return Messages(works, [tensor for _, tensor in (*sent, *received)])
