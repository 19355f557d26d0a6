# SPDX-License-Identifier: Apache-2.0
"""Replacements of CUDA, NCCL and Transformer Engine on a CPU."""
