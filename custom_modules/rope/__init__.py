# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings: the configuration of each method, its frequencies and positions."""
