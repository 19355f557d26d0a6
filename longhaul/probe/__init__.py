# SPDX-License-Identifier: Apache-2.0
"""Measurements on this machine: memory and context parallelism."""
