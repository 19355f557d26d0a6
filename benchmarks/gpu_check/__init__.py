# SPDX-License-Identifier: Apache-2.0
"""Checks of the CUDA path on a machine without a GPU (`make gpu-check`).

    python -m benchmarks.gpu_check --out PAGE

1. `recipes`: every shipped GPU recipe is constructed at full size on fake CUDA, with Transformer
   Engine's modules, DDP and the optimizer; its bytes are compared with those of the planner.
2. `steps`: forward and backward of a micro-batch of each, on fake tensors at full width and length
   with two layers: shapes, dtypes, and where the host would wait for the device.
3. `kernels`: PyTorch's CUDA attention kernels, in the same way.
4. `engine`: Transformer Engine's modules with Python GEMMs against the plain spec's gradients.
5. `groups`: seconds and bytes of process groups in worlds of 1,024 to 16,384 ranks.

Nothing is computed on a GPU: whether kernels compute what they should, and how fast, stays open.
"""
