# SPDX-License-Identifier: Apache-2.0
"""Words and options that older releases had, each with what replaces it."""

from collections.abc import Sequence

GONE: dict[str, str] = {
    "checkpoints": "`longhaul checkpoint` has the commands list, verify, prune and average",
    "merge": "`longhaul checkpoint average A B --to FOLDER` averages two checkpoints",
    "reproduce": "`longhaul checkpoint diff CHECKPOINT` compares it with what is here, and "
    "CHECKPOINT/reproduce/config.yaml is its recipe",
}
"""`word`, `word leaf` or `word --option`, and a sentence that names the replacement."""


def refuse_gone(words: Sequence[str]) -> None:
    """Raise ValueError with the replacement if a command line has a word or option of before."""
    word, *rest = words
    options = [given.partition("=")[0] for given in rest if given.startswith("--")]
    for gone in (word, " ".join(words[:2]), *(f"{word} {option}" for option in options)):
        if gone in GONE:
            raise ValueError(f"`longhaul {gone}` is not in this release; {GONE[gone]}")
