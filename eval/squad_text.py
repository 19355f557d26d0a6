# SPDX-License-Identifier: Apache-2.0
"""Answers compared as SQuAD does (Rajpurkar et al., 2016, arXiv 1606.05250): case, punctuation and
articles do not count.

    F1 = 2 * shared words / (words of the prediction + words of the answer)
"""

import re
import string
from collections import Counter

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return a text in lower case without punctuation, articles and repeated white space."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def word_f1(prediction: str, answer: str) -> float:
    """Return the F1 of the words of two texts, 0 to 1."""
    first, second = normalized(prediction).split(), normalized(answer).split()
    shared = (Counter(first) & Counter(second)).total()
    return 2 * shared / (len(first) + len(second)) if shared else 0.0
