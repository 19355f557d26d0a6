# SPDX-License-Identifier: Apache-2.0
"""Documents that repeat a passage, and documents that ask about one of several documents."""

import random
import re
from collections.abc import Iterator
from itertools import chain
from itertools import count as counting

from data.long_range.composition import (
    Count,
    LongDocument,
    Query,
    characters_per_token,
    fitted,
    located,
)
from data.long_range.filler import Filler, Stream, line_end
from data.long_range.spec import LongRangeError, Spec

JOINED = 4
"""Documents that are joined at the least: a longer one is cut to this part of the whole."""
ASKED_WITHIN = (0.5, 0.25, 0.125)
"""Parts of the joined documents, from their beginning, that are asked about; the next one where
the documents turn out to be shorter in characters than estimated."""
SENTENCE = re.compile(r"[^\n]+?(?:[.!?](?=\s)|(?=\n)|$)")
SHORTEST_SENTENCE, LONGEST_SENTENCE = 20, 240
"""Characters of a sentence that is quoted or asked for."""
DRAWS = 256
"""Sentences that are looked at for each question."""


def copied_passage(
    spec: Spec, draw: random.Random, filler: Filler, *, length: int, count: Count, what: str
) -> LongDocument:
    """Return a passage, filler, and the passage again."""
    passages, between = filler.stream(draw), filler.stream(random.Random(draw.random()))
    rate = characters_per_token(passages, spec.passage, count)
    passage = passages.take(round(spec.passage * rate)).strip()
    number = draw.randrange(1000, 10_000)
    first = f"Passage {number}:\n{passage}\nEnd of passage {number}.\n\n"
    query = Query(f"\n\nPassage {number} again:\n", passage, (passage,))

    def build(characters: int, exactly: bool) -> str:
        return first + between.take(characters, exactly) + query.text

    rate = characters_per_token(between, length, count)
    _, text = fitted(build, length=length, rate=rate, count=count, what=what)
    return LongDocument(text, located(text, (query,)))


def asked_documents(
    spec: Spec, draw: random.Random, filler: Filler, *, length: int, count: Count, what: str
) -> LongDocument:
    """Return documents one after another, then questions about sentences of some of them."""
    rate = characters_per_token(filler.stream(random.Random(draw.random())), length, count)
    whole = round(length * rate)
    following = _numbered(filler, draw, whole // JOINED)
    documents: list[str] = []
    while sum(map(len, documents)) < whole:
        documents.append(next(following))
    joined = Stream(chain(documents, following))
    for part in ASKED_WITHIN:
        body = joined.take(round(part * whole))
        questions = _questions(spec, draw, documents, body, what)
        closing = "\n\n" + "".join(question.text for question in questions)

        def build(characters: int, exactly: bool, closing: str = closing) -> str:
            return joined.take(characters, exactly) + closing

        characters, text = fitted(build, length=length, rate=rate, count=count, what=what)
        if characters >= len(body):
            return LongDocument(text, located(text, questions))
    raise LongRangeError(
        f"{what}: {spec.queries} questions take more than half of {length:,} tokens; ask fewer, or"
        " give a greater length"
    )


def _numbered(filler: Filler, draw: random.Random, longest: int) -> Iterator[str]:
    """Yield documents with a number above each, cut at a line end to at most this length."""
    texts = filler.documents(draw)
    for number in counting(1):
        text = next(texts).strip("\n")
        yield f"Document {number}:\n{text[: line_end(text, longest)]}"


def _questions(
    spec: Spec, draw: random.Random, documents: list[str], body: str, what: str
) -> tuple[Query, ...]:
    """Return questions about sentences that are in the body, and there only once."""
    asked: list[Query] = []
    used: set[str] = set()
    sentences: dict[int, list[str]] = {}
    reached, end = 0, 0
    while reached < len(documents) and end + len(documents[reached]) <= len(body):
        end += len(documents[reached].strip("\n")) + 2
        reached += 1
    for _ in range(DRAWS * spec.queries):
        if len(asked) == spec.queries:
            break
        number = draw.randrange(max(reached, 1))
        if number not in sentences:
            _, _, text = documents[number].partition("\n")
            sentences[number] = [found[0].strip() for found in SENTENCE.finditer(text)]
        of = sentences[number]
        if len(of) < 2:
            continue
        place = draw.randrange(len(of) - 1)
        quoted, answer = of[place], of[place + 1]
        fits = all(SHORTEST_SENTENCE <= len(one) <= LONGEST_SENTENCE for one in (quoted, answer))
        once = used.isdisjoint((quoted, answer)) and body.count(quoted) == 1
        if fits and once and answer in body[body.index(quoted) + len(quoted) :]:
            prompt = f'In document {number + 1}, what follows "{quoted}"?\n'
            asked.append(Query(prompt, answer, (quoted, answer)))
            used |= {quoted, answer}
    if len(asked) < spec.queries:
        raise LongRangeError(
            f"{what}: the filler has too few sentences of {SHORTEST_SENTENCE} to"
            f" {LONGEST_SENTENCE} characters to ask {spec.queries} questions about; choose another"
            " filler, a greater length or fewer questions"
        )
    return tuple(asked)
