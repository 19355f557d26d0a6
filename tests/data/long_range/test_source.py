# SPDX-License-Identifier: Apache-2.0
"""Documents are found again by reading them as text, without the offsets that come with them."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data.long_range.filler import Filler
from data.long_range.source import SyntheticSource, filler_of, long_document
from data.long_range.spec import LongRangeError, Spec
from data.tokenization.tokenizer import DocumentTokenizer
from tests.house.rooms import TREE

EVERY_KIND = (
    "retrieval,keys=8,queries=3",
    "retrieval,keys=8,queries=3,form=code",
    "multi_needle,keys=2,values=3",
    "multi_needle,keys=2,values=3,form=code",
    "variables,chains=3,hops=2",
    "variables,chains=3,hops=2,form=code",
    "copy,passage=100",
    "questions,queries=2",
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
        text = document(f"{kind},length=4K", number, tokenizer, code if real else None).text
        with_end = tokenizer.encode_documents([text])[0].size + 1
        assert 4096 - 80 <= with_end <= 4096, number


def test_lengths_are_drawn_between_the_two_that_are_given(tokenizer: DocumentTokenizer) -> None:
    sizes = [
        tokenizer.count(document("retrieval,length=1K-8K", n, tokenizer).text) + 1
        for n in range(30)
    ]
    assert all(1024 - 32 <= size <= 8192 for size in sizes)
    by_doubling = Counter((size // 1024).bit_length() for size in sizes)
    assert set(by_doubling) >= {1, 2, 3}
    assert max(by_doubling.values()) <= 18


def test_each_key_of_a_retrieval_document_is_found_once_before_it_is_asked_for(
    tokenizer: DocumentTokenizer, code: Filler
) -> None:
    words = "retrieval,keys=6,queries=4,length=2K,depth=0.25-0.5,form=code"
    for number in range(8):
        text = document(words, number, tokenizer, code).text
        asked = re.findall(r"^assert ([A-Z]+) == (\d{5})\n", text[-300:], re.MULTILINE)
        assert len(asked) == 4
        for name, value in asked:
            places = [found.start() for found in re.finditer(rf"^{name} = {value}$", text, re.M)]
            assert len(places) == 1, name
            # Between 0.25 and 0.5 of the filler, moved to a line end and by one another.
            assert 0.15 < places[0] / len(text) < 0.6


def test_all_values_of_a_key_are_asked_for_in_their_order(tokenizer: DocumentTokenizer) -> None:
    for number in range(8):
        text = document("multi_needle,keys=3,values=3,length=2K", number, tokenizer).text
        body, _, question = text.rstrip("\n").rpartition("\n")
        name, said = re.fullmatch(r"Which codes does (\w+) have\? It has (.+)\.", question).groups()
        assert re.findall(rf"^{name} has the code (\d+)\.$", body, re.M) == said.split(", ")


def test_an_assignment_follows_the_one_that_it_refers_to(tokenizer: DocumentTokenizer) -> None:
    for number in range(8):
        text = document("variables,chains=3,hops=3,length=2K,form=code", number, tokenizer).text
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
    text = document("copy,length=4K,passage=200", 0, tokenizer, code).text
    number, passage = re.match(r"Passage (\d+):\n(.*?)\nEnd of", text, re.DOTALL).groups()
    again = text.index(f"Passage {number} again:\n")
    assert text[again:] == f"Passage {number} again:\n{passage}\n"
    assert 150 <= tokenizer.count(passage) <= 250
    assert tokenizer.count(text[:again]) > 4096 - 80 - 250


def test_a_question_quotes_a_document_and_is_answered_by_what_follows_there(
    tokenizer: DocumentTokenizer, code: Filler
) -> None:
    for filler in (code, Filler()):
        text = document("questions,length=8K,queries=3", 1, tokenizer, filler).text
        joined, *questions = text.split("\n\nIn document ", 1)
        asked = re.findall(
            r'^(?:In document )?(\d+), what follows "(.+)"\?\n(.+)$', questions[0], re.M
        )
        assert len(asked) == 3
        parts = re.split(r"^Document (\d+):\n", joined, flags=re.M)
        of = dict(zip(parts[1::2], parts[2::2], strict=True))
        assert len(of) >= 4
        for number, quoted, answer in asked:
            assert text.count(quoted) == 2
            after = of[number].partition(quoted)[2]
            assert after.strip().startswith(answer)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_answers_are_where_the_offsets_say(
    kind: str, tokenizer: DocumentTokenizer, code: Filler
) -> None:
    made = document(f"{kind},length=4K", 2, tokenizer, code)
    assert made.answers
    for answer in made.answers:
        assert made.text.startswith(answer.text, answer.at)
        assert all(made.text.startswith(line, at) for at, line in answer.evidence)
        assert answer.distance == answer.at - answer.evidence[0][0] > 0


def test_no_document_says_passkey_which_evaluations_ask_for(tokenizer: DocumentTokenizer) -> None:
    for number in range(20):
        text = document("retrieval,keys=50,length=4K,form=code", number, tokenizer).text
        assert "PASSKEY" not in text


DIGESTS = """
import hashlib, sys
from data.long_range.filler import Filler
from data.long_range.source import long_document
from data.long_range.spec import Spec
numbers = [int(word) for word in sys.argv[2:]]
filler = Filler(["one line of text\\nand another, longer one\\n" * 40, "a second text. " * 90])
for kind in sys.argv[1].split(" "):
    for fill in (Filler(), filler):
        spec = Spec.parse(f"synthetic:{kind},length=1K-4K,seed=7")
        if kind.startswith("questions") and fill.texts:
            continue  # no sentence is there only once
        for n in numbers:
            text = long_document(spec, n, lambda text: len(text) // 3, fill).text
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
    assert len({line.split()[-1] for line in forwards}) == len(forwards) == 6 * 15
    assert len(backwards) == 3 * 15
    assert set(backwards) < set(forwards)


def test_another_seed_gives_other_documents(tokenizer: DocumentTokenizer) -> None:
    texts = {
        document(f"{kind},length=1K,seed={seed}", 0, tokenizer).text
        for kind in EVERY_KIND
        for seed in (0, 1)
    }
    assert len(texts) == 2 * len(EVERY_KIND)


def test_a_document_too_short_for_its_lines_is_refused(tokenizer: DocumentTokenizer) -> None:
    with pytest.raises(LongRangeError, match="256 tokens is too short, since the lines to hide"):
        document("retrieval,keys=100,length=256", 0, tokenizer)


def test_a_filler_without_sentences_cannot_be_asked_about(tokenizer: DocumentTokenizer) -> None:
    with pytest.raises(LongRangeError, match="the filler has too few sentences"):
        document("questions,length=1K", 0, tokenizer, Filler(["tiny\n" * 50]))


def test_a_filler_of_one_endless_word_is_cut_anywhere(tokenizer: DocumentTokenizer) -> None:
    text = document("retrieval,length=1K", 0, tokenizer, Filler(["xyz" * 9000])).text
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
        text = document("retrieval,length=160-256", number, tokenizer, Filler([words])).text
        assert tokenizer.count(text) + 1 <= 256
