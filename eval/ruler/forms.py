# SPDX-License-Identifier: Apache-2.0
"""The published form of each task: prompt, answer prefix, tokens to generate, metric.

The texts are the benchmark's data and are quoted as published, since another wording is another
benchmark. Source: NVIDIA/RULER (Apache-2.0), `scripts/data/synthetic/constants.py` and
`scripts/eval/synthetic/constants.py`. For one needle RULER changes the number of the needle texts
to singular (`niah.py`); both are written out here.
"""

from dataclasses import dataclass
from typing import Literal

Metric = Literal["all", "part"]
"""`all`: the share of the answers that the prediction contains; `part`: whether it contains any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a task asks. A prompt is the filled template followed by the filled prefix."""

    template: str
    prefix: str
    """Beginning of the answer, which the model continues."""
    new_tokens: int
    """Tokens that the model may generate."""
    metric: Metric = "all"


NEEDLE = "One of the special magic {values} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DOCUMENT = "Document {number}:\n{text}"
# fmt: off
ONE_NEEDLE = Form(
    template="A special magic {value} is hidden within the following text. Make sure to memorize it. I will quiz you about the {value} afterwards.\n{context}\nWhat is the special magic {value} for {query} mentioned in the provided text?",  # noqa: E501
    prefix=" The special magic {value} for {query} mentioned in the provided text is",
    new_tokens=128,
)
NEEDLES = Form(
    template="Some special magic {values} are hidden within the following text. Make sure to memorize it. I will quiz you about the {values} afterwards.\n{context}\nWhat are all the special magic {values} for {query} mentioned in the provided text?",  # noqa: E501
    prefix=" The special magic {values} for {query} mentioned in the provided text are",
    new_tokens=128,
)
VARIABLES = Form(
    template="Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all variables that are assigned the value {query} in the text above.",  # noqa: E501
    prefix=" Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the value {query}, they are: ",  # noqa: E501
    new_tokens=30,
)
COMMON_WORDS = Form(
    template="Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",  # noqa: E501
    prefix=" Answer: The top 10 words that appear most often in the list are:",
    new_tokens=120,
)
FREQUENT_WORDS = Form(
    template="Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words in the above coded text?",  # noqa: E501
    prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",  # noqa: E501
    new_tokens=50,
)
QUESTION = Form(
    template="Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other words.\n\nQuestion: {query}",  # noqa: E501
    prefix=" Answer:",
    new_tokens=32,
    metric="part",
)
# fmt: on
