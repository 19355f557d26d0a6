# SPDX-License-Identifier: Apache-2.0
"""Documents are found again by reading them as text, without the offsets that come with them."""

import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from data.long_range.documents import SyntheticSource, filler_of, fitted, long_document, tolerance
from data.long_range.filler import Filler, Stream
from data.long_range.spec import LongRangeError, Spec
from data.tokenization.tokenizer import DocumentTokenizer
from tests.house.rooms import TREE

EVERY_KIND = (
    "retrieval,keys=8,queries=3",
    "retrieval,keys=8,queries=3,form=code",
    "variables,chains=3,hops=2",
    "variables,chains=3,hops=2,form=code",
    "copy,passage=100",
)
FILES = sorted((TREE / "data").glob("*.py"))


@pytest.fixture(scope="module")
def code() -> Filler:
    """Return filler of real files, whose tokens are of uneven length."""
    return Filler([file.read_text() for file in FILES])


def document(words: str, number: int, tokenizer: DocumentTokenizer, filler: Filler | None = None):
    return long_document(
        Spec.parse(f"synthetic:{words}"), number, tokenizer.count, filler or Filler()
    )


@pytest.mark.parametrize("real", [False, True], ids=["made-up filler", "real filler"])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_documents_have_their_length_and_are_never_longer(
    kind: str, real: bool, tokenizer: DocumentTokenizer, code: Filler
) -> None:
    for number in range(6):
        text = document(f"{kind},length=4K", number, tokenizer, code if real else None)
        with_end = tokenizer.encode_documents([text])[0].size + 1
        assert 4096 - 80 <= with_end <= 4096, number


def test_lengths_are_drawn_between_the_two_that_are_given(tokenizer: DocumentTokenizer) -> None:
    sizes = [
        tokenizer.count(document("retrieval,length=1K-8K", n, tokenizer)) + 1 for n in range(30)
    ]
    assert all(1024 - 32 <= size <= 8192 for size in sizes)
    by_doubling = Counter((size // 1024).bit_length() for size in sizes)
    assert set(by_doubling) >= {1, 2, 3}
    assert max(by_doubling.values()) <= 18


def test_each_key_of_a_retrieval_document_is_found_once_before_it_is_asked_for(
    tokenizer: DocumentTokenizer, code: Filler
) -> None:
    words = "retrieval,keys=6,queries=4,length=2K,form=code"
    for number in range(8):
        text = document(words, number, tokenizer, code)
        asked = re.findall(r"^assert ([A-Z]+) == (\d{5})\n", text[-300:], re.MULTILINE)
        assert len(asked) == 4
        for name, value in asked:
            places = [found.start() for found in re.finditer(rf"^{name} = {value}$", text, re.M)]
            assert len(places) == 1, name
            assert places[0] < text.index("assert ")


def test_an_assignment_follows_the_one_that_it_refers_to(tokenizer: DocumentTokenizer) -> None:
    for number in range(8):
        text = document("variables,chains=3,hops=3,length=2K,form=code", number, tokenizer)
        variables: dict[str, str] = {}
        for name, value in re.findall(r"^(\w+) = (\w+)$", text, re.M):
            variables[name] = variables.get(value, value)
        asked = re.findall(r"^assert (\w+) == (\d{5})$", text, re.M)
        assert len(variables) == 12
        assert len(asked) == 1
        assert variables[asked[0][0]] == asked[0][1]


def test_a_passage_is_repeated_word_for_word_behind_the_filler(
    tokenizer: DocumentTokenizer, code: Filler
) -> None:
    text = document("copy,length=4K,passage=200", 0, tokenizer, code)
    number, passage = re.match(r"Passage (\d+):\n(.*?)\nEnd of", text, re.DOTALL).groups()
    again = text.index(f"Passage {number} again:\n")
    assert text[again:] == f"Passage {number} again:\n{passage}\n"
    assert 150 <= tokenizer.count(passage) <= 250
    assert tokenizer.count(text[:again]) > 4096 - 80 - 250


def test_no_document_says_passkey_which_evaluations_ask_for(tokenizer: DocumentTokenizer) -> None:
    for number in range(20):
        text = document("retrieval,keys=50,length=4K,form=code", number, tokenizer)
        assert "PASSKEY" not in text


DIGESTS = """
import hashlib, sys
from data.long_range.filler import Filler
from data.long_range.documents import long_document
from data.long_range.spec import Spec
numbers = [int(word) for word in sys.argv[2:]]
filler = Filler(["one line of text\\nand another, longer one\\n" * 40, "a second text. " * 90])
for kind in sys.argv[1].split(" "):
    for fill in (Filler(), filler):
        spec = Spec.parse(f"synthetic:{kind},length=1K-4K,seed=7")
        for n in numbers:
            text = long_document(spec, n, lambda text: len(text) // 3, fill)
            print(kind, bool(fill.texts), n, hashlib.sha256(text.encode()).hexdigest())
"""


def test_a_document_is_the_same_in_every_process_and_every_range() -> None:
    def digests(hash_seed: str, *numbers: int) -> list[str]:
        return subprocess.run(
            [sys.executable, "-c", DIGESTS, " ".join(EVERY_KIND), *map(str, numbers)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TREE)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()

    forwards, backwards = digests("1", 0, 1, 2, 3, 4, 5), digests("2", 5, 3, 1)
    assert len({line.split()[-1] for line in forwards}) == len(forwards) == 6 * 10
    assert len(backwards) == 3 * 10
    assert set(backwards) < set(forwards)


def test_another_seed_gives_other_documents(tokenizer: DocumentTokenizer) -> None:
    texts = {
        document(f"{kind},length=1K,seed={seed}", 0, tokenizer)
        for kind in EVERY_KIND
        for seed in (0, 1)
    }
    assert len(texts) == 2 * len(EVERY_KIND)


def test_a_document_too_short_for_its_lines_is_refused(tokenizer: DocumentTokenizer) -> None:
    with pytest.raises(LongRangeError, match="256 tokens is too short, since the lines to hide"):
        document("retrieval,keys=100,length=256", 0, tokenizer)


def test_a_filler_of_one_endless_word_is_cut_anywhere(tokenizer: DocumentTokenizer) -> None:
    text = document("retrieval,length=1K", 0, tokenizer, Filler(["xyz" * 9000]))
    assert 1024 - 32 <= tokenizer.count(text) + 1 <= 1024


def test_an_empty_filler_is_refused() -> None:
    spec = Spec.parse("synthetic:copy,filler=books")
    with pytest.raises(LongRangeError, match="the filler books has no text"):
        filler_of(spec, lambda _: [])


def test_a_source_without_a_tokenizer_says_so() -> None:
    source = SyntheticSource("synthetic:retrieval,documents=3", None, lambda _: [])
    assert len(source) == 3
    with pytest.raises(LongRangeError, match="give --tokenizer"):
        source.document(0, Counter())


def test_a_source_has_no_documents_behind_its_last(tokenizer: DocumentTokenizer) -> None:
    with pytest.raises(IndexError):
        document("retrieval,documents=3,length=1K", 3, tokenizer)


def test_the_filler_is_read_from_any_source(tmp_path: Path, tokenizer: DocumentTokenizer) -> None:
    sentence = "A sentence that no made-up text has."
    source = SyntheticSource(
        "synthetic:retrieval,length=1K,filler=some", tokenizer.count, lambda name: [sentence + name]
    )
    assert source.document(0, Counter()).text.count(sentence + "some") > 3


def test_a_filler_of_another_script_fits_too(tokenizer: DocumentTokenizer) -> None:
    """Each of its characters is three tokens, and its words are longer than what may be missing."""
    words = " ".join("\u4e2d" * (5 + n % 20) for n in range(2000))
    for number in range(10):
        text = document("retrieval,length=160-256", number, tokenizer, Filler([words]))
        assert tokenizer.count(text) + 1 <= 256


def fit(tokens: Callable[[int], int], length: int = 100) -> int:
    """Fit a text whose tokens follow from its characters of filler; return its tokens."""
    stream = Stream(itertools.repeat("x" * 1000))
    return len(
        fitted(
            lambda characters, _: "x" * tokens(characters),
            length=length, filler=stream, count=len, what="it",
        )
    )  # fmt: skip


def jump(least: int) -> Callable[[int], int]:
    """Return the tokens of a text that has one of two lengths, whatever its filler."""
    return lambda characters: least if characters >= 50 else 20


def test_the_token_that_ends_a_document_belongs_to_its_length() -> None:
    assert fit(jump(99)) == 99
    with pytest.raises(LongRangeError, match="no amount of filler gives a document of 83 to 99"):
        fit(jump(100))


def test_a_document_is_shorter_than_its_length_by_the_tolerance_at_most() -> None:
    assert tolerance(100) == 17
    assert fit(jump(83)) == 83
    with pytest.raises(LongRangeError, match="no amount of filler"):
        fit(jump(82))


@pytest.mark.parametrize("tokens_a_character", [0.3, 3, 27])
def test_what_takes_other_tokens_than_estimated_fits_after_some_tries(tokens_a_character) -> None:
    tokens = fit(lambda characters: 7 + round(tokens_a_character * characters), 10_000)
    assert 10_000 - tolerance(10_000) <= tokens <= 9_999
