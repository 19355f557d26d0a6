# SPDX-License-Identifier: Apache-2.0
"""Choose and run an engine, with its progress on stderr."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data.preparation.skip_limit import require_below_count
from data.preparation.work import Receipt, Work
from data.progress import progress

SMALL_BYTES = 2**26
"""Work of fewer bytes is done in this process: others would take longer to start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Where tasks run."""

    kind: Literal["pool", "ray"] = "pool"
    workers: int | None = None
    """Processes of the pool; None: one a processor, or none for a small source."""
    address: str | None = None
    """Of the Ray cluster; None: the one that this machine is part of."""

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


def run_engine(work: Work, numbers: Sequence[int], engine: Engine) -> None:
    """Do tasks in the order given; raise the error of the first that fails."""
    work.require_same_versions()
    cost = {number: work.shard(number).cost for number in numbers}
    total = sum(cost.values())
    done_bytes = documents = tokens = broken = 0
    with progress("tokenizing", total) as advance:

        def done(number: int, receipt: Receipt) -> None:
            nonlocal done_bytes, documents, tokens, broken
            done_bytes += cost[number]
            documents += receipt.documents
            tokens += receipt.tokens
            broken += receipt.skipped.get("broken", 0)
            advance(done_bytes, documents, tokens)
            require_below_count(work.facts, broken, receipt.examples)

        if not numbers:
            return
        if engine.kind == "ray":
            from data.preparation.engines.ray_cluster import run_on_ray

            run_on_ray(work, numbers, done, engine.address)
        elif engine.workers is None and total < SMALL_BYTES:
            from data.preparation.engines.in_process import run_here

            run_here(work, numbers, done)
        else:
            from data.preparation.engines.pool import cores, run_in_pool

            run_in_pool(work, numbers, done, engine.workers or cores())
