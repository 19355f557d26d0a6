# SPDX-License-Identifier: Apache-2.0
"""Oracles: what a commit computes is compared with what the base commit computes here.

    python -m tests.oracles [--all] [--base COMMIT] [NAME...]

`__main__` runs the oracles of `quick` and `whole` on two trees, the base in a git worktree of its
own, and `compare` prints what differs. The oracles, their tables and the words are those of the
working tree; a tree is used by its command line (`command`), since its modules move.
"""
