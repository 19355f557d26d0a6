# SPDX-License-Identifier: Apache-2.0
"""Thresholds of the health checks, each with its reason; light.

A finding interrupts a person, so every check looks at several steps, and a value that a healthy run
reaches is no finding. Steps are counted in lines of `metrics.jsonl`.
"""

RECENT = 16
"""Steps that the checks of time look at: an evaluation or a save falls into a few of them."""
FEWEST = 8
"""Steps below which nothing is said: a median of fewer is one slow step."""
FIRST_STEPS = 2
"""Steps after a start that are left out: kernels compile, the data is opened."""
QUIET_STEPS = 8
"""Steps without a finding after which it has ended, so that one at its threshold does not flap."""

SLOW_RANK = 1.2
"""A rank's own time over that of the others. GPUs of one kind differ by some 5%, and documents of
different lengths by some 10%; a throttled GPU or a busy host costs 20% and more."""
SLOW_SHARE = 0.75
"""Share of the steps in which it has to be the same rank: noise falls on all of them."""

DATA_SHARE = 0.1
"""Share of the time spent waiting for data. Workers read ahead, so a healthy run waits for less
than 1%."""
DATA_STEPS = 3
"""Steps that have to wait for data: one alone may have opened a file."""
STALL_SECONDS = 30.0
"""One wait for data that is a finding by itself: no read of one batch takes as long."""

BUSY_SHARE = 0.5
"""Share of the time that a GPU runs a kernel, as NVML counts it. In training kernels are queued
without a gap: below one half, the GPU waits for its host. NCCL's kernels run while they wait for
other ranks, so exposed communication is not seen here."""

MEMORY_FIRST_STEPS = 16
"""Steps after a start in which memory is still being allocated: pools, caches, the first save."""
MEMORY_PARTS = 8
"""Parts of equal length whose smallest values are compared: a save or an evaluation raises memory
in one of them for some steps, a leak raises them all."""
MEMORY_STEPS = 6
"""Fewest steps of a part."""
MEMORY_LARGEST_RISE = 0.4
"""Share of the growth that one part may have: a buffer that is allocated late is one rise."""
MEMORY_GROWTH = 0.05
"""Growth over the parts, relative to the first; the allocator's fragments stay below it."""
MEMORY_BYTES = 64 * 2**20
"""Growth over the parts in bytes: less fills no machine within a stage."""

SPIKE_NATS = 1.0
"""Nats above the median of the steps before. The guard of the loss rewinds at 2."""
SPIKE_NOISE = 8.0
"""The same in units of the usual deviation from that median."""
SPIKE_BEFORE = 32
"""Steps whose median is the usual loss."""

DIVERGENCE_STEPS = (32, 256)
"""Fewest and most steps of a mean that is compared with the best; a sixth of those there are."""
DIVERGENCE_NATS = 0.05
"""Rise over the best mean, in nats. A stage improves its loss by some tenths as a whole."""
DIVERGENCE_NOISE = 5.0
"""The same in standard errors of the difference of two means."""

KEPT_LINES = 2048
"""Newest lines that are looked at: eight times the longest mean."""
CHECK_SECONDS = 1.0
"""Least time between two rounds of checks of a run in training: a round takes some milliseconds."""

FREE_BYTES = 16 * 2**20
"""Room on a run's file system below which it is full: no checkpoint fits, and soon no log."""

SILENT_SECONDS = 300.0
SILENT_STEPS = 10
"""A running stage that writes no line for this long, and for this many of its usual steps, hangs: a
save or an evaluation takes less. Before its first line it may take `SILENT_AT_START`."""
SILENT_AT_START = 3600.0
"""Loading a large checkpoint and compiling kernels take minutes; an hour is a fault."""
