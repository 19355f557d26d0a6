# SPDX-License-Identifier: Apache-2.0
"""The 13 tasks of the paper (arXiv 2404.06654, table 5; NVIDIA/RULER, `scripts/synthetic.yaml`)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.ruler.forms import COMMON_WORDS, FREQUENT_WORDS, QUESTION, VARIABLES, Form
from eval.ruler.length import Draft, RulerError
from eval.ruler.needles import NeedleDraft, Needles
from eval.ruler.questions import QuestionDraft
from eval.ruler.sources import Setting
from eval.ruler.variables import VariableDraft
from eval.ruler.word_lists import CommonWordsDraft, FrequentWordsDraft
from recipes.spec.suggest import did_you_mean

ALL = "all"


@dataclass(frozen=True, slots=True)
class Task:
    """A task: its published form, and how a sample is drawn."""

    name: str
    form: Form
    unit: str
    """The smallest amount by which a prompt is lengthened."""
    draft: Callable[[Setting, random.Random, int], Draft]
    """Returns the sample with this number."""


def _needles(name: str, needles: Needles) -> Task:
    unit = {"noise": "line of noise", "essay": "word of prose", "needles": "needle"}
    return Task(
        name,
        needles.form,
        unit[needles.haystack],
        lambda setting, draw, _: NeedleDraft(needles, setting, draw),
    )


_LIST = (
    _needles("niah_single_1", Needles(haystack="noise")),
    _needles("niah_single_2", Needles(haystack="essay")),
    _needles("niah_single_3", Needles(haystack="essay", value="uuids")),
    _needles("niah_multikey_1", Needles(haystack="essay", keys=4)),
    _needles("niah_multikey_2", Needles(haystack="needles")),
    _needles("niah_multikey_3", Needles(haystack="needles", key="uuids", value="uuids")),
    _needles("niah_multivalue", Needles(haystack="essay", values=4)),
    _needles("niah_multiquery", Needles(haystack="essay", queries=4)),
    Task("vt", VARIABLES, "line of noise", lambda setting, draw, _: VariableDraft(setting, draw)),
    Task(
        "cwe",
        COMMON_WORDS,
        "distinct word",
        lambda setting, draw, _: CommonWordsDraft(setting, draw),
    ),
    Task(
        "fwe",
        FREQUENT_WORDS,
        "drawn word",
        lambda setting, draw, _: FrequentWordsDraft(setting, draw),
    ),
    Task(
        "qa_1",
        QUESTION,
        "document",
        lambda setting, draw, number: QuestionDraft(setting.sources.single, setting, draw, number),
    ),
    Task(
        "qa_2",
        QUESTION,
        "document",
        lambda setting, draw, number: QuestionDraft(
            setting.sources.multiple, setting, draw, number
        ),
    ),
)
TASKS = {task.name: task for task in _LIST}
"""Every task by its name, in the paper's order."""


def named(names: Sequence[str]) -> list[Task]:
    """Return tasks by their names, in the paper's order; `all` means every one.

    Raises:
        RulerError: for an unknown name, with the nearest.
    """
    for name in names:
        if name != ALL and name not in TASKS:
            near = did_you_mean(name, [*TASKS, ALL])
            raise RulerError(f"no RULER task is called {name!r}; {near}")
    return [task for task in _LIST if ALL in names or task.name in names]
