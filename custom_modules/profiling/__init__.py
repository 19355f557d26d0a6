# SPDX-License-Identifier: Apache-2.0
"""Measured memory: bytes of live tensors by operator and by category."""
