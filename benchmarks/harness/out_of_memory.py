# SPDX-License-Identifier: Apache-2.0
"""The reason for a table if a GPU has run out of memory."""

import torch

OUT_OF_MEMORY = "out of memory"
SENTENCES = 3
"""Of torch's message: what was asked for, what is free, and what this process has."""


def out_of_memory(raised: torch.OutOfMemoryError) -> str:
    """Return a reason with the sizes of torch's message."""
    sizes = str(raised).split(". ")[1 : 1 + SENTENCES]
    return f"{OUT_OF_MEMORY}: {'. '.join(sizes)}".rstrip(": ")
