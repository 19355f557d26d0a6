# SPDX-License-Identifier: Apache-2.0
"""Where a recipe runs: executors and cluster files."""
