# SPDX-License-Identifier: Apache-2.0
"""The smallest length at which the harness makes a sample of its RULER tasks.

Below it the harness of 0.4.13 either finds no sample that fits, or searches for one without end
(vt, cwe, fwe). The prompts are measured by the harness's own functions, with the least haystack
that its search comes to:

    niah    as many units as needles        vt     10 lines of noise, and the solved example
    cwe     10 words                        fwe    27 words: each of three answers is there

The questions of `qa_squad` and `qa_hotpot` are downloaded; the harness itself says if none fits.
"""

import inspect
import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.harness.chat import tokenizer_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OF_RULER = "lm_eval.tasks.ruler."
SEARCHED = "max_seq_length="
"""What the harness says of a length in which no sample fits."""
FEWEST_NOISES, FEWEST_WORDS, FEWEST_DRAWN = 10, 10, 27
EXAMPLE_LENGTH, EXAMPLE_NOISES, HOPS = 500, 5, 4
FEWEST_CODED = 4
"""Words of a vocabulary of fwe: three answers, and the one that is noise."""
TOKENS_OF_CODED = 50
"""Tokens of a length for each word of the vocabulary."""


class SmallLengthError(ValueError):
    """A length that is too small for a task."""


def require_length(name: str, config: Mapping[str, Any], tokenizer: Path, length: int) -> None:
    """Raise SmallLengthError if a task of RULER cannot be made at a length.

    `tokenizer` is the folder of the tokenizer that counts.
    """
    made = config.get("custom_dataset")
    module = str(getattr(made, "__module__", ""))
    kind = module.removeprefix(OF_RULER).removesuffix("_utils")
    if kind == module or kind not in SMALLEST:
        return
    with redirect_stdout(io.StringIO()):  # the harness prints each step of its search
        smallest = SMALLEST[kind](made, tokenizer_in(tokenizer), length)
    if length < smallest:
        raise SmallLengthError(
            f"task {name} cannot be made at {length:,} tokens: its shortest prompt and the answer "
            f"take {smallest:,}; give at least that in --suite-lengths, or more where another "
            "sample is longer"
        )


def _tokens(tokenizer: "PreTrainedTokenizerBase", text: str) -> int:
    return len(tokenizer(text)["input_ids"])


def _default(function: Any, name: str) -> int:
    return int(inspect.signature(function).parameters[name].default)


def _niah(made: Any, tokenizer: "PreTrainedTokenizerBase", length: int) -> int:
    scope = made.__globals__
    generate = scope["generate_samples"]
    asked: dict[str, Any] = {}

    def recorded(haystack: Any, **given: Any) -> list[Any]:
        asked.update(inspect.signature(generate).bind(haystack, **given).arguments)
        return []

    scope["generate_samples"] = recorded
    try:
        made(max_seq_lengths=[length], tokenizer=tokenizer.name_or_path)
    finally:
        scope["generate_samples"] = generate
    write = generate.__globals__["generate_input_output"]
    known = inspect.signature(write).parameters
    counts = {"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1} | {
        name: value for name, value in asked.items() if name in known
    }
    counts["num_needle_k"] = max(counts["num_needle_k"], counts["num_needle_q"])
    needles = counts["num_needle_k"] * counts["num_needle_v"]
    text, _, _ = write(needles, **counts)
    return _tokens(tokenizer, text) + _default(generate, "tokens_to_generate")


def _vt(made: Any, tokenizer: "PreTrainedTokenizerBase", _: int) -> int:
    scope = made.__globals__
    write, search = scope["generate_input_output"], scope["sys_vartrack_w_noise_random"]
    answer = _default(search, "tokens_to_generate")
    text, _outputs = write(EXAMPLE_NOISES, 1, HOPS, is_icl=True)
    if (shortest := _tokens(tokenizer, text) + answer) > EXAMPLE_LENGTH:
        raise SmallLengthError(
            f"the solved example of RULER's vt takes {shortest:,} tokens of this tokenizer, more "
            f"than the {EXAMPLE_LENGTH} that the harness gives it; the task cannot be made"
        )
    [example] = search(
        tokenizer=tokenizer, num_samples=1, max_seq_length=EXAMPLE_LENGTH,
        incremental=EXAMPLE_NOISES,
    )  # fmt: skip
    solved = f"{example['input']} {' '.join(example['outputs'])}\n\n"
    text, outputs = write(FEWEST_NOISES, 1, HOPS)
    return answer + _tokens(tokenizer, solved) + _tokens(tokenizer, f"{text} {outputs}")


def _cwe(made: Any, tokenizer: "PreTrainedTokenizerBase", length: int) -> int:
    scope = made.__globals__
    example, text, answer = scope["generate_input_output"](FEWEST_WORDS, length)
    listed = " ".join(f"{number}. {word}" for number, word in enumerate(answer, 1))
    whole = _tokens(tokenizer, f"{example}\n{text} {listed}")
    return whole + _default(scope["sys_word_pair_random"], "tokens_to_generate")


def _fwe(made: Any, tokenizer: "PreTrainedTokenizerBase", length: int) -> int:
    text, _, _ = made.__globals__["generate_input_output"](
        max_len=2**40,
        tokenizer=tokenizer,
        num_words=FEWEST_DRAWN,
        vocab_size=max(length // TOKENS_OF_CODED, FEWEST_CODED),
    )
    return max(FEWEST_CODED * TOKENS_OF_CODED, _tokens(tokenizer, text))


SMALLEST: Mapping[str, Callable[[Any, "PreTrainedTokenizerBase", int], int]] = {
    "niah": _niah,
    "vt": _vt,
    "cwe": _cwe,
    "fwe": _fwe,
}
"""The smallest length of the tasks of a module, at which one sample fits."""
