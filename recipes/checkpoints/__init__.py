# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: complete ones, their files and checksums, and means of two."""
