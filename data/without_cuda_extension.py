# SPDX-License-Identifier: Apache-2.0
"""Leaves Megatron-Core's extension out of the process that imports this: a forkserver, first."""

from data.cuda_extension import prepare_process

prepare_process()
