# SPDX-License-Identifier: Apache-2.0
"""Documents of made-up words, for a rehearsal: the same on every machine, written in a second.

Words are made of syllables; a few are frequent and most are rare (Zipf), and each is followed by
few others. A document repeats a few names and numbers of its own, which a longer context can learn.
"""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from data.prepare import prepare
from data.store import Manifest

WORDS, FOLLOWERS, NAMES = 240, 12, 6
SHORT, LONG = 48, 16
"""Documents of 150 to 1,500 words and of `LONG_WORDS`."""
LONG_WORDS = 5800
"""More than 8,192 tokens, the longest context of a rehearsal."""
HELDOUT_FRACTION = 0.3


def made_up_documents(seed: int = 0) -> Iterator[str]:
    """Yield the documents, short and long ones in turn."""
    draw = random.Random(seed)
    syllables = [first + then for first in "bdfgklmnprstv" for then in ("a", "e", "i", "o", "un")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(WORDS)]
    often = [1 / rank for rank in range(1, WORDS + 1)]
    followers = {word: draw.choices(words, often, k=FOLLOWERS) for word in words}
    for number in range(SHORT + LONG):
        names = ["".join(draw.choices(syllables, k=3)).capitalize() for _ in range(NAMES)]
        names += [str(draw.randrange(10_000)) for _ in range(NAMES)]
        long = number % (1 + SHORT // LONG) == 0
        size = LONG_WORDS if long else draw.randint(150, 1500)
        yield "\n".join(_sentences(draw, words[0], followers, names, size))


def _sentences(
    draw: random.Random, word: str, followers: dict[str, list[str]], names: list[str], size: int
) -> Iterator[str]:
    """Yield sentences with this many words in all, a name in each."""
    while size > 0:
        length = draw.randint(5, 14)
        sentence = []
        for _ in range(length):
            word = draw.choice(followers[word])
            sentence.append(word)
        sentence[draw.randrange(length)] = draw.choice(names)
        size -= length
        yield " ".join(sentence) + "."


def prepare_made_up(out: Path, *, vocab_size: int) -> Manifest:
    """Write a store of the documents and return its manifest."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "made_up.jsonl"
        source.write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in made_up_documents())
        )
        return prepare(str(source), out, vocab_size=vocab_size, heldout_fraction=HELDOUT_FRACTION)
