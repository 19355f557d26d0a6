# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest

from data.repositories.dependencies import imports_of, in_order


def test_files_follow_what_they_import_and_a_cycle_is_cut_where_it_was_entered() -> None:
    imports = {"a": ["z"], "z": ["y"], "y": ["z", "x"], "c": ["a"]}
    # a is visited first: it needs z, z needs y, and y's import of z is the one that is ignored.
    assert in_order(["a", "b", "c", "x", "y", "z"], imports) == ["x", "y", "z", "a", "b", "c"]


def test_every_file_appears_once_and_behind_its_imports_where_there_is_no_cycle() -> None:
    paths = [f"f{n:03}" for n in range(200)]
    imports = {
        path: [paths[(7 * n + k) % 200] for k in range(3) if (7 * n + k) % 200 > n]
        for n, path in enumerate(paths)
    }
    ordered = in_order(paths, imports)
    assert sorted(ordered) == paths
    assert all(
        ordered.index(needed) < ordered.index(path) for path, of in imports.items() for needed in of
    )


def test_thousands_of_files_that_import_one_another_in_a_row_are_ordered() -> None:
    paths = [f"{n:05}" for n in range(20_000)]
    imports = {path: [after] for path, after in pairwise(paths)}
    assert in_order(paths, imports) == paths[::-1]


@pytest.mark.parametrize(
    ("path", "text", "imported"),
    [
        ("pkg/a.py", "import pkg.b", {"pkg/b.py"}),
        ("pkg/a.py", "import pkg", {"pkg/__init__.py"}),
        ("pkg/a.py", "from pkg import b, name", {"pkg/b.py", "pkg/__init__.py"}),
        ("pkg/a.py", "from . import b", {"pkg/b.py"}),
        ("pkg/a.py", "from .b import name", {"pkg/b.py"}),
        ("pkg/sub/c.py", "from ..b import name", {"pkg/b.py"}),
        ("pkg/sub/c.py", "from .... import far", set()),
        ("pkg/a.py", "from .sub import *", {"pkg/sub/__init__.py"}),
        ("pkg/a.py", "import json", set()),  # pkg/json.py is not imported so from a package
        ("script.py", "import tool.run", {"src/tool/run.py"}),
        ("pkg/a.py", "def f():\n    import pkg.b", set()),
        ("pkg/a.py", "if TYPE_CHECKING:\n    import pkg.b\nelse:\n    import pkg.sub.c",
         {"pkg/sub/c.py"}),
        ("pkg/a.py", "try:\n    import pkg.b\nexcept ImportError:\n    pass", {"pkg/b.py"}),
        ("pkg/a.py", "print 'of Python 2'\nimport pkg.b", set()),
        ("pkg/a.py", "x = " + "(" * 5000 + ")" * 5000, set()),
        ("pkg/a.py", "import pkg.a", set()),
        ("main.go", 'import "pkg/b"', set()),
        ("c/main.c", '#include "part.h"', set()),
    ],
)  # fmt: skip
def test_imports_are_found_in_the_repository(path: str, text: str, imported: set[str]) -> None:
    files = (
        "pkg/__init__.py", "pkg/a.py", "pkg/b.py", "pkg/json.py", "pkg/sub/__init__.py",
        "pkg/sub/c.py", "src/tool/__init__.py", "src/tool/run.py", "c/part.h", "b.py",
    )  # fmt: skip
    texts = dict.fromkeys(files, "") | {path: text}
    assert imports_of(texts).get(path, set()) == imported
