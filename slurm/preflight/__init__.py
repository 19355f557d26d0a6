# SPDX-License-Identifier: Apache-2.0
"""Checks before a job trains: this machine, its ranks, and the links between them."""
