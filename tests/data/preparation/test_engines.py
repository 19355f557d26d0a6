# SPDX-License-Identifier: Apache-2.0
"""The store is the same for every engine, number of processes and interruption."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from data.preparation import engine, merge, plan, task
from data.preparation.engine import Engine
from data.preparation.work import Work
from data.prepare import merge_plan, prepare, run_tasks, write_plan
from data.readers import SourceError
from data.store import Manifest, StoreError
from data.token_files.verification import verify
from tests.conditions import until
from tests.data.preparation.conftest import SHARD_BYTES, contents

PROGRAM = f"""
import json, sys
from data.preparation import plan, task
from data.preparation.engine import Engine
from data.prepare import prepare
plan.SHARD_BYTES = {SHARD_BYTES}
sources, out, tokenizer, workers = sys.argv[1:]
prepare(
    json.loads(sources), out, tokenizer=tokenizer, heldout_fraction=0.3,
    engine=Engine(workers=int(workers)),
)
"""


def test_several_sources_have_files_of_their_own_that_megatron_reads(reference, texts):
    assert [source.name for source in reference.sources] == ["web", "code"]
    assert all(source.sha256 for source in reference.sources)
    for name in ("train", "heldout"):
        split = reference.split(name)
        assert [part.bins[0].path for part in split.parts] == [
            f"{name}-web.bin",
            f"{name}-code.bin",
        ]
        for part, prefix in zip(split.parts, reference.prefixes(name), strict=True):
            stored = IndexedDataset(str(prefix))
            assert part.documents == len(stored) == len(stored.document_indices) - 1
            assert part.tokens == int(stored.sequence_lengths.sum())
            assert part.longest == int(stored.sequence_lengths.max())
            assert all(document[-1] == reference.tokenizer.eod_id for document in stored)
    web, code = (
        sum(split.parts[at].documents for split in (reference.train, reference.heldout))
        for at in (0, 1)
    )
    assert (web, code) == (100, len(texts) - 20 + 1)
    assert reference.skipped == {"empty": 1}
    assert verify(reference, whole=True)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_store_does_not_depend_on_the_number_of_processes(
    make, reference, workers, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tokenizers.py").write_text("a file of the user")
    monkeypatch.chdir(tmp_path / "elsewhere")
    if workers == 1:
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
    manifest = make(engine=Engine(workers=workers))
    assert contents(manifest.root) == contents(reference.root)
    assert {path.name for path in tmp_path.iterdir()} == {"store", "elsewhere"}


def test_the_page_of_a_store_lists_its_sources(reference, texts, capsys):
    from longhaul.pages.store_page import show_store

    show_store(reference)
    assert f"source code: {len(texts) - 19:,} documents, " in capsys.readouterr().out


def test_the_store_does_not_depend_on_the_shards_or_on_reading_in_chunks(
    make, reference, monkeypatch, long_lines
):
    monkeypatch.setattr(plan, "SHARD_BYTES", 700)
    manifest = make()
    assert contents(manifest.root) == contents(reference.root)


def test_tasks_by_number_and_a_merge_give_the_same_store(
    mixed, tokenizer_folder, tmp_path, reference
):
    work = write_plan(mixed, tmp_path / "store", tokenizer=tokenizer_folder, heldout_fraction=0.3)
    assert work.count > 4
    with pytest.raises(StoreError, match=rf"{work.count} of {work.count} parts .* are missing"):
        merge_plan(work.folder)
    assert run_tasks(work.folder, 0, None) == 1
    counts = [run_tasks(work.folder, number, 3) for number in range(3)]
    assert sum(counts) == work.count - 1
    assert [run_tasks(work.folder, number, 3) for number in range(3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="--task 3 is not one of 0 to 2"):
        run_tasks(work.folder, 3, 3)
    manifest = merge_plan(work.folder)
    assert contents(manifest.root) == contents(reference.root)
    assert not work.folder.exists()


def test_a_plan_s_file_cannot_send_its_store_elsewhere_or_replace_another(
    corpus, tokenizer_folder, tmp_path
):
    options = {"tokenizer": tokenizer_folder, "heldout_fraction": 0.3}
    work = write_plan(str(corpus), tmp_path / "in" / "store", **options)
    run_tasks(work.folder, 0, 1)
    file = work.folder / "plan.json"
    facts = json.loads(file.read_text())
    for name in ("../escaped", "..", "", str(tmp_path / "store"), "other", None, "store/"):
        file.write_text(json.dumps({**facts, "store": name}))
        with pytest.raises(StoreError, match="is not prepared in this folder; make the plan again"):
            merge_plan(work.folder)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == [work.folder.name]
    file.write_text(json.dumps({**facts, "overwrite": True}))
    other = prepare(str(corpus), tmp_path / "other", seed=1, **options)
    shutil.copytree(other.root, tmp_path / "in" / "store")
    with pytest.raises(StoreError, match="`--overwrite` replaces it"):
        merge_plan(work.folder)
    assert contents(tmp_path / "in" / "store") == contents(other.root)
    assert merge_plan(work.folder, overwrite=True).seed == 0


def test_a_damaged_part_is_done_again_and_never_merged(
    mixed, tokenizer_folder, tmp_path, reference
):
    options = {"tokenizer": tokenizer_folder, "heldout_fraction": 0.3}
    work = write_plan(mixed, tmp_path / "store", **options)
    run_tasks(work.folder, 0, 1)
    cut = next(work.folder.glob("parts/*/*.train.bin"))
    cut.write_bytes(cut.read_bytes()[:-2])
    (flipped,) = (path for path in [next(work.folder.glob("parts/*/*.heldout.lengths"))])
    flipped.write_bytes(b"\x07" + flipped.read_bytes()[1:])
    with pytest.raises(StoreError, match=r"1 of .* parts in .* are missing or damaged"):
        merge_plan(work.folder)
    manifest = prepare(mixed, tmp_path / "store", **options)
    assert contents(manifest.root) == contents(reference.root)


def test_a_run_killed_at_any_time_is_continued_by_the_same_command(
    mixed, tokenizer_folder, tmp_path, reference
):
    draw = random.Random(5)
    place = tmp_path / "store"
    words = [json.dumps(mixed), str(place), tokenizer_folder, "2"]
    work = Work.of_store(place)
    killed = 0
    while killed < 2:
        running = subprocess.Popen([sys.executable, "-c", PROGRAM, *words])
        before = len(list(work.folder.glob("parts/*/*.json")))
        until(lambda n=before: place.exists() or len(list(work.folder.glob("parts/*/*.json"))) > n)
        time.sleep(draw.random() * 0.05)
        running.send_signal(signal.SIGKILL)
        running.wait()
        if place.exists():  # on a busy machine it may end before the signal
            shutil.rmtree(place)
        else:
            killed += 1
    subprocess.run([sys.executable, "-c", PROGRAM, *words], check=True)
    assert contents(place) == contents(reference.root)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def killing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Have the processes of the first pools killed; return the list that receives one of each."""
    killed = []

    class Pool(ProcessPoolExecutor):
        def submit(self, *given):
            future = super().submit(*given)
            if len(killed) < times and self not in killed:
                killed.append(self)
                os.kill(next(iter(self._processes)), signal.SIGKILL)
            return future

    monkeypatch.setattr(engine, "ProcessPoolExecutor", Pool)
    return killed


def test_a_task_whose_process_is_killed_is_done_by_another(make, reference, monkeypatch):
    killed = killing(monkeypatch, 2)
    manifest = make(engine=Engine(workers=2))
    assert len(killed) == 2
    assert contents(manifest.root) == contents(reference.root)


def test_processes_that_are_killed_again_and_again_end_the_preparation(make, monkeypatch, tmp_path):
    killed = killing(monkeypatch, 9)
    with pytest.raises(
        SourceError, match=r"prepared part \d+ \(.* ended 3 .*\(SIGKILL\).* --workers"
    ):
        make(engine=Engine(workers=1))
    assert len(killed) == 3
    assert list(tmp_path.iterdir()) == []


ENDED = """
import os, signal, time
from data.preparation import engine
with engine._pool(2) as pool:
    with engine._for_new_processes():
        running = [pool.submit(os.getpid)] + [pool.submit(time.sleep, 600) for _ in range(2)]
    running[0].result()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_when_the_one_that_started_them_is_killed():
    # They have its output as their own, so that waiting for its end waits for them.
    done = subprocess.run(
        [sys.executable, "-c", ENDED], stdout=subprocess.PIPE, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL


def test_processes_get_one_thread_and_not_the_script_that_called():
    before = dict(os.environ), sys.modules["__main__"]
    with engine._pool(1) as pool:
        with engine._for_new_processes():
            asked = [pool.submit(os.getenv, name) for name in engine.OF_PROCESSES]
        assert [one.result() for one in asked] == list(engine.OF_PROCESSES.values())
    assert (dict(os.environ), sys.modules["__main__"]) == before


def test_a_run_killed_after_the_store_was_moved_is_continued_too(
    make, reference, monkeypatch, tmp_path
):
    from data import prepare as preparing

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_remove", lambda work: os.kill(os.getpid(), 0) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make()
    assert Manifest.load(tmp_path / "store")
    assert len(list(tmp_path.iterdir())) == 2
    manifest = make()
    assert contents(manifest.root) == contents(reference.root)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    with pytest.raises(StoreError, match="--overwrite"):
        make()


def test_two_processes_do_not_prepare_one_store(make, tmp_path):
    with (
        Work.of_store(tmp_path / "store").held(),
        pytest.raises(StoreError, match="another process prepares in"),
    ):
        make()


def test_a_part_that_is_cut_while_it_is_merged_is_named(tmp_path):
    part = tmp_path / "part.bin"
    part.write_bytes(b"tokens")
    with (
        part.open("rb", buffering=0) as source,
        (tmp_path / "to").open("wb", buffering=0) as to,
        pytest.raises(StoreError, match=r"part\.bin ended 2 bytes early"),
    ):
        merge._append(source, to, 8)


def test_a_process_of_a_ray_cluster_reads_a_plan_once_and_another_release_is_one_sentence(
    corpus, tokenizer_folder, tmp_path, monkeypatch
):
    work = write_plan(str(corpus), tmp_path / "store", tokenizer=tokenizer_folder)
    used = []
    monkeypatch.setattr(task, "run_task", lambda work, number: used.append(work) or 1 / 0)
    for number in (0, 1):
        with pytest.raises(ZeroDivisionError):
            engine._answer(str(work.folder), number)
    assert used[0] is used[1]
    os.utime(work.folder / "plan.json", ns=(1, 1))  # another plan
    monkeypatch.setattr("data.preparation.work.versions", lambda: {"tokenizers": "9.9"})
    answer = engine._answer(str(work.folder), 0)
    with pytest.raises(SourceError, match=r"environment has 9\.9; use one environment"):
        engine._receipt(answer, work)


@pytest.mark.slow
@pytest.mark.nightly  # what Ray runs is what processes run; its nodes can take minutes to start
def test_a_ray_cluster_gives_the_same_store(make, reference):
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        manifest = make(engine=Engine(kind="ray", address=cluster.address))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert contents(manifest.root) == contents(reference.root)


@pytest.mark.parametrize("named", ["by --address", "by RAY_ADDRESS", "by a cluster that ended"])
def test_a_cluster_that_does_not_answer_is_told_before_a_tokenizer_is_loaded(
    corpus, tmp_path, monkeypatch, named
):
    with socket.socket() as one:  # a port that nothing listens on once it is closed
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp" / "ray").mkdir(parents=True)
    if named == "by RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", address)
    if named == "by a cluster that ended":
        (tmp_path / "tmp" / "ray" / "ray_current_cluster").write_text(f"{address}\n")
    given = f"ray://{address}" if named == "by --address" else None
    out = tmp_path / "out" / "store"
    with pytest.raises(
        SourceError, match=rf"no Ray cluster answers at (ray://)?{address} \("
    ) as it:
        prepare(
            str(corpus), out, tokenizer="none such",
            engine=Engine(kind="ray", address=given),
        )  # fmt: skip
    assert "--address HOST:PORT" in str(it.value)
    assert not out.parent.exists()


def test_a_run_that_continues_says_what_is_there_and_its_progress_is_of_all(
    mixed, tokenizer_folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("data.progress.SECONDS_BETWEEN_LINES", 0.0)
    work = write_plan(mixed, tmp_path / "store", tokenizer=tokenizer_folder, heldout_fraction=0.3)
    run_tasks(work.folder, 0, 2)
    half = work.count - work.count // 2
    capsys.readouterr()
    prepare(mixed, tmp_path / "store", tokenizer=tokenizer_folder, heldout_fraction=0.3)
    lines = capsys.readouterr().err.splitlines()
    assert f"continuing: {half} of {work.count} parts are there already" in lines
    shares = [int(share) for line in lines for share in re.findall(r"MiB of .* \((\d+)%\),", line)]
    assert len(shares) == work.count - half
    assert 50 < shares[0] < shares[-1] == 100


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kind": "dask"}, "--engine dask is not known"),
        ({"workers": 0}, "--workers 0"),
        ({"address": "auto"}, "add --engine ray"),
        ({"kind": "ray", "workers": 2}, "leave out --engine ray"),
    ],
)
def test_an_engine_that_is_not_one_is_refused(options, word):
    with pytest.raises(ValueError, match=word):
        Engine(**options)


def test_little_work_starts_no_process(make, monkeypatch):
    monkeypatch.setattr(engine, "ProcessPoolExecutor", None)
    assert engine.SMALL_BYTES > 2**20
    assert make()
