# SPDX-License-Identifier: Apache-2.0
"""Output of adopt and data: tables and JSON."""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks.reliability.wrong_data import TOKENIZER, pair
from tests.longhaul.json_units import not_numbers

DOCUMENTS = [[1] * (10 * number) + [2, 0] for number in range(1, 40)]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a folder with a tokenizer of three ids and two pairs, in a folder with a blank."""
    folder = tmp_path / "my data"
    for name, content in {
        **TOKENIZER,
        **pair(*DOCUMENTS, name="d/web"),
        **pair(*DOCUMENTS[:20], name="d/code"),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content or b"")
    return folder


def test_an_adopted_store_is_shown_and_counted(answer, files: Path, tmp_path: Path) -> None:
    store = tmp_path / "a store"
    words = ("--tokenizer", files / "t", "--out", store, "--heldout-documents", 3)
    code, shown, said = answer("adopt", files / "d", *words)
    assert code == 0, said
    assert "train: 53 documents" in shown
    command = said.splitlines()[-1].strip()
    assert command == f"longhaul data inspect {shlex.quote(str(store))}"

    (files / "a.txt").write_text("a b a")
    compared = answer("data", "tokenizers", store, "--text", files / "a.txt", "--json")
    assert json.loads(compared.out)["tokenizers"][0]["name"] == str(store / "tokenizer")

    code, shown, said = answer(*shlex.split(command)[1:])
    assert code == 0, said
    for words in ("Documents by length", "Kept whole in rows", "| code "):
        assert words in shown
    assert "copies: " in shown
    assert f"--seq 2K --store {shlex.quote(str(store))}" in said

    found = json.loads(answer("data", "inspect", store, "--json").out)
    assert [*not_numbers(found)] == []
    assert [source["name"] for source in found["sources"]] == ["code", "web"]
    assert found["together"]["documents"] == 53
    assert f"and the longest has {found['together']['longest_tokens']:,}" in shown
    assert found["copies"]["documents"] >= 15  # most of the shorter source is in the other too
    quick = answer("data", "inspect", store, "--lengths-only", "-q")
    assert "--lengths-only reads no tokens" in quick.out
    assert quick.err == ""


def test_adopt_prints_json_of_numbers(answer, files: Path, tmp_path: Path) -> None:
    words = (f"mine={files / 'd' / 'web'}", "--tokenizer", files / "t")
    adopted = answer("adopt", *words, "--out", tmp_path / "s", "--json")
    assert f"mine begins, read with {files / 't'}: 'a a a" in adopted.err
    assert "check that this reads as text" in adopted.err
    found = json.loads(adopted.out)
    assert [*not_numbers(found)] == []
    assert found["sources"][0]["name"] == "mine"
    splits = found["splits"].values()
    assert sum(split["documents"] for split in splits) == len(DOCUMENTS)


def test_all_pairs_of_a_named_folder_are_one_source(answer, files: Path, tmp_path: Path) -> None:
    words = (f"mine={files / 'd'}", "--tokenizer", files / "t", "--out", tmp_path / "s")
    found = json.loads(answer("adopt", *words, "--json").out)
    assert [source["name"] for source in found["sources"]] == ["mine"]
    (part,) = found["splits"]["train"]["parts"]
    assert [file["path"] for file in part["bins"]] == ["train.bin/00000.bin", "train.bin/00001.bin"]


def test_tokenizers_are_compared_in_a_table_and_as_json(answer, files: Path) -> None:
    (files / "a.txt").write_text("a b a")
    words = ("data", "tokenizers", files / "t", "--text", files / "a.txt")
    code, shown, said = answer(*words, "--card", "tiny")
    assert code == 0, said
    assert "of 1 document, no document of the source is held out, " in shown
    assert "at hidden size 128 (tiny)" in shown
    assert shlex.split(said.splitlines()[-1])[:3] == ["longhaul", "prepare", "--tokenizer"]
    line = json.dumps({"id": "a", "body": "a b a b " * 20}) + "\n"
    (files / "b.jsonl").write_text(line * 2)
    other = ("data", "tokenizers", files / "t", "--text", files / "b.jsonl")
    assert answer(*other).error().endswith("name the field of the text, such as --text-key body")
    said = answer(*other, "--text-key", "body", "--skip-broken").err.splitlines()[-1]
    assert said.endswith("--text-key body --skip-broken")
    found = json.loads(answer(*words, "--json", "--card", "tiny").out)
    assert [*not_numbers(found)] == []
    (row,) = found["tokenizers"]
    assert (row["tokens"], row["embedding_and_head_bytes"]) == (4, 2 * 3 * 128)


def test_a_store_of_more_tokens_than_its_card_is_refused_with_the_number_that_fits(
    answer, tmp_path: Path
) -> None:
    said = answer("prepare", "--out", "stores/tiny").error()
    assert "--vocab-size is 2,048, and --out stores/tiny is the store of the card tiny" in said
    assert "add --vocab-size 512, or name another folder" in said
    assert not (tmp_path / "stores").exists()
