# SPDX-License-Identifier: Apache-2.0
"""Layouts, rotations and user files as text, and back."""
