# SPDX-License-Identifier: Apache-2.0
"""Checks of one node: GPUs, topology, host, network, versions, file systems."""
