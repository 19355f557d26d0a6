# SPDX-License-Identifier: Apache-2.0
"""Words and options that older releases had, each with what replaces it."""

from collections.abc import Sequence
from itertools import pairwise

GONE: dict[str, str] = {
    "plan --csv": "`longhaul plan CARD --seq 64K,256K --nodes 1,4 --json` prints the numbers",
    "plan --sweep": "`longhaul plan CARD --seq 64K,256K,1M --nodes 1,4,16` plans each",
    "rehearse --write-card": "`longhaul rehearse NAME --out RUN` writes RUN/rehearsal.json",
    **dict.fromkeys(
        (f"rehearse --{of}" for of in ("probe", "from", "tokens", "length", "documents", "json")),
        "`pretrain` with a small budget and `evaluate --base` show whether a base follows "
        "(docs/guide.md, Probe a base)",
    ),
    "watch": "`longhaul status RUN --follow` follows a run (docs/health.md has a line that alerts)",
    "census": "`longhaul data inspect STORE` counts documents by length",
    "mix": "`longhaul data inspect STORE LADDER` shows the mix of a stage, with --step N the "
    "documents of a step; `longhaul data inspect --run RUN` shows the stage as it ran",
    "sources": "docs/data.md lists public data sets, each with the `longhaul prepare` line",
    "tokenizers": "`longhaul data tokenizers A B --text PATH` compares tokenizers",
    "ruler convert": "docs/other_suites.md runs HELMET's and MRCR's own code on an export",
    "evaluate --suite scrolls": "docs/other_suites.md runs ZeroSCROLLS' own code on an export",
    "evaluate --backend": "`lm_eval --model vllm` evaluates an export (docs/other_suites.md)",
    "checkpoints": "`longhaul checkpoint` has the commands list, verify, prune, average and diff",
    "merge": "`longhaul checkpoint average A B --to FOLDER` averages two checkpoints",
    "reproduce": "`longhaul checkpoint diff CHECKPOINT` compares it with what is here; "
    "docs/reproducibility.md (Make it again) trains its recipe into another folder",
}
"""`word`, `word leaf`, `word --option` or that with a value, and what names the replacement."""


def refuse_gone(words: Sequence[str]) -> None:
    """Raise ValueError with the replacement if a command line has a word or option of before."""
    word, *rest = words
    leaf = next((given for given in rest if not given.startswith("-")), "")
    given = " ".join(rest).replace("=", " ").split(" ")
    pairs = [f"{option} {value}" for option, value in pairwise([*given, ""])]
    for gone in (word, *(f"{word} {one}" for one in (leaf, *given, *pairs))):
        if gone in GONE:
            raise ValueError(f"`longhaul {gone}` is not in this release; {GONE[gone]}")
