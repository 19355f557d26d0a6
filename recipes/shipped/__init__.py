# SPDX-License-Identifier: Apache-2.0
"""The shipped recipes: their table, factories, and the choice of one by name."""
