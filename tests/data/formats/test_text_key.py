# SPDX-License-Identifier: Apache-2.0
"""The field of the text is found in objects, and proposed only where it looks like text."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from data.formats import jsonl
from data.readers import SourceError, documents

TEXT = "a document of many words, as a book or a page has them, " * 4
CHINESE = "\u4e2d\u6587\u6587\u672c" * 30
BAR_CODE = "4006381333931" * 20
ADDRESS = "https://example.org/" + "path/" * 40


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read(source, **options):
    return [text for text, _ in documents(source, **options)]


@pytest.mark.parametrize(
    ("record", "advice"),
    [
        ({"document": {"text": TEXT}, "id": "urn:0"}, "--text-key document.text"),
        ({"a": {"b": {"c": TEXT}}, "title": "A title"}, "--text-key a.b.c"),
        ({"id": BAR_CODE, "url": ADDRESS, "raw_content": TEXT}, "--text-key raw_content"),
        ({"url": ADDRESS, "meta": {"body": CHINESE}}, "--text-key meta.body"),
        ({"abstract": TEXT, "article": TEXT * 9}, "--text-key article"),
        ({"id": BAR_CODE, "title": "A title"}, "no field of it looks like text; "),
        ({"id": "a", "paragraphs": [TEXT, TEXT]}, """jq -c '{text: ([.paragraphs[]] | join("""),
        ({"messages": [{"role": "user", "content": TEXT}]}, "array, messages[].content; write"),
        ({"text": None, "content": TEXT}, "--text-key content"),
        ({"text": {"en": TEXT}, "lang": "en"}, "--text-key text.en"),
        ({"text": [TEXT, TEXT]}, "array, text[]; write it as one string"),
    ],
)
def test_the_advice_is_a_field_that_looks_like_text(tmp_path, record, advice):
    source = written(tmp_path / "a.jsonl", *[record] * 3)
    with pytest.raises(SourceError) as refused:
        read(source)
    assert advice in str(refused.value)
    named = advice.partition("--text-key ")[2]
    if named:
        assert len(read(source, text_key=named)) == 3


def test_a_field_that_is_long_once_is_not_proposed(tmp_path):
    records = [{"note": TEXT * 20, "body": TEXT}, *[{"note": "", "body": TEXT}] * 4]
    with pytest.raises(SourceError, match=r"--text-key body$"):
        read(written(tmp_path / "a.jsonl", *records))


def test_a_field_in_an_object_is_read_from_lines_long_ones_and_parquet(tmp_path, monkeypatch):
    records = [{"id": [{"text": "no"}], "document": {"n": {}, "text": f"{TEXT}\n{n}"}}
               for n in range(3)]  # fmt: skip
    texts = [record["document"]["text"] for record in records]
    source = written(tmp_path / "a.jsonl", *records)
    rows = tmp_path / "a.parquet"
    column = [{"text": text, "n": 1} for text in texts]
    parquet.write_table(pa.table({"document": column, "tags": [["x"]] * 3}), rows)
    for _ in range(2):
        assert read(source, text_key="document.text") == texts
        monkeypatch.setattr(jsonl, "LONG_BYTES", 100)
    assert read(str(rows), text_key="document.text") == texts
    with pytest.raises(SourceError, match=r"no column 'text'; .* document\.text, .*tags\[\]; name"):
        read(str(rows))


def test_a_field_whose_name_has_a_dot_is_itself(tmp_path):
    source = written(tmp_path / "a.jsonl", {"a.b": "own", "a": {"b": "inner"}})
    assert read(source, text_key="a.b") == ["own"]


def test_binary_strings_of_parquet_are_utf8(tmp_path):
    path = tmp_path / "a.parquet"
    for kind in (pa.binary(), pa.large_binary()):
        parquet.write_table(pa.table({"text": pa.array([CHINESE.encode(), b"two"], kind)}), path)
        assert read(str(path)) == [CHINESE, "two"]
    parquet.write_table(pa.table({"text": pa.array([b"one", b"caf\xe9"])}), path)
    with pytest.raises(SourceError, match=r"a\.parquet row 2: invalid UTF-8 at byte 3 of 'text'"):
        read(str(path))
