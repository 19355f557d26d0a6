# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks: rounds, ranks, peers, facts of the machine, and pages of results."""
