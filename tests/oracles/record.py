# SPDX-License-Identifier: Apache-2.0
"""Run oracles on the tree on Python's path; write the record of each to a folder as JSON.

python -c "...; from oracles.record import main; main()" TREE SUITE FOLDER NAME...
"""

import hashlib
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from .command import FOLDER, tree


def digest(suite: str, name: str, tables: tuple[str, ...]) -> str:
    """Return the SHA-256 of the code and of the tables of an oracle: another one is run again."""
    read = [f"{suite}.py", "command.py", "frozen.py", *tables]
    found = hashlib.sha256(name.encode())
    for path in read:
        found.update((FOLDER / path).read_bytes())
    return found.hexdigest()


def spent() -> float:
    """Return the CPU seconds of this process, of its children, and of the tests' warm server."""
    path = Path(os.environ.get("LONGHAUL_WARM_START", "")) / "cpu"
    forked = path.read_text().splitlines() if path.is_file() else []
    return sum(os.times()[:4]) + sum(float(line.split()[0]) for line in forked)


def main() -> None:
    """Run the oracles that are named."""
    of, suite, folder, *names = sys.argv[1:]
    if tree() != Path(of).resolve():
        raise SystemExit(f"Python imports {tree()}, not {of}")
    module = importlib.import_module(f".{suite}", __package__)
    for name in names:
        before = spent()
        record: dict[str, object] = {"digest": digest(suite, name, module.TABLES.get(name, ()))}
        try:
            record["entries"] = module.ORACLES[name]()
        except Exception:
            record["error"] = traceback.format_exc()
        record["seconds"] = round(spent() - before, 1)
        path = Path(folder) / f"{name}.json"
        path.with_suffix(".part").write_text(json.dumps(record, indent=1))
        path.with_suffix(".part").rename(path)
