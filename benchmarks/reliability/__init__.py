# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of faults: runs that survive them, damage that is found, and messages about them."""
