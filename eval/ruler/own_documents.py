# SPDX-License-Identifier: Apache-2.0
"""Documents of our own: made-up towns and the people who built in them, with questions.

    Bamiro                                        Sadoko Tevi
    ... The lighthouse of Bamiro was finished     Sadoko Tevi was born in Mefalu. ...
    in 1874 by Sadoko Tevi. ...

    one document:   Who finished the lighthouse of Bamiro?                       Sadoko Tevi
    two documents:  In which town was the person born who finished the           Mefalu
                    lighthouse of Bamiro?

Documents 2n and 2n + 1 are a town and its builder. All names are made up, so no model knows the
answers; every name occurs in these two documents only.
"""

import random
from collections.abc import Iterator

from data.long_range.documents import distinct_names
from data.long_range.filler import sentence
from eval.ruler.library import Question

SEED = "documents of ruler-offline"
LANDMARKS = (
    "lighthouse", "town hall", "stone bridge", "observatory", "theatre", "water tower", "harbour",
    "railway station", "museum", "clock tower", "library", "market hall",
)  # fmt: skip
PLACES = (
    "on the coast",
    "in the hills",
    "on a river",
    "near the border",
    "at a lake",
    "on a plain",
)
TRADES = ("engineer", "architect", "mason", "carpenter", "surveyor", "shipbuilder")
SENTENCES = (2, 6)
"""Made-up sentences of a document, fewest and most."""


class OwnLibrary:
    """As many made-up documents as are asked for, the same for every sample."""

    def __init__(self, hops: int) -> None:
        """Ask about one document or about two."""
        self._hops = hops
        self._coming = _documents()
        self._texts: list[str] = []
        self._questions: list[tuple[tuple[str, str], ...]] = []

    def documents(self, wanted: int) -> int:
        """Return the number of documents: the wanted one, rounded up to whole pairs."""
        pairs = max(1, -(-wanted // 2))
        while len(self._questions) < pairs:
            texts, questions = next(self._coming)
            self._texts += texts
            self._questions.append(questions)
        return 2 * pairs

    def document(self, number: int) -> str:
        """Return the text of a document."""
        return self._texts[number]

    def question(self, number: int, documents: int, seed: str) -> Question:
        """Return a question about a pair that the seed draws."""
        draw = random.Random(f"{seed} {self._hops} {number}")
        pair = draw.randrange(documents // 2)
        town, person = 2 * pair, 2 * pair + 1
        *single, both = self._questions[pair]
        if self._hops == 2:
            return Question(both[0], (both[1],), (town, person))
        at = draw.randrange(len(single))
        query, answer = single[at]
        # The last of them is about the person, the others are about the town.
        return Question(query, (answer,), (person if at == len(single) - 1 else town,))


def _documents() -> Iterator[tuple[tuple[str, str], tuple[tuple[str, str], ...]]]:
    """Yield a town's and a person's document with their questions, without end."""
    draw = random.Random(SEED)
    names = distinct_names(draw)
    while True:
        town, first, last, birth = (next(names).capitalize() for _ in range(4))
        landmark, person = draw.choice(LANDMARKS), f"{first} {last}"
        year, trade = draw.randrange(1650, 1950), draw.choice(TRADES)
        of_town = [
            f"{town} is a town {draw.choice(PLACES)}.",
            f"The {landmark} of {town} was finished in {year} by {person}.",
        ]
        of_person = [
            f"{person} was born in {birth}.",
            f"{person} worked as {_with_article(trade)}.",
        ]
        texts = (_text(draw, town, of_town), _text(draw, person, of_person))
        yield (
            texts,
            (
                (f"In which year was the {landmark} of {town} finished?", str(year)),
                (f"Who finished the {landmark} of {town}?", person),
                (f"In which town was {person} born?", birth),
                (
                    f"In which town was the person born who finished the {landmark} of {town}?",
                    birth,
                ),
            ),
        )


def _text(draw: random.Random, title: str, facts: list[str]) -> str:
    """Return a document: a title, and its facts in order between made-up sentences."""
    lines = [sentence(draw) for _ in range(draw.randint(*SENTENCES))]
    for fact, at in zip(facts, sorted(draw.choices(range(len(lines) + 1), k=2)), strict=True):
        lines.insert(at + facts.index(fact), fact)
    return f"{title}\n{' '.join(lines)}"


def _with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
