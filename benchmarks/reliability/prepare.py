# SPDX-License-Identifier: Apache-2.0
"""Whether a store is the same after its preparation was killed, many times and on each engine.

    python -m benchmarks.reliability.prepare
    python -m benchmarks.reliability.prepare --mb 20 --kills 10 --seed 3 --without-ray

A store is prepared undisturbed. Then the same command is started again and again, and killed by
SIGKILL once up to two more parts are done and some random time has passed, until it may finish; a
process of its pool is killed before it each second time. Then a Ray cluster of two nodes on this
machine prepares the store, and the raylet of one node is killed when some parts are done. Every
file of each store is compared with the undisturbed one.
The array of jobs of a real Slurm, one of which is killed: `tests/slurm/test_prepare_array.py`.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from benchmarks.harness.machine import facts
from benchmarks.harness.page import page, table, write
from benchmarks.prepare import write_corpus, write_tokenizer
from data.preparation import plan
from data.preparation.engine import Engine
from data.preparation.work import Work
from data.prepare import prepare

SHARD_BYTES = 2**18
PROGRAM = f"""
import sys
from data.preparation import plan
from data.preparation.engine import Engine
from data.prepare import prepare
plan.SHARD_BYTES = {SHARD_BYTES}
source, out, tokenizer = sys.argv[1:]
prepare(source, out, tokenizer=tokenizer, engine=Engine(workers=2))
"""


def contents(store: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a store."""
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


def parts(out: Path) -> int:
    """Return how many parts of a store are done."""
    return len(list(Work.of_store(out).folder.glob("parts/*/*.json")))


def killed(source: Path, tokenizer: Path, out: Path, kills: int, draw: random.Random) -> list[int]:
    """Kill the command at random times; return the parts that were done at each kill."""
    command = [sys.executable, "-c", PROGRAM, str(source), str(out), str(tokenizer)]
    done: list[int] = []
    while len(done) < kills:
        running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        wanted = parts(out) + draw.randrange(3)
        while parts(out) < wanted and running.poll() is None:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.5))
        if running.poll() is not None:
            raise RuntimeError("the preparation ended before it was killed often enough; use --mb")
        workers = psutil.Process(running.pid).children()
        if len(done) % 2 and workers:
            draw.choice(workers).send_signal(signal.SIGKILL)
            time.sleep(draw.uniform(0, 0.5))
        running.send_signal(signal.SIGKILL)
        running.wait()
        if out.exists() and not Work.of_store(out).folder.exists():
            raise RuntimeError("the store was complete when its command was killed; use --mb")
        done.append(parts(out))
    last = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if last.returncode:
        raise RuntimeError(f"the command does not continue after {done} parts: {last.stderr}")
    return done


def on_two_nodes(source: Path, tokenizer: Path, out: Path) -> list[int]:
    """Prepare on a Ray cluster and kill the raylet of one of its nodes; return parts done then."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    other = cluster.add_node(num_cpus=1)
    done: list[int] = []

    def kill() -> None:
        while parts(out) < 4:
            time.sleep(0.05)
        cluster.remove_node(other, allow_graceful=False)
        done.append(parts(out))

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        engine = Engine(kind="ray", address=cluster.address)
        prepare(str(source), out, tokenizer=str(tokenizer), engine=engine)
    finally:
        killer.join()
        ray.shutdown()
        cluster.shutdown()
    return done


def main() -> None:
    """Kill, compare, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-ray", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"
    plan.SHARD_BYTES = SHARD_BYTES
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        folder = Path(name)
        source, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
        write_corpus(source, arguments.mb)
        write_tokenizer(source, tokenizer)
        manifest = prepare(str(source), folder / "undisturbed", tokenizer=str(tokenizer))
        expected = contents(manifest.root)
        count = -(-source.stat().st_size // SHARD_BYTES)
        draw = random.Random(arguments.seed)
        ways = {
            f"{arguments.kills} SIGKILLs": lambda out: killed(
                source, tokenizer, out, arguments.kills, draw
            )
        }
        if not arguments.without_ray:
            ways["Ray, two nodes, one raylet killed"] = lambda out: on_two_nodes(
                source, tokenizer, out
            )
        rows = []
        for number, (what, run) in enumerate(ways.items()):
            out = folder / f"store{number}"
            begin = time.perf_counter()
            done = run(out)
            found = contents(out)
            left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
            same = "yes" if found == expected and not left else f"NO {left}"
            seconds = f"{time.perf_counter() - begin:.0f}"
            rows.append([what, " ".join(map(str, done)), same, seconds])
            print(json.dumps(rows[-1]), file=sys.stderr)
    head = ["what", "parts done at each kill", "every file is the same, nothing is left", "seconds"]
    title = f"{arguments.mb} MB of text in about {count} parts, {len(expected)} files compared"
    text = page(
        "A store after its preparation was killed",
        {**facts(("tokenizers", "ray")), "load over a minute": f"{os.getloadavg()[0]:.1f}"},
        [f"## {title}\n\n{table(head, rows)}"],
    )
    print(text, end="")
    if arguments.out is not None:
        write(arguments.out, text)


if __name__ == "__main__":
    main()
