# SPDX-License-Identifier: Apache-2.0
"""Metrics of the given suites, 0 to 1, as their dataset cards define them.

    mrcr         0 if the response does not begin with the random string, else
                 SequenceMatcher(None, response, answer).ratio(), without the string in both
    graphwalks   F1 of the set of nodes in the response's last line, "Final Answer: [a, b]"

An MRCR response is not stripped, and the ratio depends on the order of its arguments. For
GraphWalks two empty sets score 1, and a last line of another form scores 0. Line breaks after the
last line and quotation marks around a node do not count, as in lm-evaluation-harness. The card's
code leaves the text "Final Answer: [" on the first node and gives 1 where sets have nothing in
common; both are taken as slips.
"""

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

MRCR, GRAPHWALKS = "mrcr", "graphwalks"
FINAL = re.compile(r"Final Answer:\s*\[(.*)\]")


def sequence_ratio(response: str, outputs: Sequence[str]) -> float:
    """Return MRCR's score; `outputs` are the random string and the answer that begins with it."""
    prefix, answer = outputs
    if not response.startswith(prefix):
        return 0.0
    own, expected = response.removeprefix(prefix), answer.removeprefix(prefix)
    return SequenceMatcher(None, own, expected).ratio()


def node_f1(response: str, outputs: Sequence[str]) -> float:
    """Return GraphWalks' score; `outputs` are the nodes, possibly none."""
    nodes = final_nodes(response)
    if nodes is None:
        return 0.0
    expected = set(outputs)
    if not nodes and not expected:
        return 1.0
    return 2 * len(nodes & expected) / (len(nodes) + len(expected))


def final_nodes(response: str) -> set[str] | None:
    """Return the nodes in the last line of a response; None if it has no list of them."""
    listed = FINAL.search(response.rstrip("\n").rpartition("\n")[2])
    if listed is None:
        return None
    return {word.strip().strip("'\"") for word in listed[1].split(",") if word.strip()}


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    MRCR: sequence_ratio,
    GRAPHWALKS: node_f1,
}
"""The metric of each given suite."""


def well_formed(suite: str, outputs: Sequence[str]) -> bool:
    """Return whether a sample has the outputs that its suite's metric reads."""
    return suite != MRCR or (len(outputs) == 2 and outputs[1].startswith(outputs[0]))
