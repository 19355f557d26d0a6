# SPDX-License-Identifier: Apache-2.0
"""Constraints that a layout or a training setting violates, as functions of numbers."""
