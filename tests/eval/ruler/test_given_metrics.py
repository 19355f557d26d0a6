# SPDX-License-Identifier: Apache-2.0
"""Metrics of MRCR and GraphWalks against values worked out by hand, and lm-eval's GraphWalks."""

import importlib.util
from pathlib import Path

import pytest

from eval.ruler.given_metrics import node_f1, sequence_ratio

LM_EVAL = importlib.util.find_spec("lm_eval")


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("Xyabcd", "Xyabcd", 1),
        ("Xyabzd", "Xyabcd", 0.75),  # 3 characters of 4 and 4 match: 2 * 3 / 8
        ("Xyabcdwxyz", "Xyabcd", 2 / 3),  # text after the answer: 2 * 4 / 12
        (" Xyabcd", "Xyabcd", 0),
        ("abcd", "Xyabcd", 0),
        ("", "Xyabcd", 0),
        ("Xy", "Xyabcd", 0),
        ("Xytide", "Xydiet", 0.25),  # of the documentation of difflib: 0.5 the other way round
        ("Xydiet", "Xytide", 0.5),
    ],
)
def test_mrcr_is_the_ratio_after_the_random_string(response, answer, expected):
    assert sequence_ratio(response, ("Xy", answer)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "nodes", "expected"),
    [
        ("Final Answer: [a, b]", ("b", "a"), 1),
        ("The parents are a and c.\nFinal Answer: [a,b,b]\n", ("a", "c"), 0.5),
        ("Final Answer: ['a', \"b\"]", ("a", "b", "c", "d"), 2 / 3),  # precision 1, recall 1/2
        ("Final Answer: [e]", ("a",), 0),
        ("Final Answer: [a]\nThat is all.", ("a",), 0),
        ("Final Answer: a", ("a",), 0),
        ("", ("a",), 0),
        ("Final Answer: []", ("a",), 0),
    ],
)
def test_graphwalks_is_the_f1_of_the_nodes(response, nodes, expected):
    assert node_f1(response, nodes) == pytest.approx(expected)
    if LM_EVAL is not None:
        assert of_lm_eval()({"answer_nodes": list(nodes)}, [response])["f1"] == pytest.approx(
            expected
        )


@pytest.mark.parametrize(
    ("response", "expected"),
    [("Final Answer: []", 1), ("Final Answer: [ ]\n", 1), ("Final Answer: [a]", 0), ("[]", 0)],
)
def test_no_node_is_an_answer_too(response, expected):
    assert node_f1(response, ()) == expected


def of_lm_eval():
    """Return the function of lm-eval's task, without importing its other tasks."""
    path = Path(LM_EVAL.origin).parent / "tasks" / "graphwalks" / "utils.py"
    spec = importlib.util.spec_from_file_location("graphwalks_of_lm_eval", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.process_results
