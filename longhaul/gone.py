# SPDX-License-Identifier: Apache-2.0
"""Words and options that older releases had, each with what replaces it."""

from collections.abc import Sequence

GONE: dict[str, str] = {
    "ruler convert": "docs/other_suites.md runs HELMET's and MRCR's own code on an export",
    "evaluate --backend": "`lm_eval --model vllm` evaluates an export (docs/other_suites.md)",
}
"""`word`, `word leaf` or `word --option`, and a sentence that names the replacement."""


def refuse_gone(words: Sequence[str]) -> None:
    """Raise ValueError with the replacement if a command line has a word or option of before."""
    word, *rest = words
    options = [given.partition("=")[0] for given in rest if given.startswith("--")]
    for gone in (word, " ".join(words[:2]), *(f"{word} {option}" for option in options)):
        if gone in GONE:
            raise ValueError(f"`longhaul {gone}` is not in this release; {GONE[gone]}")
