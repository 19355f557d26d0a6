# SPDX-License-Identifier: Apache-2.0
"""This machine as a place to run: nemo-run's local executor with torchrun."""

import os

import nemo_run as run

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def local_executor(ranks: int) -> run.LocalExecutor:
    """Return an executor of `ranks` processes on this machine, its cores shared out among them."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    said = os.environ.get(ALLOCATOR, "")
    return run.LocalExecutor(
        ntasks_per_node=ranks,
        launcher="torchrun",
        env_vars={
            "OMP_NUM_THREADS": str(threads),
            ALLOCATOR: allocator_settings(said),
            "PYTHONWARNINGS": "ignore",  # NeMo's and Megatron's imports print pages of them
            "HF_HUB_OFFLINE": "1",  # a run reads the tokenizer of its store, never the hub
            "TOKENIZERS_PARALLELISM": "false",
        },
    )


def allocator_settings(said: str) -> str:
    """Return torch's settings of its CUDA allocator: the user's own, and expandable segments.

    A segment that grows serves tensors of any size; fixed ones are left with holes, which at long
    sequences, whose tensors are gigabytes, cost memory that nothing can use.
    """
    if "expandable_segments:" in said:
        return said
    return ",".join(filter(None, (said, "expandable_segments:True")))
