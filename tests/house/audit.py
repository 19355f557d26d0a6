# SPDX-License-Identifier: Apache-2.0
"""Ask pip-audit about each lock, but for the advisories that docs/security.md answers.

python -m tests.house.audit PIP_AUDIT
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.house.rooms import TREE

PAGE = TREE / "docs" / "security.md"
LOCKS = sorted(TREE.glob("constraints-py*.txt"))
ADVISORY = re.compile(r"\b(?:CVE-\d{4}-\d{4,}|PYSEC-\d{4}-\d+|GHSA(?:-[0-9a-z]{4}){3})\b")


def accepted() -> list[str]:
    """Return the advisories that the page says why they do not apply."""
    return sorted(set(ADVISORY.findall(PAGE.read_text())))


def findings(answer: dict, known: list[str]) -> list[str]:
    """Return a line for each vulnerability that is not known; raise ValueError if none was asked.

    pip-audit succeeds if its service knows no package at all, as behind a mirror of the index.
    """
    packages = answer["dependencies"]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if len(skipped) == len(packages):
        raise ValueError(
            f"the service knows none of the {len(packages)} packages, so nothing was audited; run "
            "this where the index itself answers and not a mirror, or set "
            "PIP_AUDIT_VULNERABILITY_SERVICE=osv"
        )
    lines = [
        f"{package['name']} {package['version']}: {found['id']} "
        f"({', '.join(found['aliases'])}), fixed in {', '.join(found['fix_versions']) or 'none'}"
        for package in packages
        for found in package.get("vulns", ())
        if not {found["id"], *found["aliases"]} & set(known)
    ]
    return [*lines, *(f"{name}: not audited" for name in skipped)]


def audit(program: str, lock: Path) -> list[str]:
    """Return what pip-audit finds in a lock and the page does not answer."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "audit.json"
        command = [program, "--disable-pip", "--no-deps", "--requirement", str(lock)]
        command += ["--format", "json", "--output", str(out), "--progress-spinner", "off"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.is_file():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ValueError(f"pip-audit did not answer: {last}")
        return findings(json.loads(out.read_text()), accepted())


def main(program: str) -> int:
    """Print what each lock has; return 1 if anything is not answered."""
    found = 0
    for lock in LOCKS:
        try:
            lines = audit(program, lock)
        except ValueError as error:
            sys.stderr.write(f"{lock.name}: {error}\n")
            return 2
        found += len(lines)
        for line in lines or ["nothing that docs/security.md does not answer"]:
            sys.stdout.write(f"{lock.name}: {line}\n")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
