# SPDX-License-Identifier: Apache-2.0
"""Repositories and filler of synthetic documents that change while a store is prepared."""

import os

import pytest

from data.preparation import plan
from data.preparation.named_sources import parsed_sources
from data.prepare import prepare, run_tasks, write_plan
from data.readers import SourceError
from tests.data.preparation.conftest import contents


@pytest.fixture
def options(tokenizer_folder):
    return {"tokenizer": tokenizer_folder, "heldout_fraction": 0.4}


@pytest.fixture
def code(tmp_path):
    """Return a folder of repositories, some of which share a shard."""
    for number in range(12):
        repository = tmp_path / "code" / f"r{number:02}"
        repository.mkdir(parents=True)
        (repository / "a.py").write_text(f"number = {number}\n" * 60)
    return tmp_path / "code"


def test_an_interrupted_store_of_repositories_has_their_changes_of_equal_size(
    code, options, tmp_path
):
    source = f"repositories:{code}"
    work = write_plan(source, tmp_path / "store", **options)
    assert 1 < work.count < 12
    run_tasks(work.folder, 0, 1)
    changed = code / "r11" / "a.py"
    before = changed.stat()
    changed.write_text("number + 11\n" * 60)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert changed.stat().st_size == before.st_size
    again = write_plan(source, tmp_path / "store", **options)
    assert again.missing() == [work.count - 1]
    continued = prepare(source, tmp_path / "store", **options)
    fresh = prepare(source, tmp_path / "fresh", **options)
    assert contents(continued.root) == contents(fresh.root)


@pytest.mark.parametrize("name", ["a.py", "b.py", "c.png"])
def test_a_task_refuses_a_repository_that_has_changed_since_the_plan(name, code, options, tmp_path):
    work = write_plan(f"repositories:{code}", tmp_path / "store", **options)
    (code / "r11" / name).write_text("b = 2\n")
    run_tasks(work.folder, 0, None)
    with pytest.raises(SourceError, match=r"r11 has changed since the plan was made; start") as one:
        run_tasks(work.folder, work.count - 1, None)
    assert "\n" not in str(one.value)


@pytest.mark.parametrize("kind", ["jsonl", "repositories"])
def test_filler_that_has_changed_is_refused_by_a_task_and_read_again_by_the_command(
    kind, code, corpus, options, tmp_path, monkeypatch
):
    monkeypatch.setattr(plan, "MADE_BYTES", 9000)
    filler, file = f"repositories:{code}", code / "r11" / "a.py"
    if kind == "jsonl":
        file = tmp_path / "filler.jsonl"
        file.write_bytes(corpus.read_bytes())
        filler = str(file)
    source = f"synthetic:copy,length=1K,documents=12,passage=64,filler={filler}"
    work = write_plan(source, tmp_path / "store", **options)
    assert work.count > 2
    run_tasks(work.folder, 0, None)  # this process has read the filler
    old, new = ("long", "tall") if kind == "jsonl" else ("number", "letter")
    changed = file.read_text().replace(old, new)
    assert changed != file.read_text()
    file.write_text(changed)
    other = write_plan(source, tmp_path / "other", **options)
    assert other.plan.sha256 != work.plan.sha256
    file.write_text(changed.replace(new, "XXXX"))
    with pytest.raises(SourceError, match=r"filler .* has changed since the plan was made; start"):
        run_tasks(other.folder, 0, None)
    continued = prepare(source, tmp_path / "store", **options)
    fresh = prepare(source, tmp_path / "fresh", **options)
    assert contents(continued.root) == contents(fresh.root)


def test_equals_signs_of_settings_name_no_source():
    alone = "synthetic:copy,filler=" + "books/" * 100
    assert parsed_sources([alone]) == alone
    assert parsed_sources([f"n={alone}", "c=repositories:a=b"]) == {
        "n": alone,
        "c": "repositories:a=b",
    }
    word = "synthetic:copy,filler=" + "b" * 300  # longer than the name of a file may be
    assert parsed_sources([word]) == word
    assert parsed_sources([f"n={word}"]) == {"n": word}
    with pytest.raises(SourceError, match="'N' cannot name a source"):
        parsed_sources([f"N={word}"])
