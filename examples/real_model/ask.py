# SPDX-License-Identifier: Apache-2.0
"""Let a model complete a sentence from the beginning of a prompt of 12K tokens, by transformers.

    python -m examples.real_model.ask models/smollm2_135m_16k

The prompt is the source of a module of Python's standard library with one sentence of another
subject in it, and ends with the first words of that sentence. What each model that is named
continues with, greedily and to the end of the line, is printed.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

from data.files.whole import write_text

BEGINNING = "The lighthouse on the island of Fenwick is kept by"
SENTENCE = f"{BEGINNING} Mara Falk and her two brothers."
DEPTH = 0.2


def main() -> None:
    """Read the command line, ask and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    parser.add_argument("--tokens", type=int, default=12 * 1024, help="length of the prompt")
    parser.add_argument("--depth", type=float, default=DEPTH, help="depth of the sentence, 0 to 1")
    parser.add_argument("--out", type=Path, help="file to write the answers to as well")
    given = parser.parse_args()
    if not 0 <= given.depth <= 1:
        sys.exit(f"error: --depth is {given.depth:g}; it is a share of the prompt, from 0 to 1")
    for folder in given.models:
        if not (folder / "config.json").is_file():
            sys.exit(f"error: {folder} is not a Hugging Face folder: it has no config.json")
    lines = []
    for folder in given.models:
        try:
            length, answer = ask(folder, given.tokens, given.depth)
        except ValueError as error:
            sys.exit(f"error: {error}")
        lines.append(f"{folder}, after {length:,} tokens: {answer}")
        print(lines[-1])
    if given.out is not None:
        write_text(given.out, "\n".join(lines) + "\n")


def ask(folder: Path, tokens: int, depth: float) -> tuple[int, str]:
    """Return the length of the prompt in tokens and the sentence as the model completes it.

    Raises ValueError for a number of tokens that no prompt of the module can have.
    """
    warnings.simplefilter("ignore")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([prompt_of(tokenizer, tokens, depth)])
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False
        )
    answer = tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
    return prompt.shape[1], f"{BEGINNING}{answer.partition(chr(10))[0]}"


def prompt_of(tokenizer: Any, tokens: int, depth: float) -> list[int]:
    """Return a prompt of `tokens` tokens, with the sentence at a depth and its beginning last.

    Raises ValueError if the two do not fit, and if the module is shorter than that.
    """
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    words = tokenizer.encode(text, add_special_tokens=False)
    sentence = tokenizer.encode(f"\n# {SENTENCE}\n", add_special_tokens=False)
    last = tokenizer.encode(f"\n# {BEGINNING}", add_special_tokens=False)
    room = tokens - len(sentence) - len(last)
    if not 0 <= room <= len(words):
        least, most = tokens - room, tokens - room + len(words)
        raise ValueError(f"--tokens is {tokens:,}; it can be {least:,} to {most:,}")
    before = round(depth * room)
    return [*words[:before], *sentence, *words[before:room], *last]


if __name__ == "__main__":
    main()
