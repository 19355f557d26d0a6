# SPDX-License-Identifier: Apache-2.0
"""Metrics of the given suites, 0 to 1, as their dataset cards define them.

    mrcr         0 if the response does not begin with the random string, else
                 SequenceMatcher(None, response, answer).ratio(), without the string in both
    graphwalks   F1 of the set of nodes in the response's last line, "Final Answer: [a, b]"
    helmet-recall    1 if the response contains the value, else 0
    helmet-rag       1 if the first line of the response contains one of the answers, else 0
    helmet-rerank    NDCG@10 of the ranking in the first line, "ID > ID > ID"

An MRCR response is not stripped, and the ratio depends on the order of its arguments. For
GraphWalks two empty sets score 1, and a last line of another form scores 0. Line breaks after the
last line and quotation marks around a node do not count, as in lm-evaluation-harness. The card's
code leaves the text "Final Answer: [" on the first node and gives 1 where sets have nothing in
common; both are taken as slips.

HELMET compares texts as SQuAD does, and lets a response of RAG and re-ranking end at a line break.
NDCG is trec_eval's: a document of label l at place p gives l / log2(p + 1), the sum of ten is
divided by that of the best order. The longest run of numbers with ">" is the ranking; of a number
that is there twice the first place counts.
"""

import math
import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from eval.squad_text import normalized

MRCR, GRAPHWALKS = "mrcr", "graphwalks"
HELMET_RECALL, HELMET_RAG, HELMET_RERANK = "helmet-recall", "helmet-rag", "helmet-rerank"
FIRST = 10
"""Places that count in a ranking."""
RANKING = re.compile(r"\d+(?:\s*>\s*\d+)*")
LABELLED = re.compile(r"(\d+) (-?\d+)")
"""An output of re-ranking: the id of a document and its label."""
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


def contains(response: str, outputs: Sequence[str]) -> float:
    """Return 1 if the response contains one of the outputs, else 0."""
    text, plain = normalized(response), response.lower()
    words = [(normalized(output), output.lower()) for output in outputs]
    return float(any(word in text if word else whole in plain for word, whole in words))


def first_line_contains(response: str, outputs: Sequence[str]) -> float:
    """Return 1 if the first line of the response contains one of the outputs, else 0."""
    return contains(_first_line(response), outputs)


def ndcg(response: str, outputs: Sequence[str]) -> float:
    """Return NDCG@10 of a ranking; `outputs` are ids of documents, each with its label."""
    labels = {}
    for output in outputs:
        number, label = output.split()
        labels[number] = max(0, int(label))
    gains = [labels.get(number, 0) for number in ranking(_first_line(response))]
    best = _gain(sorted(labels.values(), reverse=True))
    return _gain(gains) / best if best else 0.0


def ranking(line: str) -> list[str]:
    """Return the numbers of the longest ranking in a line, each once."""
    runs = RANKING.findall(re.sub(r"[\[\]:]|id", "", line.lower()))
    return list(dict.fromkeys(re.findall(r"\d+", max(runs, key=len, default=""))))


def _gain(labels: Sequence[int]) -> float:
    return sum(label / math.log2(place + 1) for place, label in enumerate(labels[:FIRST], 1))


def _first_line(response: str) -> str:
    return response.lstrip().partition("\n")[0]


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    MRCR: sequence_ratio,
    GRAPHWALKS: node_f1,
    HELMET_RECALL: contains,
    HELMET_RAG: first_line_contains,
    HELMET_RERANK: ndcg,
}
"""The metric of each given suite."""


def well_formed(suite: str, outputs: Sequence[str]) -> bool:
    """Return whether a sample has the outputs that its suite's metric reads."""
    if suite == MRCR:
        return len(outputs) == 2 and outputs[1].startswith(outputs[0])
    if suite == HELMET_RERANK:
        return bool(outputs) and all(LABELLED.fullmatch(output) for output in outputs)
    return suite == GRAPHWALKS or bool(outputs)
