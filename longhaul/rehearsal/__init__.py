# SPDX-License-Identifier: Apache-2.0
"""Rehearsals of a recipe at a small size."""
