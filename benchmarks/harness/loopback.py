# SPDX-License-Identifier: Apache-2.0
"""One process in the place of rank 0 of many: messages become copies on its own device.

    with loopback(8) as group:
        attend(q, k, v, kernel=kernel, groups=Groups(ulysses=group, ring=None), causal=True)

For what one rank of an all-to-all computes and holds, on a single device. The group is torch's
"fake" one, which knows its size and sends nothing; in place of the exchange every message is copied
from what is sent into what is received: as many bytes read and written, at the memory's rate
instead of a link's. Values are therefore wrong: what arrives is this rank's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from custom_modules.context_parallel import ulysses
from custom_modules.context_parallel.p2p import Messages
from custom_modules.patching import patched


@contextmanager
def loopback(size: int) -> Iterator[dist.ProcessGroup]:
    """Yield the group of `size` ranks, of which this process is the first and the only one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # it registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        with patched(ulysses, "post", _copy):
            yield group
    finally:
        dist.destroy_process_group()


def _copy(
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    group: dist.ProcessGroup,
) -> Messages:
    """Exchange as `custom_modules.context_parallel.p2p.post` does, where all ranks are this one."""
    for (to, out), (of, into) in zip(sent, received, strict=True):
        assert to == of
        into.copy_(out.view_as(into))
    return Messages([], [])
