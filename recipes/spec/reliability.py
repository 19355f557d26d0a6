# SPDX-License-Identifier: Apache-2.0
"""Constants of the goodput model: how often nodes fail, and how long a job takes to continue.

State what you know of your machines in your cluster file:

    hardware:
      reliability: {node_mtbf_hours: 3700, checkpoint_gbps: 40}
"""

import math
from dataclasses import dataclass, fields

LEAST_GBPS, GBPS_PER_NODE = 1.0, 0.2
"""Rate of checkpoints where none is stated, an assumption: a file server behind one 10 Gb/s port,
or a parallel file system that grows with the cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """Failures, and the times that saving, queueing and starting take."""

    node_mtbf_hours: float = 6_300.0
    """Mean time between failures of a node that end its job. Llama 3 405B (arXiv 2407.21783): 419
    unexpected interruptions of 2,048 nodes in 54 days."""
    checkpoint_gbps: float = 0.0
    """GB/s that checkpoints are written and read at, all nodes together; 0 if not stated."""
    requeue_seconds: float = 300.0
    """From the end of a failed job to the start of its ranks: queue and node checks."""
    start_seconds: float = 600.0
    """From there to the first step: imports, process groups, kernels that compile."""

    def __post_init__(self) -> None:
        """Raise ValueError for a negative or infinite value, or no time between failures."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{field.name} is {value}; it must be at least 0, and finite")
        if not self.node_mtbf_hours:
            raise ValueError("node_mtbf_hours is 0; it must be positive")

    def bytes_per_second(self, nodes: int) -> float:
        """Return the rate of checkpoints; if it is not stated, a modest one for so many nodes."""
        return (self.checkpoint_gbps or max(LEAST_GBPS, GBPS_PER_NODE * nodes)) * 1e9
