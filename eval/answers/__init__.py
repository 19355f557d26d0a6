# SPDX-License-Identifier: Apache-2.0
"""Answers of a model: greedy generation, teacher forcing, passkeys and RULER samples."""
