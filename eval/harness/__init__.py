# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and exports in lm-evaluation-harness, the extra `eval`."""
