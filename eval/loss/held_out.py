# SPDX-License-Identifier: Apache-2.0
"""Held-out documents of a store that are long enough to evaluate on."""

from itertools import islice

import numpy as np
from numpy.typing import NDArray

from data.store import Manifest
from data.token_files.held_out import documents_in_turn


def held_out(manifest: Manifest, least: int, documents: int) -> list[NDArray[np.int64]]:
    """Return the documents of `held_out_in_turn`."""
    return [text for _, text in held_out_in_turn(manifest, least, documents)]


def held_out_in_turn(
    manifest: Manifest, least: int, documents: int
) -> list[tuple[str, NDArray[np.int64]]]:
    """Return held-out documents of at least `least` tokens and their sources, which take turns.

    Raises ValueError if there are none.
    """
    texts = list(islice(documents_in_turn(manifest, min_tokens=least), documents))
    if not texts:
        raise ValueError(
            f"{manifest.root} has no held-out document of {least:,} tokens to evaluate on"
        )
    return texts
