# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the longer context: loss by position, retrieval, and the report of a run."""
