# SPDX-License-Identifier: Apache-2.0
"""Samples have their length, their answer is in the text, and files are made once."""

import hashlib
import itertools
import json
import re

import pytest

from eval.ruler.length import RulerError
from eval.ruler.samples import drawn, make, read_manifest, read_samples
from eval.ruler.sources import Setting, Sources
from eval.ruler.tasks import TASKS, named
from eval.ruler.tokens import Tokens
from tests.eval.ruler import support

LENGTH = {"cwe": 8192}
"""Of the repetitions of a length of 4,096 or more; 3,000 tokens for every other task."""
COARSE = {"qa_1": 0.9, "qa_2": 0.9, "niah_multikey_3": 0.9}
"""Least part of the budget where a unit is more than 2% of it."""


@pytest.fixture(scope="module")
def byte_level() -> Tokens:
    return Tokens(support.byte_level())


@pytest.fixture(scope="module")
def with_marks() -> Tokens:
    return Tokens(support.with_marks())


@pytest.fixture(scope="module")
def offline() -> Sources:
    return Sources()


def setting(task: str, tokens: Tokens, sources: Sources, length: int = 0) -> Setting:
    length = length or LENGTH.get(task, 3000)
    budget = length - TASKS[task].form.new_tokens
    return Setting(length=length, budget=budget, seed=0, tokens=tokens, sources=sources)


@pytest.mark.parametrize("family", ["byte_level", "with_marks"])
@pytest.mark.parametrize("task", TASKS)
def test_a_sample_fills_its_budget_and_its_text_has_the_answer(task, family, offline, request):
    tokens = request.getfixturevalue(family)
    used = setting(task, tokens, offline)
    for sample in drawn(TASKS[task], used, 3):
        counted = len(tokens.tokenizer.hugging_face(sample.prompt)["input_ids"])
        assert sample.prompt_tokens == counted <= used.budget
        assert sample.prompt_tokens >= COARSE.get(task, 0.98) * used.budget
        assert sample.length == counted + TASKS[task].form.new_tokens <= sample.max_length
        assert support.read_answers(sample) == set(sample.outputs)
        assert all(output in sample.expected for output in sample.outputs)


def test_one_needle_is_asked_for_in_the_singular(byte_level, offline):
    [sample] = drawn(TASKS["niah_single_3"], setting("niah_single_3", byte_level, offline), 1)
    assert sample.input.startswith("A special magic uuid is hidden within the following text.")
    assert re.search(r"What is the special magic uuid for \S+ mentioned", sample.input)
    [sample] = drawn(TASKS["niah_multivalue"], setting("niah_multivalue", byte_level, offline), 1)
    assert sample.input.startswith("Some special magic numbers are hidden")
    assert len(set(sample.outputs)) == 4


def test_below_4096_tokens_a_list_has_fewer_repetitions(byte_level, offline):
    counts = []
    for length in (3000, 8192):
        [sample] = drawn(TASKS["cwe"], setting("cwe", byte_level, offline, length), 1)
        asked = sample.input.split("Below is a numbered")[-1]
        counts.append(len(re.findall(rf"\d+\. {sample.outputs[0]}\b", asked)))
    assert counts == [6, 30]


def test_tokens_of_the_answer_follow_those_of_the_prompt(byte_level, with_marks):
    for tokens in (byte_level, with_marks):
        prompt = "The special magic number for brisk-lantern mentioned in the provided text is"
        whole = tokens.prompt(prompt + " 4921573")
        assert tokens.prompt(prompt) + tokens.continuation(prompt, " 4921573") == whole
    assert with_marks.prompt("a")[0] == 1
    assert byte_level.first == ()
    # "they are: " and "KQXWA" have a token together; a model can only add to the blank.
    assert byte_level.continuation("they are: ", "are") == byte_level.prompt("are")


def test_a_sample_depends_on_seed_task_length_and_number_alone(byte_level, offline, tmp_path):
    def written(seed: int, samples: int, folder: str) -> list[str]:
        row, _ = make(
            tmp_path / folder, TASKS["niah_multikey_2"], length=1500, samples=samples, seed=seed,
            tokens=byte_level, sources=offline,
        )  # fmt: skip
        return (tmp_path / folder / row.file).read_text().splitlines()

    first = written(0, 3, "a")
    assert len(set(first)) == 3
    assert written(0, 3, "b") == first
    assert not set(written(1, 3, "a")) & set(first)
    assert [json.loads(line)["outputs"] for line in written(0, 2, "c")] == [
        json.loads(line)["outputs"] for line in first[:2]
    ]


def test_a_file_is_found_checked_and_made_again(byte_level, offline, tmp_path):
    def made(samples: int = 2):
        return make(
            tmp_path / "s", TASKS["vt"], length=1500, samples=samples, seed=0, tokens=byte_level,
            sources=offline,
        )  # fmt: skip

    row, found = made()
    assert not found
    file = tmp_path / "s" / row.file
    assert read_manifest(tmp_path / "s") == {row.file: row}
    texts = [sample.prompt for sample in read_samples(file)]
    assert [sample.id for sample in read_samples(file)] == [
        f"vt-1500-seed0-{at}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        for at, text in enumerate(texts)
    ]
    assert made() == (row, True)
    content = file.read_text()
    file.write_text(content.replace("VAR", "WAR", 1))
    with pytest.raises(RulerError, match="has changed since it was made"):
        made()
    file.unlink()
    assert made()[1] is False
    assert file.read_text() == content
    assert made(3)[0].samples == 3


@pytest.mark.parametrize("task", TASKS)
def test_a_length_that_is_too_short_is_refused_and_leaves_nothing(
    task, byte_level, offline, tmp_path
):
    with pytest.raises(RulerError, match=rf"{task} cannot be made at 130 tokens"):
        make(
            tmp_path / "s", TASKS[task], length=130, samples=1, seed=0, tokens=byte_level,
            sources=offline,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_task_and_no_samples_are_refused(byte_level, offline, tmp_path):
    with pytest.raises(RulerError, match="'niah_singel_1'; did you mean niah_single_1"):
        named(["vt", "niah_singel_1"])
    assert [task.name for task in named(["vt", "cwe"])] == ["vt", "cwe"]
    assert len(named(["all"])) == 13
    with pytest.raises(RulerError, match="0 samples"):
        make(
            tmp_path, TASKS["vt"], length=1500, samples=0, seed=0, tokens=byte_level,
            sources=offline,
        )  # fmt: skip


@pytest.fixture
def published(tmp_path):
    """Return a folder with files in the form of RULER's."""
    paragraphs = [
        {
            "context": f"Paragraph {at} of article {title} has the word {title}{at}.",
            "qas": [
                {
                    "question": f"Which word has paragraph {at} of {title}?",
                    "answers": [{"text": f"{title}{at}"}, {"text": f"the word {title}{at}"}],
                    "is_impossible": at == 1,
                }
            ],
        }
        for title in "abc"
        for at in range(9)
    ]
    articles = [{"paragraphs": paragraphs[at : at + 9]} for at in range(0, 27, 9)]
    hotpot = [
        {
            "question": f"Which of {at}?",
            "answer": f"Answer {at}",
            "context": [[f"Title {at}.{part}", ["First. ", "Second."]] for part in range(10)],
        }
        for at in range(20)
    ]
    folder = tmp_path / "ruler data"
    folder.mkdir()
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    (folder / "hotpotqa.json").write_text(json.dumps(hotpot))
    essays = {"text": "The first essay says so. " * 7 + "The other\nessay does not."}
    (folder / "PaulGrahamEssays.json").write_text(json.dumps(essays))
    return folder


def test_with_rulers_files_the_suite_is_ruler(byte_level, published):
    sources = Sources(published)
    assert sources.own_words
    [first, second] = drawn(TASKS["qa_1"], setting("qa_1", byte_level, sources), 2)
    assert first.suite == "ruler"
    assert first.outputs == ("a0", "the word a0")
    assert second.outputs[0] == "a2"  # question 1 is not answerable
    assert second.input.count("Paragraph 2 of article a ") >= 1
    texts = re.findall(r"^Paragraph \d of article \w", first.input, re.MULTILINE)
    assert len(texts) > len(set(texts)) == 27  # repeated when there are no more,
    assert any(a != b for a, b in itertools.pairwise(texts) if texts.count(a) > 1)
    runs = [len([*same]) for _, same in itertools.groupby(texts)]
    assert max(runs) < max(texts.count(text) for text in texts)  # and not in blocks of copies
    [sample] = drawn(TASKS["qa_2"], setting("qa_2", byte_level, sources), 1)
    assert {f"Title 0.{part}" for part in range(10)} <= set(
        re.findall(r"Title 0\.\d", sample.input)
    )
    [sample] = drawn(TASKS["niah_single_2"], setting("niah_single_2", byte_level, sources), 1)
    assert sample.input.count("The other essay does not. The first essay says so.") > 3


def test_rulers_word_lists_are_used_if_they_are_there(byte_level, published):
    for name in ("adjectivelist", "nounlist", "verblist"):
        (published / f"{name}.txt").write_text("\n".join(f"{name}{at}" for at in range(300)))
    sources = Sources(published)
    assert not sources.own_words
    [sample] = drawn(TASKS["niah_single_1"], setting("niah_single_1", byte_level, sources), 1)
    assert re.search(r"for adjectivelist\d+-nounlist\d+ mentioned", sample.input)
    assert len(sources.sha256) == 6


def test_missing_and_broken_files_of_ruler_are_named(published):
    (published / "squad.json").write_text('{"data": 3}')
    with pytest.raises(RulerError, match=r"squad\.json is not SQuAD 2\.0"):
        Sources(published).single.documents(1)
    (published / "squad.json").unlink()
    (published / "hotpotqa.json").unlink()
    with pytest.raises(
        RulerError, match=r"lacks squad\.json, hotpotqa\.json; .*download_qa_dataset\.sh of"
    ):
        Sources(published)


def test_more_samples_than_questions_are_refused(byte_level, published):
    with pytest.raises(RulerError, match="has 20 questions"):
        list(drawn(TASKS["qa_2"], setting("qa_2", byte_level, Sources(published)), 21))
