# SPDX-License-Identifier: Apache-2.0
"""Run the tasks of a plan: each engine takes numbers of shards and passes their receipts on."""
