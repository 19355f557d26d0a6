# SPDX-License-Identifier: Apache-2.0
"""Small versions of a recipe for this machine, with the same kinds of parallelism."""
