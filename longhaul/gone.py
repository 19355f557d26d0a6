# SPDX-License-Identifier: Apache-2.0
"""Words and options that older releases had, each with what replaces it."""

from collections.abc import Sequence

GONE: dict[str, str] = {
    "plan --csv": "`longhaul plan CARD --seq 64K,256K --nodes 1,4 --json` prints the numbers",
    "plan --sweep": "`longhaul plan CARD --seq 64K,256K,1M --nodes 1,4,16` plans each",
    "rehearse --write-card": "`longhaul rehearse NAME --out RUN` writes RUN/rehearsal.json",
    "rehearse --probe": "`pretrain` with a small budget and `evaluate --base` show the same "
    "(docs/guide.md, Probe a base)",
    "watch": "`longhaul status RUN --follow` follows a run",
    "census": "`longhaul data inspect STORE` counts documents by length",
    "mix": "`longhaul data inspect STORE LADDER` shows the mix of a stage, with --step N the "
    "documents of a step; `longhaul data inspect --run RUN` shows the stage as it ran",
    "sources": "docs/data.md lists public data sets, each with the `longhaul prepare` line",
    "tokenizers": "`longhaul data tokenizers A B --text PATH` compares tokenizers",
    "ruler convert": "docs/other_suites.md runs HELMET's and MRCR's own code on an export",
    "evaluate --backend": "`lm_eval --model vllm` evaluates an export (docs/other_suites.md)",
    "checkpoints": "`longhaul checkpoint` has the commands list, verify, prune, average and diff",
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
