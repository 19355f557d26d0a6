# SPDX-License-Identifier: Apache-2.0
"""What stands in for CUDA, NCCL and Transformer Engine where the device is a CPU."""
