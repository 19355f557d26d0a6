# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints read without running anything that a file names."""
