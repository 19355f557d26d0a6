# SPDX-License-Identifier: Apache-2.0
"""Execution of recipes on clusters: executors and cluster files."""
