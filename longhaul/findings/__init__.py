# SPDX-License-Identifier: Apache-2.0
"""Findings of a run."""
