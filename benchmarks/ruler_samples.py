# SPDX-License-Identifier: Apache-2.0
"""Making RULER's samples: our generator and the lm-evaluation-harness's, in turn.

    python -m benchmarks.ruler_samples --tokenizer FOLDER
    python -m benchmarks.ruler_samples --tokenizer FOLDER --length 4K --samples 4 --rounds 1

Claim: 500 samples of a task at 128K tokens are made in less time than by `lm_eval` 0.4.13, which is
installed by `pip install -e '.[eval]'` and needs `wonderwords` and `nltk` too. Where it is missing
only ours is measured, and the page says so.

Both use the same tokenizer folder, make the same number of samples of a length, and run in turn in
a process of their own, the first of a round last in the next; imports and loading the tokenizer are
not counted. Theirs is called at `prepare_niah.generate_samples` (needles), which needs no network
with the haystacks `repeat` and `needle`. With prose it needs the data `punkt_tab` of `nltk`, and is
left out without it; the prose of both is our own text. Its other tasks download data, or make a
fixed 500 samples, and are not called. A row has the shares of the length that prompts and tokens to
generate fill: a generator that makes short samples is faster for it.
"""

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from data.tokenization.tokenizer import load
from eval.ruler.forms import NEEDLES, ONE_NEEDLE
from eval.ruler.haystack import Prose
from eval.ruler.needles import Needles
from eval.ruler.samples import make
from eval.ruler.sources import Sources
from eval.ruler.tasks import TASKS, named
from eval.ruler.tokens import Tokens
from recipes.spec.naming import length_from, length_shown

PEER = "lm_eval"
PEER_TASKS = {
    "niah_single_1": Needles(haystack="noise"),
    "niah_single_2": Needles(haystack="essay"),
    "niah_multikey_2": Needles(haystack="needles"),
    "niah_multikey_3": Needles(haystack="needles", key="uuids", value="uuids"),
    "niah_multiquery": Needles(haystack="essay", queries=4),
}
"""Tasks that both are measured at."""
PEER_PROSE_WORDS = 4_000_000
"""Words of prose that theirs is given: it does not repeat a text."""
CONTESTANTS = ("ours", PEER)


class Measured(NamedTuple):
    """Seconds, and the shares of the length that the samples fill."""

    seconds: float
    least: float
    most: float


def ours(task: str, tokenizer: str, length: int, samples: int) -> Measured:
    """Make a file of samples."""
    tokens, sources = Tokens(load(tokenizer)), Sources()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        row, _ = make(
            Path(folder), TASKS[task], length=length, samples=samples, seed=0, tokens=tokens,
            sources=sources,
        )  # fmt: skip
        seconds = time.perf_counter() - began
    generated = TASKS[task].form.new_tokens
    fewest, most = row.fewest_tokens + generated, row.most_tokens + generated
    return Measured(seconds, fewest / length, most / length)


def theirs(task: str, tokenizer: str, length: int, samples: int) -> Measured:
    """Make a file of samples by `lm_eval`."""
    from lm_eval.tasks.ruler import prepare_niah

    needles = PEER_TASKS[task]
    hugging_face = load(tokenizer).hugging_face
    names = {"noise": "repeat", "essay": "essay", "needles": "needle"}
    if needles.haystack == "essay":
        words = min(PEER_PROSE_WORDS, 2 * length)
        haystack: Any = " ".join(Prose().parts(words)).split(" ")
    else:
        haystack = prepare_niah.get_haystack(type_haystack=names[needles.haystack])
    form = ONE_NEEDLE if needles.queries == 1 else NEEDLES
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        made = prepare_niah.generate_samples(
            haystack,
            hugging_face,
            max_seq_length=length,
            type_haystack=names[needles.haystack],
            type_needle_k=needles.key,
            type_needle_v=needles.value,
            template=NEEDLES.template.replace("{values}", "{type_needle_v}"),
            num_samples=samples,
            tokens_to_generate=form.new_tokens,
            num_needle_k=needles.keys,
            num_needle_v=needles.values,
            num_needle_q=needles.queries,
        )
        with (Path(folder) / "samples.jsonl").open("w") as file:
            for sample in made:
                file.write(json.dumps(sample) + "\n")
        seconds = time.perf_counter() - began
    lengths = [sample["length"] for sample in made]
    return Measured(seconds, min(lengths) / length, max(lengths) / length)


def contestant(name: str, arguments: tuple[Any, ...]) -> Measured | str:
    """Run a contestant; return why it failed, since not every error can be sent to a parent."""
    try:
        return {"ours": ours, PEER: theirs}[name](*arguments)
    except Exception as error:  # a peer may raise anything; its reason goes onto the page
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def in_a_process(name: str, *arguments: Any) -> Measured:
    """Run a contestant in a new process.

    Raises:
        RuntimeError: if it fails.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        result = pool.submit(contestant, name, arguments).result()
    if isinstance(result, str):
        raise RuntimeError(f"{name} fails at {arguments[0]}: {result}")
    return result


def missing_peer() -> dict[str, str]:
    """Return the tasks at which theirs cannot be measured, and why."""
    for package in (PEER, "wonderwords", "nltk"):
        if importlib.util.find_spec(package) is None:
            return dict.fromkeys(TASKS, f"{package} is not installed")
    why = dict.fromkeys(TASKS.keys() - PEER_TASKS.keys(), "it downloads data or has a fixed size")
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        prose = (name for name, needles in PEER_TASKS.items() if needles.haystack == "essay")
        why |= dict.fromkeys(prose, "nltk has no punkt_tab")
    return why


def measured(arguments: argparse.Namespace) -> tuple[list[list[str]], dict[str, str]]:
    """Return a row for each task and contestant, and why theirs is missing at a task."""
    why = missing_peer()
    rows = []
    for task in named(arguments.tasks.split(",")):
        able = [name for name in CONTESTANTS if name == "ours" or task.name not in why]
        found: dict[str, list[Measured]] = {name: [] for name in able}
        for turn in range(arguments.rounds):
            for name in able if turn % 2 == 0 else reversed(able):
                found[name].append(
                    in_a_process(
                        name, task.name, arguments.tokenizer, arguments.length, arguments.samples
                    )
                )
        for name, results in found.items():
            seconds = statistics.median(one.seconds for one in results)
            rows.append(
                [
                    task.name,
                    name,
                    f"{seconds:,.1f}",
                    f"{seconds / arguments.samples * 1e3:,.0f}",
                    f"{min(one.least for one in results):.1%}",
                    f"{max(one.most for one in results):.1%}",
                ]
            )
    return rows, {task: why[task] for task in why if task in {row[0] for row in rows}}


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="Folder of a Hugging Face tokenizer.")
    parser.add_argument("--length", type=length_from, default=length_from("128K"))
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--tasks", default=",".join(PEER_TASKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    rows, why = measured(arguments)
    head = ["task", "generator", "seconds", "ms a sample", "least filled", "most filled"]
    sections = [table(head, rows)]
    if why:
        lines = (f"* {task}: {reason}" for task, reason in sorted(why.items()))
        sections.append(f"{PEER} was not measured at:\n\n" + "\n".join(lines))
    text = page(
        f"RULER: {arguments.samples:,} samples of {length_shown(arguments.length)} tokens",
        facts(["tokenizers", "lm-eval"]),
        sections,
    )
    print(text, end="")
    if arguments.out:
        write(arguments.out, text)


if __name__ == "__main__":
    main()
