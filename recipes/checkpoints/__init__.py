# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: completeness markers, files, checksums and merging."""
