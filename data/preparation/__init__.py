# SPDX-License-Identifier: Apache-2.0
"""Prepare a store in parts: a frozen plan of shards, tasks with receipts, and a merge.

    plan      the input files with size and time of change, cut into shards of about equal bytes
    task      one shard to token files, and a receipt with their SHA-256, written last
    engine    which tasks run where: a pool of processes, a Ray cluster, or a range of numbers
    merge     the token files of all shards, in the order of the plan, to the files of the store

A task depends on its shard, the tokenizer and the split alone, so that any process may run it, or
run it again, at any time: the same plan gives the same store byte for byte.
"""
