# SPDX-License-Identifier: Apache-2.0
"""What is trained: model cards, stages, ladders of stages, layouts, and the recipe functions."""
