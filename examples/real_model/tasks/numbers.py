# SPDX-License-Identifier: Apache-2.0
"""Documents of the task `longhaul_numbers`: a sentence with a number among many others."""

import random
from typing import Any

import datasets
from transformers import AutoTokenizer

LAKES = ("Arda", "Belo", "Corin", "Dune", "Elba", "Fenn", "Gola", "Hale")
FILLER = "The path along the shore is quiet, and few people walk there in winter. "
GENERATED = 8


def documents(
    *, max_seq_lengths: list[int], tokenizer: str, num_samples: int = 4, **_: Any
) -> dict[str, datasets.Dataset]:
    """Return prompts of at most each length, with the number that each asks for."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    draw = random.Random(0)
    rows = [document(words, length, draw) for length in max_seq_lengths for _ in range(num_samples)]
    return {"test": datasets.Dataset.from_list(rows)}


def document(tokenizer: Any, length: int, draw: random.Random) -> dict[str, str]:
    """Return one prompt; its sentences fill the length but for the generated tokens."""
    lake, number = draw.choice(LAKES), str(draw.randrange(1_000, 10_000))
    needle = f"The depth of Lake {lake} is {number} feet. "
    question = f"As written above, the depth of Lake {lake} is"
    taken = len(tokenizer.encode(needle + question)) + GENERATED
    count = (length - taken) // len(tokenizer.encode(FILLER))
    before = draw.randrange(count + 1)
    text = FILLER * before + needle + FILLER * (count - before) + question
    return {"text": text, "number": number}


def found(references: list[str], predictions: list[str]) -> float:
    """Return 1 if the number is in the generated text, else 0."""
    return float(references[0] in predictions[0])
