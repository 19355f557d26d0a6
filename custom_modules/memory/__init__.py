# SPDX-License-Identifier: Apache-2.0
"""Activation memory: recomputation and offload to the host."""
