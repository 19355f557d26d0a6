# SPDX-License-Identifier: Apache-2.0
"""Health of a run: checks on the metrics of its steps, their findings, and alerts."""
