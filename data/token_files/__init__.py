# SPDX-License-Identifier: Apache-2.0
"""Megatron's token files: their index, their content, and damage to either."""
