# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: rounds, ranks, peers, the machine and the page of results."""
