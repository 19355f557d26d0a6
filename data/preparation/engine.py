# SPDX-License-Identifier: Apache-2.0
"""Choose and run an engine, with its progress on stderr."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from data.preparation.skip_limit import require_below_count
from data.preparation.work import Receipt, Work
from data.progress import progress, say

SMALL_BYTES = 2**26
"""Work of fewer bytes is done in this process: others would take longer to start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Where tasks run."""

    kind: Literal["pool", "ray"] = "pool"
    workers: int | None = None
    """Processes of the pool; None: one a processor, or none for a small source."""
    address: str | None = None
    """Of the Ray cluster; None: that of RAY_ADDRESS, or the one that this machine is part of."""

    def __post_init__(self) -> None:
        """Refuse an unknown engine, and options of another."""
        if self.kind not in ("pool", "ray"):
            raise ValueError(f"--engine {self.kind} is not known; choose pool or ray")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers {self.workers} is not at least 1")
        if self.kind == "pool" and self.address is not None:
            raise ValueError("--address is for a Ray cluster; add --engine ray")
        if self.kind == "ray" and self.workers is not None:
            raise ValueError("--workers is for the pool of this machine; leave out --engine ray")


@contextmanager
def connected(engine: Engine) -> Iterator[None]:
    """Hold the connection to the engine's cluster; raise SourceError if no cluster answers."""
    if engine.kind != "ray":
        yield
        return
    from data.preparation.engines.ray_cluster import connected as to_cluster

    with to_cluster(engine.address):
        yield


def run_engine(work: Work, numbers: Sequence[int], engine: Engine) -> int:
    """Do the tasks that are not done yet, in the order given; return how many these were.

    Raises the error of the first that fails.
    """
    work.require_same_versions()
    cost = {number: work.shard(number).cost for number in numbers}
    total, left = sum(cost.values()), []
    done_bytes = documents = tokens = broken = 0
    for number in numbers:
        receipt = work.receipt(number)
        if receipt is None:
            left.append(number)
            continue
        done_bytes += cost[number]
        documents += receipt.documents
        tokens += receipt.tokens
    if 0 < len(left) < len(numbers):
        say(f"continuing: {len(numbers) - len(left):,} of {len(numbers):,} parts are there already")
    with progress("tokenizing", total) as advance:

        def done(number: int, receipt: Receipt) -> None:
            nonlocal done_bytes, documents, tokens, broken
            done_bytes += cost[number]
            documents += receipt.documents
            tokens += receipt.tokens
            broken += receipt.skipped.get("broken", 0)
            advance(done_bytes, documents, tokens)
            require_below_count(work.facts, broken, receipt.examples)

        if not left:
            return 0
        if engine.kind == "ray":
            from data.preparation.engines.ray_cluster import run_on_ray

            run_on_ray(work, left, done, engine.address)
        elif engine.workers is None and sum(cost[number] for number in left) < SMALL_BYTES:
            from data.preparation.engines.in_process import run_here

            run_here(work, left, done)
        else:
            from data.preparation.engines.pool import cores, run_in_pool

            run_in_pool(work, left, done, engine.workers or cores())
    return len(left)
