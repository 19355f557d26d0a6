# SPDX-License-Identifier: Apache-2.0
"""Documents to token files, compared with Megatron's way and with `datasets.map`, on the CPU.

    python -m benchmarks.prepare
    python -m benchmarks.prepare --mb 1000 --rounds 1

Claim: a store of 1 GB of JSONL takes no longer than the faster of the two, at 0.8 or more of the
rate of the tokenizer itself, in less than 2 GiB.

The documents are source code, headers and documentation of this machine; from the second copy on a
file begins with a line that tells the copies apart. The tokenizer is trained on a part of them. All
contestants use the same number of processes or threads and run in turn, each in a process of its
own, the first of a round last in the next:

* ours: `data.prepare.prepare` with that tokenizer, from the plan to the renamed store. It also
  splits, hashes input and output, and compares the parts with their receipts;
* Megatron's way: a `multiprocessing.Pool` whose processes parse and tokenize a line each, and
  Megatron's `IndexedDatasetBuilder` in the parent, as in `tools/preprocess_data.py`;
* `datasets`: `load_dataset("json")`, then `map(batched=True)`. It ends with Arrow files of ids;
* bare: `encode_batch_fast` of texts in memory, on threads. It reads and writes nothing.

The imports of a contestant's first process are not counted, the start of its others is. The
processors' seconds are those of all processes: on a machine with other work they vary less.
Memory is the largest sum of the resident sets of a contestant's processes, sampled each 0.1 s:
shared pages count several times.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write


class Measured(NamedTuple):
    """Seconds by the clock and of all its processors, and MiB."""

    seconds: float
    cpu: float
    peak: float


CONTESTANTS = ("ours", "Megatron's way", "datasets", "bare")
ROOTS = ("/usr/include", "/usr/share", "/usr/lib", "/usr/src", "/etc", sys.base_prefix, sys.prefix)
ENDINGS = {".py", ".h", ".c", ".md", ".txt", ".rst", ".html", ".js", ".pl", ".sh", ".hpp", ".pyi"}
VOCABULARY = 16_384
TRAINED_BYTES = 2**25
SAMPLED_SECONDS = 0.1


def texts() -> Iterator[str]:
    """Yield texts of this machine, over and over, no two of them equal."""
    copy = 0
    while True:
        for root in ROOTS:
            for folder, folders, names in os.walk(root):
                folders.sort()
                for name in sorted(names):
                    path = Path(folder, name)
                    if path.suffix not in ENDINGS or path.is_symlink():
                        continue
                    try:
                        text = path.read_text(encoding="utf-8")
                    except (OSError, UnicodeDecodeError):
                        continue
                    if len(text) > 200 and "\0" not in text:
                        yield f"copy {copy} of {path}\n{text}" if copy else text
        copy += 1


def write_corpus(path: Path, megabytes: int) -> int:
    """Write documents as JSONL; return the bytes of their texts."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for text in texts():
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size >= megabytes * 1_000_000:
                return size
    raise AssertionError


def write_tokenizer(corpus: Path, folder: Path) -> None:
    """Train a tokenizer on documents of the corpus."""
    from data.tokenization.tokenizer import train

    chosen, size = [], 0
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            if random.Random(line[:200]).random() < 0.3:
                chosen.append(json.loads(line)["text"])
                size += len(chosen[-1])
                if size > TRAINED_BYTES:
                    break
    train(chosen, VOCABULARY).save(folder)


def ours(corpus: Path, tokenizer: Path, out: Path, processes: int) -> float:
    """Return the seconds of `prepare`."""
    from data.preparation.engine import Engine
    from data.prepare import prepare

    begin = time.perf_counter()
    engine = Engine(workers=processes)
    prepare(str(corpus), out / "store", tokenizer=str(tokenizer), engine=engine)
    return time.perf_counter() - begin


_ENCODER: Any = None


def _start_encoder(tokenizer: str) -> None:
    global _ENCODER  # noqa: PLW0603
    from transformers import AutoTokenizer

    _ENCODER = AutoTokenizer.from_pretrained(tokenizer)


def _encode(line: str) -> tuple[list[int], int]:
    text = json.loads(line)["text"]
    ids = _ENCODER(text).input_ids
    ids.append(_ENCODER.eos_token_id)
    return ids, len(line)


def megatrons_way(corpus: Path, tokenizer: Path, out: Path, processes: int) -> float:
    """Return the seconds of a pool of encoders and Megatron's builder."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    begin = time.perf_counter()
    kind = DType.optimal_dtype(VOCABULARY)
    builder = IndexedDatasetBuilder(str(out / "m.bin"), kind)
    with (
        multiprocessing.Pool(processes, _start_encoder, (str(tokenizer),)) as pool,
        corpus.open(encoding="utf-8") as lines,
    ):
        for ids, _ in pool.imap(_encode, lines, 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
    builder.finalize(str(out / "m.idx"))
    return time.perf_counter() - begin


def of_datasets(corpus: Path, tokenizer: Path, out: Path, processes: int) -> float:
    """Return the seconds of `load_dataset` and `map`."""
    import datasets
    from transformers import AutoTokenizer

    encoder = AutoTokenizer.from_pretrained(str(tokenizer))
    datasets.disable_progress_bars()
    begin = time.perf_counter()
    rows = datasets.load_dataset(
        "json", data_files=str(corpus), split="train", cache_dir=str(out / "cache")
    )
    rows.map(
        lambda batch: {"ids": encoder(batch["text"]).input_ids},
        batched=True, remove_columns=["text"], num_proc=processes,
    )  # fmt: skip
    return time.perf_counter() - begin


def bare(corpus: Path, tokenizer: Path, out: Path, processes: int) -> float:
    """Return the seconds of the tokenizer itself."""
    from tokenizers import Tokenizer

    del out, processes
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    batch: list[str] = []
    seconds, size = 0.0, 0

    def encode() -> float:
        begin = time.perf_counter()
        encoder.encode_batch_fast(batch, add_special_tokens=False)
        return time.perf_counter() - begin

    with corpus.open(encoding="utf-8") as file:
        for line in file:
            batch.append(json.loads(line)["text"])
            size += len(batch[-1])
            if size > 2**22:
                seconds += encode()
                batch, size = [], 0
    return seconds + (encode() if batch else 0.0)


def _import(name: str) -> None:
    if name != "bare":
        from transformers import AutoTokenizer

        assert AutoTokenizer
    if name == "Megatron's way":
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        assert IndexedDatasetBuilder
    if name == "datasets":
        import datasets

        assert datasets


RUN = dict(zip(CONTESTANTS, (ours, megatrons_way, of_datasets, bare), strict=True))


def measured(name: str, words: Sequence[str], processes: int) -> "Measured":
    """Run a contestant in a process of its own."""
    threads = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(processes)}
    one = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    before = _cpu()
    with tempfile.TemporaryDirectory(prefix="prepare-") as out:
        command = [sys.executable, "-m", "benchmarks.prepare", "--contestant", name, *words]
        running = subprocess.Popen(
            [*command, out], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **(threads if name == "bare" else one)},
        )  # fmt: skip
        peak = Peak(running.pid)
        said, _ = running.communicate()
        peak.stop()
    if running.returncode:
        raise RuntimeError(f"{name} ended with {running.returncode}")
    seconds, imports = map(float, said.split()[-2:])
    return Measured(seconds, _cpu() - before - imports, peak.bytes / 2**20)


def _cpu() -> float:
    """Return the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Peak:
    """The largest sum of resident sets of a process and those below it."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLED_SECONDS):
            size = 0
            try:
                for one in (self._process, *self._process.children(recursive=True)):
                    size += one.memory_info().rss
            except psutil.Error:
                continue
            self.bytes = max(self.bytes, size)

    def stop(self) -> None:
        """End the watch."""
        self._ended.set()
        self._thread.join()


def rates(arguments: argparse.Namespace, folder: Path) -> str:
    """Return the table of the contestants."""
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    size = write_corpus(corpus, arguments.mb)
    write_tokenizer(corpus, tokenizer)
    words = [str(corpus), str(tokenizer), str(arguments.processes)]
    found: dict[str, list[Measured]] = {name: [] for name in CONTESTANTS}
    order = list(CONTESTANTS)
    for _ in range(arguments.rounds):
        for name in order:
            found[name].append(measured(name, words, arguments.processes))
            print(f"{name}: {found[name][-1]}", file=sys.stderr)
        order.append(order.pop(0))
    middle = {name: statistics.median(run.seconds for run in of) for name, of in found.items()}
    cpu = {name: statistics.median(run.cpu for run in of) for name, of in found.items()}
    rows = [
        [
            name,
            f"{middle[name]:.1f}",
            f"{size / middle[name] / 1e6:.2f}",
            f"{middle[name] / middle['ours']:.2f}",
            f"{cpu[name]:.1f}",
            f"{cpu[name] / cpu['ours']:.2f}",
            f"{max(run.peak for run in found[name]):,.0f}",
            " ".join(f"{run.seconds:.1f}" for run in found[name]),
        ]
        for name in CONTESTANTS
    ]
    head = [
        "what", "median, s", "MB/s of text", "its time / ours", "CPU s", "its CPU / ours",
        "peak, MiB", "rounds, s",
    ]  # fmt: skip
    title = f"{size / 1e6:,.0f} MB of text, {arguments.processes} processes or threads"
    return f"## {title}\n\n{table(head, rows)}"


def main() -> None:
    """Run the contestants in turn; print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--contestant", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        name, corpus, tokenizer, processes, out = arguments.contestant
        begin = time.process_time()
        _import(name)
        imports = time.process_time() - begin
        print(RUN[name](Path(corpus), Path(tokenizer), Path(out), int(processes)), imports)
        return
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        folder = Path(name)
        section = rates(arguments, folder)
    load = {"load over a minute": f"{os.getloadavg()[0]:.1f}"}
    packages = ("tokenizers", "transformers", "datasets", "megatron-core")
    text = page("From documents to token files", {**facts(packages), **load}, [section])
    print(text, end="")
    if arguments.out is not None:
        write(arguments.out, text)


if __name__ == "__main__":
    main()
