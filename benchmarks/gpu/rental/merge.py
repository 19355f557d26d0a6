# SPDX-License-Identifier: Apache-2.0
"""Keep the results that came back from a rental, and write their page.

    python -m benchmarks.gpu.rental.merge FOLDER

Each case becomes a file in `benchmarks/gpu/measured`, in the folder of its GPU; a file with figures
that count is replaced only by figures that count. The page of everything kept of that GPU is
`benchmarks/results/gpu_<GPU>_<date>.md`.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.cases import all_cases
from benchmarks.gpu.results import FILE, MEASURED, Result, Results, folder_of, kept
from benchmarks.gpu.sizes import SIZES
from benchmarks.harness.page import write
from data.files.whole import write_text

PAGES = Path(__file__).resolve().parents[2] / "results"


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help=f"folder that came back, with its {FILE}")
    parser.add_argument("--measured", type=Path, default=MEASURED, help="where results are kept")
    parser.add_argument("--pages", type=Path, default=PAGES, help="folder of the page")
    given = parser.parse_args()
    try:
        folder, page = merge(given.folder, given.measured, given.pages)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{folder}: {len(kept(folder))} results\n{page}")


def merge(came_back: Path, measured: Path, pages: Path) -> tuple[Path, Path]:
    """Keep the results of a folder; return where, and the page.

    Raises ValueError for a folder without results, with those of several machines, and for figures
    of a CPU where those of GPUs are kept.
    """
    if not (came_back / FILE).is_file():
        raise ValueError(f"{came_back} has no {FILE}; name the folder that came back")
    new = Results(came_back).read()
    devices = {one.device for one in new.values()}
    if measured == MEASURED and devices != {"cuda"}:
        raise ValueError(f"{came_back} has figures of a CPU, which mean nothing and are not kept")
    machines = {one.facts["machine"] for one in new.values() if one.facts}
    if len(machines) != 1:
        raise ValueError(
            f"{came_back} has results of {len(machines)} machines; each folder is of one"
        )
    gpu = folder_of(machines.pop())
    folder = measured / gpu
    folder.mkdir(parents=True, exist_ok=True)
    for name, one in better(kept(folder), new).items():
        write_text(folder / f"{name}.json", json.dumps(asdict(one), indent=1) + "\n")
    sizes = SIZES["cpu" if devices == {"cpu"} else "cuda"]
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    page = pages / f"gpu_{gpu}_{date}.md"
    write(page, report.whole_page(all_cases(sizes), kept(folder), sizes))
    return folder, page


def better(old: Mapping[str, Result], new: Mapping[str, Result]) -> dict[str, Result]:
    """Return the new results but those that do not count where an old one does."""
    lost = {name for name, one in old.items() if one.counts}
    return {name: one for name, one in new.items() if one.counts or name not in lost}


if __name__ == "__main__":
    main()
