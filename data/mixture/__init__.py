# SPDX-License-Identifier: Apache-2.0
"""Which documents the steps of a stage train on: sources, lengths, weights that move."""
