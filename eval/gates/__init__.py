# SPDX-License-Identifier: Apache-2.0
"""The gate of a stage: thresholds of loss, retrieval and suites, judged with their errors."""
