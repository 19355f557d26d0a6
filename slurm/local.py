# SPDX-License-Identifier: Apache-2.0
"""This machine as a place to run: nemo-run's local executor with torchrun."""

import os

import nemo_run as run


def local_executor(ranks: int) -> run.LocalExecutor:
    """Return an executor of `ranks` processes on this machine, its cores shared out among them."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return run.LocalExecutor(
        ntasks_per_node=ranks,
        launcher="torchrun",
        env_vars={
            "OMP_NUM_THREADS": str(threads),
            "PYTHONWARNINGS": "ignore",  # NeMo's and Megatron's imports print pages of them
            "HF_HUB_OFFLINE": "1",  # a run reads the tokenizer of its store, never the hub
            "TOKENIZERS_PARALLELISM": "false",
        },
    )
