# SPDX-License-Identifier: Apache-2.0
"""Token files that other tools wrote, made into a store without a copy of their tokens."""
