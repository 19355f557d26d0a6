# SPDX-License-Identifier: Apache-2.0
"""Model cards, stages, ladders of stages, layouts, and the functions that build recipes."""
