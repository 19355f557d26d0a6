# SPDX-License-Identifier: Apache-2.0
"""HELMET's files become samples with examples of other questions, and nothing is cut."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

from eval.given_suites.convert import convert
from eval.given_suites.helmet import _lines_kept
from eval.given_suites.suites import SUITES, suite_named
from eval.ruler.given_metrics import contains, first_line_contains, ndcg, ranking
from eval.ruler.length import RulerError
from eval.ruler.predictions import questions
from eval.ruler.samples import read_samples
from eval.ruler.scoring import score
from eval.ruler.tokens import Tokens
from tests.eval.ruler import support

RECALL, RAG, RERANK = (SUITES[f"helmet-{name}"] for name in ("recall", "rag", "rerank"))


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(support.byte_level())


def put(folder: Path, name: str, rows: list[dict]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _lines_kept.cache_clear()
    return path


def pairs(count: int) -> dict:
    content = {f"key-{at}": f"value-{at}" for at in range(count)}
    return {
        "context": json.dumps(content), "question": "key-2", "answer": "value-2",
        "demos": [[f"key-{at}", f"value-{at}"] for at in (0, 1, 3)], "num_kvs": count,
    }  # fmt: skip


def question(at: int, documents: int, **more) -> dict:
    return {
        "question": f"Who wrote book {at}?", "answers": [f"Writer {at}", "Anon"],
        "ctxs": [{"title": f"Title {one}", "text": f"Book {one} is by Writer {one}.", "id": one}
                 for one in range(documents)], **more,
    }  # fmt: skip


def query(at: int, documents: int) -> dict:
    return {
        "qid": str(at), "query": f"What of {at}?",
        "ctxs": [{"id": str(one), "text": f"Text {one}.", "label": int(one == at) * 3 + one % 2}
                 for one in range(documents)],
    }  # fmt: skip


@pytest.fixture
def helmet(tmp_path) -> Path:
    """Return a folder with HELMET's folder data."""
    data = tmp_path / "HELMET" / "data"
    put(data, "json_kv/test_k20_dep6.jsonl", [pairs(20)])
    put(data, "json_kv/test_k60_dep6.jsonl", [pairs(60)])
    few = [question(at, 2) for at in range(4) for _ in range(2)]
    put(data, "kilt/nq-train-multikilt_1000_k3_dep6.jsonl", few)
    put(data, "kilt/nq-dev-multikilt_1000_k8_dep6.jsonl", [question(at, 8) for at in (1, 9)])
    known = [question(at, 2, id=str(at), s_pop=10 ** (at + 1)) for at in range(3)]
    put(data, "kilt/popqa_test_1000_k3_dep6.jsonl", [*known[:2], {**known[2], "s_pop": 5}])
    full = [question(at, 8, id=str(at), s_pop=10 ** (at + 1)) for at in (0, 3)]
    put(data, "kilt/popqa_test_1000_k8_dep6.jsonl", full)
    put(data, "msmarco/test_reranking_data_k10_dep3.jsonl", [query(at, 3) for at in range(3)])
    put(data, "msmarco/test_reranking_data_k14_dep3.jsonl", [query(at, 14) for at in (1, 8)])
    return data.parent


def converted(suite, folder: Path, tokens: Tokens, lengths=(256, 512, 1024, 2048)):
    found = convert(
        folder, folder.parent / "out", suite, tokens=tokens, lengths=lengths, extra_tokens=16
    )
    return found, [one for row in found.files for one in read_samples(found.folder / row.file)]


def test_a_value_is_asked_after_two_other_keys_and_long_rows_are_left_out(helmet, tokens):
    found, [sample] = converted(RECALL, helmet, tokens, (768,))
    assert found.left_out == {"too long": 1}
    assert (sample.task, sample.suite, sample.expected) == ("json_kv", "helmet-recall", "value-2")
    turns = sample.prompt.split("User:\n")
    lines = [each.splitlines() for each in turns[1:]]
    assert [lines[0][-2], lines[1][-2], lines[2][0]] == [
        "value-0", "value-1", "Key: key-2",
    ]  # fmt: skip
    assert json.dumps(json.loads(pairs(20)["context"])) in turns[1]
    assert sample.length <= 768


def test_examples_of_rag_are_of_other_questions_and_of_rare_subjects(helmet, tokens):
    found, samples = converted(RAG, helmet / "data", tokens)
    assert found.left_out == {"popular subject": 1}
    assert [sample.task for sample in samples] == ["kilt_nq", "kilt_nq", "kilt_popqa_rare"]
    for sample, own in zip(samples, (1, 9, 0), strict=True):
        asked = [line for line in sample.prompt.splitlines() if line.startswith("Question: ")]
        assert len(set(asked)) == 3
        assert asked[-1] == f"Question: Who wrote book {own}?"
        assert sample.outputs == (f"Writer {own}", "Anon")
        assert sample.prompt.count("[Title 7]\nBook 7 is by Writer 7.\n") == 1
    again, _ = converted(RAG, helmet, tokens)
    assert [row.sha256 for row in again.files] == [row.sha256 for row in found.files]


def test_rankings_and_their_scores(helmet, tokens):
    found, samples = converted(RERANK, helmet / "data" / "msmarco", tokens)
    assert set(found.files[0].sources) == {
        "test_reranking_data_k10_dep3.jsonl", "test_reranking_data_k14_dep3.jsonl"
    }  # fmt: skip
    assert [sample.expected.split(" > ")[0] for sample in samples] == ["1", "8"]
    assert all(len(ranking(sample.expected)) == 10 for sample in samples)
    assert "1 > 0 > 2" in samples[1].prompt or "0 > 1 > 2" in samples[1].prompt
    assert len(questions([found.folder]).lengths) == 2
    predictions = found.folder.parent / "p.jsonl"
    for text, low, high in ((None, 100, 100), ("no", 0, 0), ("ID: 8 > ID: 1\n8", 1, 99)):
        rows = [{"id": one.id, "prediction": text or one.expected} for one in samples]
        predictions.write_text("".join(json.dumps(row) + "\n" for row in rows))
        scores, _ = score([found.folder / row.file for row in found.files], [predictions])
        assert all(low <= row.score <= high for row in scores.scores)
        assert scores.effective_length is None


def test_ndcg_is_that_of_hand():
    labels = ("7 3", "8 0", "9 1", "10 0")
    best = 3 + 1 / math.log2(3)
    assert ndcg("7 > 9 > 8", labels) == pytest.approx(1)
    assert ndcg("[ID: 9] > [ID: 7] > [ID: 9]", labels) == pytest.approx(
        (1 + 3 / math.log2(3)) / best
    )
    assert ndcg("\n8 > 10 > 9\n7", labels) == pytest.approx((1 / 2) / best)
    assert ndcg("none of them", labels) == ndcg("11 > 12", labels) == 0
    assert ndcg(" > ".join(["8"] + [str(at) for at in range(20, 29)] + ["7"]), labels) == 0


def test_texts_are_compared_as_squad_does():
    assert contains("It is The  Old-Man!", ["old man", "oldman"]) == 1
    assert contains("an old man", ["young"]) == 0
    assert contains("by The The", ["The The"]) == 1
    assert contains("by Them", ["The The"]) == 0
    assert first_line_contains("\n Paris.\nLondon", ["Paris"]) == 1
    assert first_line_contains("Paris\nLondon", ["London"]) == 0


def test_missing_and_damaged_files_are_named(helmet, tokens):
    nowhere = helmet.parent / "nowhere"
    with pytest.raises(RulerError, match=r"has no json_kv/test_k\*_dep\*\.jsonl; `bash scripts"):
        RECALL.files(nowhere)
    run = partial(convert, helmet, helmet.parent / "out", tokens=tokens, extra_tokens=16)
    data = helmet / "data"
    (data / "kilt" / "nq-train-multikilt_1000_k3_dep6.jsonl").unlink()
    with pytest.raises(RulerError, match=r"nq-dev-.*, but not its examples nq-train-.* put them"):
        RAG.files(helmet)
    file = put(data, "json_kv/test_k20_dep6.jsonl", [pairs(20)])
    for text, said in (
        ('{"context": ', r"line 2 of .*test_k20_dep6\.jsonl is not a JSON object; the file is da"),
        ('{"context": "c"}', r"line 2 of .* is not one of princeton-nlp/HELMET: it has no 'demos'"),
        (json.dumps({**pairs(3), "answer": 7}), r"line 2 of .*: '7' is not a text"),
    ):
        file.write_text(f"{json.dumps(pairs(20))}\n{text}\n")
        with pytest.raises(RulerError, match=said):
            run(suite=RECALL, lengths=[2048])
    put(data, "msmarco/test_reranking_data_k10_dep3.jsonl", [query(1, 3)])
    with pytest.raises(RulerError, match="there are 0 examples of other questions, not 2"):
        run(suite=RERANK, lengths=[2048])
    for name in ("20", "60"):
        put(data, f"json_kv/test_k{name}_dep6.jsonl", [])
    with pytest.raises(RulerError, match="have no rows"):
        run(suite=RECALL, lengths=[2048])
    assert not (helmet.parent / "out").exists()


def test_categories_that_are_not_in_the_files_say_where_their_data_are():
    with pytest.raises(RulerError, match=r"helmet-icl is not converted.*CogComp/trec.*--include-p"):
        suite_named("helmet-icl")
    with pytest.raises(RulerError, match="no given suite is called 'helmet'; did you mean helmet-"):
        suite_named("helmet")
