# SPDX-License-Identifier: Apache-2.0
"""Question answering over many documents, of which one or two have the answer.

    Document 1: ... Document 2: ...  Question: Who finished the lighthouse of Bamiro? -> Sadoko Tevi

Units of haystack are documents: first those that the question needs, then those on its subject,
then drawn ones; when there are no more they are repeated. They are in a drawn order.
"""

import math
import random

import numpy as np

from eval.ruler.forms import DOCUMENT, QUESTION
from eval.ruler.length import Prompt
from eval.ruler.library import Library
from eval.ruler.sources import Setting

SEPARATOR = "\n\n"
HEAD = DOCUMENT.format(number=1000, text="") + SEPARATOR
"""What a document adds to its text, for the estimate."""
SAMPLED = 64
ROOM = 1.3
"""Documents drawn, in the number that is expected."""


class QuestionDraft:
    """A sample of one of the two tasks."""

    most = None

    def __init__(
        self, library: Library, setting: Setting, draw: random.Random, number: int
    ) -> None:
        """Choose the question, and the documents in the order in which they are added."""
        tokens = setting.tokens
        sampled = min(SAMPLED, library.documents(SAMPLED))
        mean = sum(tokens.of_parts([library.document(at) for at in range(sampled)])) / sampled
        wanted = math.ceil(ROOM * setting.budget / mean) + SAMPLED
        there = library.documents(wanted)
        question = library.question(number, there, f"{setting.seed} {setting.length}")
        first = [*question.needed, *draw.sample(question.near, len(question.near))]
        others = draw.sample(range(there), min(wanted, there))
        self._documents = [library.document(at) for at in dict.fromkeys([*first, *others])]
        self._order = draw.getrandbits(64)
        self._query = question.query
        self.outputs = question.outputs
        self.answer = " " + self.outputs[0]
        self.least = len(question.needed)
        of_head = tokens.of_part(HEAD)
        of_documents = np.array(tokens.of_parts(self._documents)) + of_head
        self._tokens = np.concatenate(([0], np.cumsum(of_documents)))
        self._bare = tokens.of_part(self._filled("").text)

    def estimate(self, units: int) -> float:
        """Return the estimated tokens with this many documents."""
        rounds, rest = divmod(units, len(self._documents))
        return float(self._bare + rounds * self._tokens[-1] + self._tokens[rest])

    def prompt(self, units: int) -> Prompt:
        """Return the prompt with this many documents."""
        there = len(self._documents)
        keys = random.Random(self._order)
        drawn = [keys.random() for _ in range(units)]
        order = sorted(range(units), key=drawn.__getitem__)
        texts = (
            DOCUMENT.format(number=number, text=self._documents[at % there])
            for number, at in enumerate(order, 1)
        )
        return self._filled(SEPARATOR.join(texts))

    def _filled(self, context: str) -> Prompt:
        words = {"context": context, "query": self._query}
        return Prompt(QUESTION.template.format(**words), QUESTION.prefix)
