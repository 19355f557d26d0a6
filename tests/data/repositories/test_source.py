# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data.readers import SourceError
from data.repositories import source as repositories
from data.repositories.source import RepositoriesSource, header
from tests.house.rooms import TREE

FILES = {
    "README.md": "# About\n",
    "app/__init__.py": "",
    "app/main.py": "from app import model, store\n\nmain = model.run\n",
    "app/model.py": "from app.store import load\n\nrun = load\n",
    "app/store.py": "import app.model\n\nload = 1\n",
    "app/zero.py": "zero = 0\n",
    "src/core.c": '#include "core.h"\nint core;\n',
    "src/core.h": "extern int core;\n",
}
JOINED = """\
<!-- README.md -->
# About

# app/store.py
import app.model

load = 1

# app/model.py
from app.store import load

run = load

# app/main.py
from app import model, store

main = model.run

# app/zero.py
zero = 0

// src/core.c
#include "core.h"
int core;

// src/core.h
extern int core;
"""


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for path, content in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def read(path: Path) -> tuple[list[str], Counter[str]]:
    source, skipped = RepositoriesSource(f"repositories:{path}"), Counter()
    return [source.document(n, skipped).text for n in range(len(source))], skipped


def test_the_files_of_a_repository_are_joined_behind_their_imports(tmp_path: Path) -> None:
    """Model and store import each other; model is reached first, so store is written first."""
    write(tmp_path, FILES | {"pyproject.toml": ""})
    assert read(tmp_path) == ([JOINED], Counter())


def test_each_folder_of_a_folder_is_a_repository_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b", FILES)
    write(tmp_path / "a", {"one.py": "one = 1\n"})
    write(tmp_path / ".hidden", {"two.py": "two = 2\n"})
    write(tmp_path, {"notes.txt": "not in a repository\n"})
    assert read(tmp_path)[0] == ["# one.py\none = 1\n", JOINED]


def test_a_folder_with_git_is_one_repository(tmp_path: Path) -> None:
    write(tmp_path / "b", {"two.py": "two = 2\n"})
    write(tmp_path / "a", {"one.py": "one = 1\n"})
    (tmp_path / ".git").mkdir()
    assert read(tmp_path)[0] == ["# a/one.py\none = 1\n\n# b/two.py\ntwo = 2\n"]


def test_the_order_does_not_depend_on_hashes(tmp_path: Path) -> None:
    write(tmp_path, FILES | {"setup.py": ""})
    code = (
        "import sys; from collections import Counter;"
        "from data.repositories.source import RepositoriesSource;"
        "print(RepositoriesSource(sys.argv[1]).document(0, Counter()).text, end='')"
    )
    for seed in ("1", "2", "3"):
        printed = subprocess.run(
            [sys.executable, "-c", code, f"repositories:{tmp_path}"],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(TREE)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert printed == JOINED


def test_what_is_not_source_text_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repositories, "FILE_BYTES", 1000)
    outside = write(tmp_path / "outside", {"secret.py": "secret = 1\n"})
    here = write(
        tmp_path / "here",
        {
            "a.py": "a = 1\n",
            "Makefile": "all:\n",
            "picture.png": b"\x89PNG",
            "data.json": "{}",
            "latin.py": b"# caf\xe9\n",
            "binary.c": b"int a\0;",
            "large.py": "x = 1\n" * 1000,
            "empty.py": " \n",
            "node_modules/b.js": "b\n",
            ".github/c.yml": "c\n",
        },
    )
    (here / "link.py").symlink_to(outside / "secret.py")
    (here / "linked").symlink_to(outside)
    texts, skipped = read(here)
    assert texts == ["# Makefile\nall:\n\n# a.py\na = 1\n"]
    assert skipped == {"other_ending": 2, "undecodable": 2, "too_large": 1}


def test_a_document_ends_before_the_file_that_would_exceed_its_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repositories, "DOCUMENT_BYTES", 60)
    write(tmp_path, {f"{name}.py": f"{name} = 1\n" * 3 for name in "abcd"} | {"setup.cfg": ""})
    texts, skipped = read(tmp_path)
    assert texts == ["# a.py\na = 1\na = 1\na = 1\n\n# b.py\nb = 1\nb = 1\nb = 1\n"]
    assert skipped == {"too_large": 2}
    assert RepositoriesSource(f"repositories:{tmp_path}").size(0) == 60


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("a/b.py", "# a/b.py"),
        ("b.RS", "// b.RS"),
        ("q.sql", "-- q.sql"),
        ("index.html", "<!-- index.html -->"),
        ("Makefile", "# Makefile"),
        ("t.tex", "% t.tex"),
    ],
)
def test_the_path_is_a_comment_of_the_language(path: str, line: str) -> None:
    assert header(path) == line


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("", "does not name a folder; write repositories:PATH"),
        ("nowhere", "does not name a folder"),
        ("file.py", "does not name a folder"),
        ("empty", "has no folders, and is not a repository itself"),
    ],
)
def test_a_wrong_path_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"file.py": "a\n", "empty/file.py": "a\n"})
    with pytest.raises(SourceError) as error:
        RepositoriesSource(f"repositories:{word}")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_near_path_is_offered(tmp_path: Path) -> None:
    (tmp_path / "checkouts").mkdir()
    with pytest.raises(SourceError, match=r"did you mean .*checkouts\?"):
        RepositoriesSource(f"repositories:{tmp_path / 'checkout'}")
