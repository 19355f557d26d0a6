# SPDX-License-Identifier: Apache-2.0
"""Point-to-point messages of a process group, the basis of all-to-all and ring attention.

An all-to-all here is one grouped batch of sends and receives, as NCCL implements `all_to_all`. So a
rank receives directly into slices of its result, where `all_to_all_single` needs one flat block and
a copy of the whole tensor after it.

Every message is a contiguous tensor. Sent tensors must not change, and received ones must not be
read, before the messages have completed.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Messages:
    """Messages in flight; `wait` returns when all have completed."""

    def __init__(self, works: Iterable[Any], kept: Sequence[Tensor]) -> None:
        """Keep the works, and the tensors that they read and write."""
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

    Messages between two ranks match by order. All ranks of the group must post together, and any
    two ranks the same number both ways.
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
