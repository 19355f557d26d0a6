# SPDX-License-Identifier: Apache-2.0
"""Search for the layouts of a stage on a given number of GPUs.

request             the question: model, length, batch, cluster, GPUs
parallel_sizes      all sizes of TP, CP, PP and DP, with the kinds of context parallelism
memory_settings     recompute x tiling x offload x sharding x Adam on the host, for each of them
ranking             the layouts that fit, by their time, and whether any fits
alternatives        what to change if none fits: GPUs, batch or length
"""
