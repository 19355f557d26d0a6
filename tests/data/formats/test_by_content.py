# SPDX-License-Identifier: Apache-2.0
"""A file is read as what it holds, and one of a corpus that is not read is named."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from data.formats.by_content import format_of
from data.preparation.plan import Settings, plan_of
from data.prepare import prepare
from data.readers import SourceError, documents

TEXTS = ["one document of a few words", "another document", "\u4e2d\u6587"]
LINES = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)).encode()


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def in_parquet(folder: Path) -> bytes:
    parquet.write_table(pa.table({"text": TEXTS}), folder / "a")
    return (folder / "a").read_bytes()


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("c4-train.00000-of-01024.json.gz", gzip.compress),  # C4, Dolma
        ("my-corpus.json", bytes),  # Megatron-LM's preprocess_data
        ("part.ndjson", bytes),
        ("part-00000", bytes),  # Spark, without an ending
        ("en_part_1.jsonl.bz2", bz2.compress),
        ("00.jsonl.xz", lzma.compress),
        ("train.jsonl.zstd", zstd),
        ("seekable.json.zst", lambda lines: b"\x5e\x2a\x4d\x18\x04\0\0\0data" + zstd(lines)),
        ("named_wrongly.jsonl", gzip.compress),
        ("not_compressed.jsonl.gz", bytes),
        ("mark.json", lambda lines: b"\xef\xbb\xbf" + lines),
        ("one_line.json", lambda lines: lines.replace(b"\n", b"", 3)[: lines.index(b"\n")]),
    ],
)
def test_lines_of_json_are_read_whatever_the_ending_says(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(LINES))
    expected = TEXTS[:1] if name == "one_line.json" else TEXTS
    assert [text for text, _ in documents(str(tmp_path / name))] == expected


def test_parquet_is_read_without_its_ending(tmp_path):
    (tmp_path / "0000.parquet.snappy").write_bytes(in_parquet(tmp_path))
    assert [text for text, _ in documents(str(tmp_path / "0000.parquet.snappy"))] == TEXTS


ARRAY = json.dumps([{"text": text} for text in TEXTS])


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.json", ARRAY, r"one JSON array; .* jq -c '\.\[\]'"),
        ("a.jsonl", ARRAY + "\n", "one JSON array"),
        ("a.json", json.dumps(json.loads(ARRAY), indent=2), "one JSON array"),
        ("a.json", "[\n" + ARRAY[1:-1].replace("}, ", "},\n") + "\n]\n", "one JSON array"),
        (
            "a.json",
            json.dumps({"text": "a", "n": 1}, indent=1),
            r"JSON over several lines; .* jq -c \.",
        ),
        ("a.jsonl", '{"text": "a",\n "n": 1}\n{"text": "b",\n "n": 2}\n', "JSON over several"),
        ("data.csv", "id,text\n1,words\n", "neither Parquet nor lines of JSON"),
        ("unnamed", "a licence", "neither Parquet"),
        ("state.arrow", "\xff\xff\xff\xff", "neither Parquet"),
    ],
)
def test_what_is_not_read_is_named_with_what_would_do(tmp_path, name, content, why):
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(
        SourceError, match=rf"not read: .*{name} \({why}.*--format .* --skip {name}"
    ):
        list(documents(str(tmp_path / name)))


def test_the_ending_decides_where_the_content_does_not_and_for_texts(tmp_path):
    for name in ("a.txt", "a.md", "b.jsonl"):
        (tmp_path / name).write_bytes(b"{" + LINES)
    assert [format_of(tmp_path / name) for name in ("a.txt", "a.md", "b.jsonl")] == [
        "text", "text", "jsonl",
    ]  # fmt: skip
    (tmp_path / "broken_first.json").write_bytes(b'{"text": "op\n' + LINES)
    assert format_of(tmp_path / "broken_first.json") == "jsonl"


@pytest.fixture
def corpus(tmp_path, texts):
    """Return a folder of which two files are lines of JSON; others are added by tests."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "books-0000.json.gz").write_bytes(gzip.compress(lines))
    (folder / "extra-0001.jsonl.gz").write_bytes(gzip.compress(lines[: lines.index(b"\n") + 1]))
    (folder / "_SUCCESS").touch()
    return folder


def made(corpus, name, **options):
    return prepare(
        str(corpus), corpus.parent / name, vocab_size=300, heldout_fraction=0.3, **options
    )


def test_no_part_of_a_corpus_is_left_out_without_a_word(corpus, texts):
    (corpus / "sub").mkdir()
    (corpus / "sub" / "image.png").write_bytes(b"\x89PNG")
    elsewhere = corpus.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "more.jsonl").write_bytes(LINES)
    (corpus / "linked").symlink_to(elsewhere)  # a folder on another disk
    (corpus / "moved.jsonl").symlink_to(corpus / "gone.jsonl")
    with pytest.raises(SourceError) as refused:
        made(corpus, "store")
    for words in ("linked (a link to a folder)", "moved.jsonl (a link to nothing)", "image.png ("):
        assert words in str(refused.value)
    assert not (corpus.parent / "store").exists()
    manifest = made(corpus, "store", skip=["*.png", "linked", "moved.*"])
    assert manifest.skipped == {"left_out": 3}
    assert manifest.train.documents + manifest.heldout.documents == len(texts) + 1


@pytest.mark.parametrize("skip", ["sub", "sub/", "./sub/*", "SUB/*.TXT", "a.txt"])
def test_files_are_left_out_by_name_or_by_their_path(corpus, texts, skip):
    (corpus / "sub").mkdir()
    (corpus / "sub" / "a.txt").write_text("another text")
    manifest = made(corpus, "store", skip=[skip])
    assert manifest.skipped == {"left_out": 1}
    with pytest.raises(SourceError, match=r"--skip nothing is of no file of .*; name files, or"):
        made(corpus, "other", skip=["nothing"])


def test_a_pattern_may_be_of_one_source_of_several(corpus, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("another text")
    (other / "image.png").write_bytes(b"\x89PNG")
    sources = [("one", str(corpus)), ("two", str(other))]
    planned = plan_of(sources, Settings("text", 0.3, 0), {}, skip=["*.png"])
    assert [source.skipped for source in planned.sources] == [{}, {"left_out": 1}]


def test_a_stated_format_is_that_of_all_files(corpus, texts, capsys):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (corpus / "a.txt").write_text(lines)
    with_text = made(corpus, "by_content")
    assert "a.txt holds lines of JSON and is read as one text" in capsys.readouterr().err
    stated = made(corpus, "stated", file_format="jsonl")
    counts = [m.train.documents + m.heldout.documents for m in (with_text, stated)]
    assert counts == [len(texts) + 2, 2 * len(texts) + 1]
    assert "holds lines of JSON" not in capsys.readouterr().err


def test_a_text_that_is_not_utf8_is_not_left_out_without_a_word(corpus):
    (corpus / "latin.txt").write_bytes(b"caf\xe9 " * 50)
    with pytest.raises(SourceError, match=r"latin\.txt: the file is not UTF-8 text; fix it, or"):
        made(corpus, "store")
    assert made(corpus, "store", skip_broken=True).skipped == {"broken": 1}


def test_a_window_that_zstd_refuses_is_answered_with_the_command_for_it(tmp_path):
    # A frame without a checksum or a size whose window descriptor says 2 GiB, and a raw last block.
    frame = b"\x28\xb5\x2f\xfd\x00\xa8" + (len(LINES) << 3 | 1).to_bytes(3, "little") + LINES
    (tmp_path / "a.jsonl.zst").write_bytes(frame)
    with pytest.raises(SourceError, match=r"window is larger .* zstd -d --long=31 -c \S+ \| zstd"):
        list(documents(str(tmp_path / "a.jsonl.zst")))
