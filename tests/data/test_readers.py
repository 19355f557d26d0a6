# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from data import readers as reading
from data.formats import jsonl
from data.readers import SourceError, documents

LINES = [{"text": "first"}, {"text": "second\nline", "more": 1}, {"text": "dritte \u00fc\u4e2d"}]
TEXTS = [line["text"] for line in LINES]


def read(source: Path | str | None, **options: object) -> list[str]:
    return [found.text for found in documents(source and str(source), **options)]


def write_jsonl(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_record_format_gives_the_same_documents(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", *LINES)
    gz, zst, rows = tmp_path / "a.jsonl.gz", tmp_path / "a.jsonl.zst", tmp_path / "a.parquet"
    gz.write_bytes(gzip.compress(plain.read_bytes()))
    zst.write_bytes(pa.compress(plain.read_bytes(), codec="zstd", asbytes=True))
    parquet.write_table(pa.table({"text": TEXTS}), rows)
    for path in (plain, gz, zst, rows):
        assert read(path) == TEXTS, path.name


def test_all_frames_of_a_zst_file_and_all_members_of_a_gz_file_are_read(tmp_path: Path) -> None:
    halves = [json.dumps(line).encode() + b"\n" for line in LINES]
    gz, zst = tmp_path / "a.jsonl.gz", tmp_path / "a.jsonl.zst"
    gz.write_bytes(b"".join(gzip.compress(half) for half in halves))
    zst.write_bytes(b"".join(pa.compress(half, codec="zstd", asbytes=True) for half in halves))
    assert read(gz) == TEXTS
    assert read(zst) == TEXTS


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_truncated_compressed_file_is_refused_even_when_broken_lines_are_skipped(
    tmp_path: Path, ending: str
) -> None:
    lines = "".join(json.dumps({"text": f"{n * n * 7919}"}) + "\n" for n in range(5000)).encode()
    packed = gzip.compress(lines) if ending == "gz" else pa.compress(lines, "zstd", asbytes=True)
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(SourceError, match=rf"a\.jsonl\.{ending}: damaged or unreadable"):
        read(path, skip_broken=True)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        pytest.param('{"text": "open', "invalid JSON", id="bad JSON"),
        pytest.param('{"text": "open', "(Invalid control character at column 15)", id="place"),
        pytest.param('["text"]', "not a JSON object but an array", id="array"),
        pytest.param('{"txt": "a"}', "no field 'text'; the line has 'txt'", id="no field"),
        pytest.param('{"text": 3}', "not a string but a number", id="number"),
        pytest.param('{"text": null}', "not a string but null", id="null"),
        pytest.param('{"text": "\\ud800"}', "surrogate", id="lone surrogate"),
        pytest.param("[" * 100_000, "unusable JSON", id="nested too deep"),
    ],
)
def test_a_broken_line_is_named_with_file_and_line_and_counted_only_when_asked(
    tmp_path: Path, line: str, problem: str
) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + '\n{"text": "also good"}\n')
    with pytest.raises(SourceError, match=r"some\.jsonl:3: ") as error:
        read(path)
    assert problem in str(error.value)
    skipped = Counter[str]()
    assert read(path, skip_broken=True, skipped=skipped) == ["good", "also good"]
    assert skipped == {"broken": 1}


def test_bytes_that_are_no_utf8_break_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl:1: invalid UTF-8 at byte 10"):
        read(path)


def test_a_document_over_the_cap_is_broken_and_the_next_line_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_DOCUMENT_BYTES", 100)
    monkeypatch.setattr(jsonl, "LONG_BYTES", 100)
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "x" * 450}, {"text": "short"})
    with pytest.raises(SourceError, match=r"a\.jsonl:1: the document is longer than 100 bytes"):
        read(path)
    assert read(path, skip_broken=True) == ["short"]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfb")
    assert read(path) == ["a"]
    assert read(tmp_path / "a.txt") == ["b"]


def test_a_folder_is_read_in_sorted_order_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "deep.py").write_text("deep")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "no.txt").write_text("hidden")
    for name in ("c.md", "a.txt", "b.rst"):
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "d.jsonl", {"text": "record"})
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"png")
    skipped = Counter[str]()
    with pytest.raises(SourceError, match=r"binary\.txt: the file is not UTF-8 text; fix it, or"):
        read(tmp_path)
    texts = read(tmp_path, skipped=skipped, skip_broken=True)
    assert texts == ["a.txt", "b.rst", "c.md", "record", "deep"]
    assert skipped == {"broken": 2, "empty": 1, "not_read": 1}


def test_a_field_that_no_record_has_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    body = "a text of several words " * 5
    lines = [{"id": "a", "body text": body, "n": 3}, {"id": "b", "body text": body}, {"id": "c"}]
    path = write_jsonl(tmp_path / "a.jsonl", *lines)
    with pytest.raises(SourceError, match=r"a\.jsonl:1: no field 'text'; .*'n'") as error:
        read(path)
    assert str(error.value).endswith("name the field of the text, such as --text-key 'body text'")
    write_jsonl(path, *lines, {"text": "one record has it"})
    with pytest.raises(SourceError, match=r"a\.jsonl:1: no field 'text'; .* with --skip-broken"):
        read(path)


def test_the_text_key_chooses_field_and_column(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", {"body": "b", "text": "t"})
    rows = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"body": ["b"], "text": ["t"]}), rows)
    assert read(lines, text_key="body") == read(rows, text_key="body") == ["b"]
    with pytest.raises(SourceError, match="no column 'words'; the file has body, text"):
        read(rows, text_key="words")


def test_a_parquet_value_that_is_no_string_is_named_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a", None, "b"]}), path)
    with pytest.raises(SourceError, match=r"a\.parquet row 2: .* null"):
        read(path)
    assert read(path, skip_broken=True) == ["a", "b"]


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(SourceError, match=r"a\.parquet: unreadable Parquet"):
        read(tmp_path / "a.parquet")


def test_a_source_without_documents_is_refused_with_what_was_left_out(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"holds no document; name a file"):
        read(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"holds no document \(left out: 1 of a format"):
        read(tmp_path)


def test_a_missing_source_and_an_unknown_ending_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        read(tmp_path / "nothing.jsonl")
    (tmp_path / "a.docx").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"not read: .*a\.docx \(neither Parquet nor"):
        read(tmp_path / "a.docx")


def test_no_source_reads_the_standard_library_and_no_installed_package() -> None:
    origins = []
    for found in documents(None):
        origins.append(Path(found.origin))
        if len(origins) == 300:
            break
    names = {path.name for path in origins}
    assert {"argparse.py", "ast.py", "os.py"} <= names
    assert not any("site-packages" in path.parts for path in origins)
    assert all(path.suffix == ".py" for path in origins)


def test_a_hub_source_names_data_set_configuration_and_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> object:
        asked.append((name, config, split, streaming))
        return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("hf:who/what:small@validation") == TEXTS
    assert read("hf:who/what") == TEXTS
    assert asked == [
        ("who/what", "small", "validation", True),
        ("who/what", None, "train", True),
    ]


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> object:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(SourceError, match=r"hf:who/what .*no route to host.*local file") as error:
        read("hf:who/what")
    assert "\n" not in str(error.value)


def test_importing_what_answers_bad_input_loads_no_large_library() -> None:
    program = (
        "import sys, data.readers, data.store, data.prepare, data.token_files.held_out;"
        "large = {'torch', 'megatron', 'nemo', 'transformers', 'datasets', 'pyarrow'};"
        "print(*sorted(large & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "\n"
