# SPDX-License-Identifier: Apache-2.0
"""A package, so that spawned ranks find it: some distributions install a `tests` of their own."""
