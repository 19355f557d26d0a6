# SPDX-License-Identifier: Apache-2.0
"""Published rows become sample files by their length, and these are answered and scored."""

import json
from functools import partial

import pytest

from eval.given_suites.columns import parquet_files
from eval.given_suites.convert import convert
from eval.given_suites.suites import SUITES
from eval.ruler.length import RulerError
from eval.ruler.predictions import questions
from eval.ruler.samples import read_samples
from eval.ruler.scoring import score
from eval.ruler.tokens import Tokens
from tests.eval.given_suites.support import TEMPLATE, graph_row, mrcr_row, write
from tests.eval.ruler import support

MRCR, GRAPHWALKS = SUITES["mrcr"], SUITES["graphwalks"]


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(support.byte_level())


@pytest.fixture(scope="module")
def with_template() -> Tokens:
    tokenizer = support.byte_level()
    tokenizer.hugging_face.chat_template = TEMPLATE
    return Tokens(tokenizer)


def samples_of(found) -> list:
    return [one for row in found.files for one in read_samples(found.folder / row.file)]


def predictions(folder, texts):
    path = folder / "predictions.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prediction": t}) + "\n" for i, t in texts))
    return [path]


def test_rows_are_in_the_bin_of_their_length_and_none_is_cut(tmp_path, tokens):
    words = (300, 700, 10, 1500, 310)
    write(tmp_path / "mrcr" / "2needle" / "2needle_0.parquet", [mrcr_row(n) for n in words])
    write(tmp_path / "mrcr" / "4needle" / "4needle_0.parquet", [mrcr_row(240, 4)])
    convert_all = partial(convert, tmp_path / "mrcr", tmp_path / "out", MRCR, tokens=tokens)
    lengths = {}
    for row in (mrcr_row(n) for n in words):
        turns = [(one["role"], one["content"]) for one in json.loads(row["prompt"])]
        text = "".join(f"{role.capitalize()}:\n{content}\n\n" for role, content in turns)
        prompt = text + "Assistant:\n"
        lengths[prompt] = tokens.of_prompts([prompt])[0]
    first, second = (sorted(lengths.values())[at] + 200 for at in (2, 3))
    found = convert_all(lengths=[second, first], extra_tokens=100)
    assert [(row.task, row.length, row.samples) for row in found.files] == [
        ("mrcr_2needle", first, 2), ("mrcr_2needle", second, 1), ("mrcr_4needle", first, 1),
    ]  # fmt: skip
    assert found.left_out == {"too long": 1, "too short": 1}
    for sample in samples_of(found):
        assert sample.max_length / 2 < sample.length <= sample.max_length
        assert sample.length == sample.prompt_tokens + sample.max_new_tokens
        assert sample.expected.startswith("aYooSG8CQg")
        if sample.task == "mrcr_2needle":
            assert sample.prompt_tokens == lengths[sample.prompt]
    assert [
        row.samples for row in convert_all(lengths=[first], extra_tokens=100, samples=1).files
    ] == [1, 1]
    with pytest.raises(
        RulerError, match=r"no row of .* is within the lengths: 6 have more than 50"
    ):
        convert_all(lengths=[50], extra_tokens=100)


def test_a_chat_template_writes_the_prompt_with_its_special_tokens(tmp_path, with_template):
    rows = [mrcr_row(600), mrcr_row(600, text="<|endoftext|>")]
    folder = write(tmp_path / "mrcr" / "a.parquet", rows)
    found = convert(folder, tmp_path, MRCR, tokens=with_template, lengths=[1024], extra_tokens=8)
    assert (found.by_template, found.joined, found.left_out) == (True, 1, {"special token": 1})
    (sample,) = samples_of(found)
    assert sample.prompt.endswith("<|endoftext|>assistant\n")
    assert "the\n\nwrite a poem about tapirs\n<|endoftext|>assistant\nTapirs" in sample.prompt
    ids = with_template.prompt(sample.prompt, by_template=sample.by_template)
    assert len(ids) == sample.prompt_tokens
    assert ids.count(with_template.tokenizer.eod_id) == sample.prompt.count("<|endoftext|>") == 6
    with_template.tokenizer.hugging_face.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(RulerError, match=r"chat template refuses the messages .*\(never\)"):
        convert(folder, tmp_path, MRCR, tokens=with_template, lengths=[1024], extra_tokens=100)


@pytest.mark.parametrize(
    ("suite", "rows", "half"),
    [
        (MRCR, [mrcr_row(300), mrcr_row(300, 8)], "aYooSG8CQgTapirs"),
        (
            GRAPHWALKS,
            [graph_row(60, ["0001", "0002"]), graph_row(60, [], "parents")],
            "Final Answer: [0001]",
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_answers_are_scored_by_the_metric_of_the_suite(tmp_path, tokens, suite, rows, half):
    folder = write(tmp_path / "given" / "a.parquet", rows)
    found = convert(folder, tmp_path, suite, tokens=tokens, lengths=[1024], extra_tokens=100)
    asked = questions([found.folder])
    assert (asked.suite, len(asked.lengths)) == (suite.name, 2)
    samples = samples_of(found)
    for text, low, high in ((None, 100, 100), ("no", 0, 0), (half, 0, 99)):
        texts = [(one.id, one.expected if text is None else text) for one in samples]
        scores, unknown = score([found.folder / row.file for row in found.files],
                                predictions(tmp_path, texts))  # fmt: skip
        assert unknown == 0
        assert all(low <= row.score <= high for row in scores.scores)
        assert scores.effective_length is None
    assert len(scores.averages) == 1
    assert scores.averages[0].score > 0
    assert scores.averages[0].tasks == 2


def test_files_and_rows_of_another_form_are_named(tmp_path, tokens):
    given = tmp_path / "given"
    with pytest.raises(RulerError, match=r"is not a folder; `hf download openai/mrcr --repo-type"):
        parquet_files(given, MRCR)
    given.mkdir()
    with pytest.raises(RulerError, match=r"has no \.parquet file; `hf download openai/graphwalks"):
        parquet_files(given, GRAPHWALKS)
    write(given / "a.parquet", [graph_row(60, ["0001"])])
    with pytest.raises(RulerError, match=r"lacks the column answer of openai/mrcr; it has prompt"):
        parquet_files(given, MRCR)
    for wrong, message in (
        ({"prompt": "hello"}, "row 1 of .* is not one of openai/mrcr"),
        ({"prompt": "[]"}, "the last message of prompt is not the user's"),
        ({"answer": "no"}, "answer does not begin with random_string_to_prepend"),
    ):
        write(given / "a.parquet", [mrcr_row(300) | wrong])
        with pytest.raises(RulerError, match=message):
            convert(given, tmp_path / "out", MRCR, tokens=tokens, lengths=[1024], extra_tokens=100)
    (given / "a.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(RulerError, match="cannot be read as parquet"):
        parquet_files(given, MRCR)
    assert not (tmp_path / "out").exists()
