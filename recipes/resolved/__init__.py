# SPDX-License-Identifier: Apache-2.0
"""Resolved recipes: overrides, checks, and what is read back out of them."""
