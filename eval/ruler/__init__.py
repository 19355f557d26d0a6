# SPDX-License-Identifier: Apache-2.0
"""RULER (arXiv 2404.06654) without a network: its 13 tasks as sample files, and their scores.

    task + tokenizer + length + seed  ->  a JSONL file of samples  ->  predictions  ->  scores

With text of our own the suite is named `ruler-offline`: its scores are not RULER's. With the three
files that RULER downloads it is named `ruler`. Nothing here imports torch; the
module that answers samples with a checkpoint is `eval.answers.ruler`.
"""
