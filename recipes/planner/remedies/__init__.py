# SPDX-License-Identifier: Apache-2.0
"""Changes of a layout that make a stage fit in memory, and the overrides that apply them."""
