# SPDX-License-Identifier: Apache-2.0
"""Files of predictions: which samples are left, and which files are refused."""

import json
import shutil
from pathlib import Path

import pytest

from data.files.sha256 import sha256_of
from eval.ruler.length import RulerError
from eval.ruler.predictions import (
    append,
    begin,
    first_samples,
    job_folder,
    questions,
    require_room,
    require_same,
    require_tokenizer,
)
from eval.ruler.samples import MANIFEST, make, suite_folder
from eval.ruler.sources import Sources
from eval.ruler.tasks import TASKS
from eval.ruler.tokens import Tokens
from tests.eval.ruler import support

FACTS = {"weights": "one", "tokenizer": "t"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Return a folder with a file of two samples."""
    sources, tokens = Sources(None), Tokens(support.byte_level())
    folder = suite_folder(tmp_path_factory.mktemp("ruler"), sources, tokens)
    make(folder, TASKS["vt"], length=2048, samples=2, seed=0, tokens=tokens, sources=sources)
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "samples")


@pytest.fixture
def file(folder) -> Path:
    return next(folder.glob("*.jsonl"))


def test_samples_are_listed_with_what_they_were_made_with(folder, file):
    asked = questions([folder])
    assert asked.files == (file,)
    names = [sample.id for sample in first_samples(file, None)]
    assert list(asked.lengths) == names
    assert asked.suite == "ruler-offline"
    assert list(questions([file], limit=1).lengths) == names[:1]
    require_tokenizer(asked, support.byte_level(), "the stage")
    require_room(asked, 2048, "the stage")


def test_a_file_that_is_not_one_of_samples_is_refused(tmp_path, folder, file):
    other = tmp_path / "other.jsonl"
    for text in ("no JSON", "[]", '{"id": "a", "prediction": "b"}'):
        other.write_text(text)
        with pytest.raises(RulerError, match=r"other\.jsonl is not"):
            questions([other])
    other.write_text("")
    with pytest.raises(RulerError, match=r"other\.jsonl has no samples"):
        questions([other])
    shutil.copy(file, tmp_path)
    with pytest.raises(RulerError, match="is in two of the files"):
        questions([file, tmp_path / file.name])
    with pytest.raises(RulerError, match=r"does not list vt-2048-seed0\.jsonl"):
        questions([tmp_path / file.name])
    file.write_text(file.read_text().replace("vt-2048-seed0-1", "vt-2048-seed0-2"))
    with pytest.raises(RulerError, match="has changed since it was made"):
        questions([folder])


def test_files_of_two_tokenizers_are_refused(tmp_path, folder, file):
    other = tmp_path / "other"
    other.mkdir()
    name = file.name.replace("seed0", "seed1")
    (other / name).write_text(file.read_text().replace("seed0", "seed1"))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["tokenizer"]["sha256"] = "another"
    manifest["files"][0]["file"] = name
    manifest["files"][0]["sha256"] = sha256_of([other / name])[0]
    (other / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RulerError, match=r"differ in tokenizer: .* and another"):
        questions([folder, other])


def test_another_tokenizer_and_too_short_a_context_are_named(folder):
    asked = questions([folder])
    with pytest.raises(RulerError, match="another tokenizer than stage x"):
        require_tokenizer(asked, support.with_marks(), "stage x")
    with pytest.raises(RulerError, match="the context of stage x is 1,024"):
        require_room(asked, 1024, "stage x")


def test_answers_are_kept_and_a_line_cut_off_is_dropped(tmp_path):
    out = tmp_path / "new" / "p.jsonl"
    assert begin(out, FACTS) == set()
    append(out, "a", "one\u2028line")
    append(out, "b", "")
    whole = out.read_bytes()
    with out.open("a") as file:
        file.write('{"id": "c", "predic')
    assert begin(out, FACTS) == {"a", "b"}
    assert out.read_bytes() == whole


def test_two_models_do_not_share_a_file(tmp_path):
    out = tmp_path / "p.jsonl"
    begin(out, FACTS)
    require_same(out, {**FACTS, "weights": "two"})  # no answer yet
    append(out, "a", "text")
    before = out.read_bytes()
    for name in FACTS:
        with pytest.raises(RulerError, match=rf"p\.jsonl has predictions .* \({name} .*not two"):
            begin(out, {**FACTS, name: "two"})
    (job_folder(out) / "model.json").unlink()
    with pytest.raises(RulerError, match=r"no .*model\.json says which model made it"):
        begin(out, FACTS)
    assert out.read_bytes() == before
