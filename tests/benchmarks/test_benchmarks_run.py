# SPDX-License-Identifier: Apache-2.0
"""Each benchmark at a tiny size on CPU: that it runs and what its page holds, not its figures."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from benchmarks.harness.loopback import loopback
from benchmarks.harness.machine import version
from benchmarks.harness.page import write
from benchmarks.harness.ranks import on_ranks
from benchmarks.one_million_tokens import shard
from custom_modules.context_parallel.ulysses import gather_sequence
from tests.house.rooms import TREE

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

NOT_INSTALLED, CHUNKS = "not installed: pip install -e '.[bench]'", ("", ", chunks of 16")


def page_of(module, *arguments, out, status=0, error=""):
    """Run a benchmark to that exit status, and return the page that it prints and writes."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--out", str(out)],
        cwd=TREE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert re.search(error, done.stderr)
    assert done.stdout == out.read_text()
    return done.stdout


def rows_of(page, head):
    """Return the rows of every table of a page whose head begins so, as their cells."""
    rows, within = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[: len(head)] == list(head):
            within = True
        elif not line.startswith("|"):
            within = False
        elif within and not set(line) <= set("|:- "):
            rows.append(cells)
    return rows


@pytest.fixture(scope="module")
def context_parallel(tmp_path_factory):
    size = ["--seq", "128", "--head-dim", "16", "--hidden", "32", "--rounds", "2"]
    return page_of(
        "context_parallel", *size, "--timeout", "120", out=tmp_path_factory.mktemp("a") / "page.md"
    )


MEASURED = (
    "attention",
    "kind",
    "error",
    "forward ms",
    "backward ms",
    "both ms",
    "peak MiB",
    "note",
)
RATIOS = ("ours", "over", "forward", "backward", "both", "bytes", "claim")


def test_context_parallelism_is_measured_for_both_kinds_of_heads_and_blocks(context_parallel):
    ours = [row[0] for row in rows_of(context_parallel, MEASURED) if row[0].startswith("ours")]
    once = ["ours, ulysses", "ours, ring", "ours, ulysses", "ours, head_chunked"]
    assert ours == 2 * once


@pytest.mark.parametrize(
    ("peer", "package", "times"),
    [
        ("DeepSpeed", "deepspeed", 4),
        ("yunchang", "yunchang", 2),
        ("torch ring, alltoall", "torch", 2),
        ("torch ring, allgather", "torch", 2),
    ],
)
def test_a_peer_is_right_and_compared_with_ours_of_its_kind(context_parallel, peer, package, times):
    if version(package) is None:
        pytest.skip(NOT_INSTALLED)
    notes = [row[-1] for row in rows_of(context_parallel, MEASURED) if row[0] == peer]
    assert notes == [""] * times
    compared = [row for row in rows_of(context_parallel, RATIOS) if row[1] == peer]
    assert len(compared) >= times
    assert all(float(ratio) > 0 for row in compared for ratio in row[2:6])


def test_a_peer_that_is_missing_is_named_with_the_reason(context_parallel):
    missing = {"DeepSpeed": "deepspeed", "yunchang": "yunchang"}
    for peer, package in missing.items():
        notes = {row[-1] for row in rows_of(context_parallel, MEASURED) if row[0] == peer}
        assert notes == ({""} if version(package) else {NOT_INSTALLED})


def test_the_page_says_on_what_it_stands(context_parallel):
    for fact in ("date", "machine", "versions", "command", "commit"):
        assert re.search(rf"^\* {fact}: \S", context_parallel, re.MULTILINE)


def test_two_ranks_tell_the_loss_and_gradient_norm_of_one_and_too_much_memory_fails(tmp_path):
    small = ["one_million_tokens", "--seq", "256", "--timeout", "3"]
    two = page_of(*small, out=tmp_path / "two.md")
    one = page_of(
        *small, "--ranks", "1", "--most-gib", "0.01", out=tmp_path / "one.md",
        status=1, error=r"error: 0\.\d+ GiB resident, 0\.01 claimed",
    )  # fmt: skip
    head = ("rank", "forward s", "backward s", "resident GiB")
    assert [row[0] for row in rows_of(two, head)] == ["0", "1", "all"]
    figures = [
        [float(figure) for figure in re.search(r"loss (\S+), gradient norm (\S+);", page).groups()]
        for page in (two, one)
    ]
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    assert min(figures[0]) > 0


def test_a_rank_makes_the_tokens_of_its_two_chunks_alone():
    whole = shard(12, 0, 1)
    ids, labels, positions = shard(12, 1, 2)
    assert positions.tolist() == [[3, 4, 5, 6, 7, 8]]
    assert ids.tolist() == whole[0][:, 3:9].tolist()
    assert labels[:, :-1].tolist() == ids[:, 1:].tolist()


@pytest.fixture(scope="module")
def loss_head(tmp_path_factory):
    size = ["--tokens", "50", "--width", "8", "--vocabulary", "300", "--tile", "16"]
    return page_of(
        "loss_head", *size, "--rounds", "2", out=tmp_path_factory.mktemp("b") / "page.md"
    )


LOSSES = ("loss", "note", "error", "extra MiB", "extra resident MiB", "ms")
LOSS_RATIOS = ("ours", "over", "extra bytes", "extra resident", "time", "time of rounds", "claim")


def test_the_loss_head_is_measured_with_few_and_many_masked_tokens(loss_head):
    rows, chunks = rows_of(loss_head, LOSSES), [f"linear_cross_entropy{n}" for n in CHUNKS]
    names = ["ours", "PyTorch", "PyTorch, compiled", *chunks, "DeepSpeed"]
    assert [row[0] for row in rows] == 2 * names
    assert [row[1] for row in rows if row[0] in names[:2]] == [""] * 4
    assert all(float(row[2]) < 1e-5 for row in rows if row[0] in chunks)
    claims = [row for row in rows_of(loss_head, LOSS_RATIOS) if row[1] == "PyTorch"]
    assert [float(row[n]) > 0 for row in claims for n in (2, 4)] == [True] * 4


def test_the_compiled_loss_runs_where_there_is_a_compiler_and_else_says_so(loss_head):
    notes = {row[1] for row in rows_of(loss_head, LOSSES) if row[0] == "PyTorch, compiled"}
    found = shutil.which("g++") or shutil.which("clang++")
    if found and " " in sys.prefix:  # torch's inductor does not quote the paths of its headers
        # It runs where a build of an environment without a blank is still in torch's cache.
        (note,) = notes
        assert note == "its tensors are not seen" or re.match("fails: .*(Inductor|inductor)", note)
        return
    assert notes == {
        "its tensors are not seen"
        if found
        else "no C++ compiler found, which torch.compile needs on a CPU"
    }


def test_deepspeeds_tiled_loss_is_right_or_named_with_the_reason(loss_head):
    notes = {row[1] for row in rows_of(loss_head, LOSSES) if row[0] == "DeepSpeed"}
    assert notes == ({""} if version("deepspeed") else {NOT_INSTALLED})


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    size = ["--tokens", "50", "--hidden", "8", "--inner", "32", "--tile", "16", "--tiles", "7"]
    return page_of("mlp", *size, "--rounds", "2", out=tmp_path_factory.mktemp("c") / "page.md")


MLPS = (
    "mlp", "note", "error", "extra MiB", "allocated MiB", "forwards", "rebuilt layer", "ms",
)  # fmt: skip
MLP_RATIOS = ("ours", "over", "extra bytes", "allocated", "time", "time of rounds", "claim")


def test_a_tiled_mlp_runs_the_products_of_a_checkpointed_one_in_a_rebuilt_layer_too(mlp):
    rows = {row[0]: row for row in rows_of(mlp, MLPS)}
    assert rows["ours"][5:7] == rows["PyTorch, checkpointed"][5:6] * 2 == ["4", "4"]
    assert rows["PyTorch"][5:7] == ["3", "4"]
    claims = [row[-1] for row in rows_of(mlp, MLP_RATIOS) if row[1] == "PyTorch, checkpointed"]
    assert claims == ["holds: FLOPs alike"] * 2


def test_deepspeeds_tiled_mlp_runs_one_more_forward_or_is_named_with_the_reason(mlp):
    rows = [row for row in rows_of(mlp, MLPS) if row[0] == "DeepSpeed"]
    if version("deepspeed") is None:
        assert [row[1] for row in rows] == [NOT_INSTALLED] * 2
    else:
        assert [row[5:7] for row in rows] == [["4", "5"]] * 2


def test_the_mlp_is_measured_by_tile(mlp):
    tiles = [row[0] for row in rows_of(mlp, ("tile, tokens", "extra MiB", "ms"))]
    assert tiles == 2 * ["PyTorch", "7"]


@pytest.fixture(scope="module")
def memory_stack(tmp_path_factory):
    size = ["--lengths", "64", "512", "--layers", "2", "--heads", "4", "--head-dim", "8"]
    tiles = ["--loss-tile", "16", "--mlp-tile", "16", "--cap-gib", "1"]
    return page_of("memory_stack", *size, *tiles, out=tmp_path_factory.mktemp("d") / "page.md")


STACKS = ("stack", "peak in", "peak MiB, 64", "peak MiB, 512")


def test_every_stack_trains_the_same_model_and_its_peak_grows_with_length(memory_stack):
    rows = {row[0]: row for row in rows_of(memory_stack, STACKS)}
    ours = rows.keys() - {"ALST-like"}
    assert len(ours) == 13
    for name in ours:
        assert re.fullmatch(r".+, (forward|backward)", rows[name][1]), rows[name]
        assert float(rows[name][5].replace(",", "")) > 0
        assert (float(rows[name][4]) > 0) == ("offload" in name or name == "full stack")
    slopes = {name: float(rows[name][6]) for name in ours}
    assert slopes["full stack"] < slopes["full"] < slopes["plain"]


def test_the_alst_like_stack_is_compared_or_named_with_the_reason(memory_stack):
    (alst,) = (row for row in rows_of(memory_stack, STACKS) if row[0] == "ALST-like")
    if version("deepspeed") is None:
        assert alst[1] == NOT_INSTALLED
        assert "Not compared: ALST-like did not run." in memory_stack
    else:
        assert re.search(r"full stack over ALST-like: 0\.\d+; the claim", memory_stack)


@pytest.fixture(scope="module")
def step_beside_nemo(tmp_path_factory):
    size = ["--sizes", "small", "--tokens", "64", "--rounds", "2", "--threads", "1"]
    return page_of("step_beside_nemo", *size, out=tmp_path_factory.mktemp("e") / "page.md")


CAUSES = ("data", "forward", "backward", "gradients", "optimizer", "callbacks", "logging", "loop")


def test_our_step_and_nemos_compute_the_same_and_hold_counted_bytes(step_beside_nemo):
    rows = rows_of(step_beside_nemo, ("training", "", "ms", "CPU ms"))
    assert [row[0] for row in rows] == [
        "NeMo, PyTorch's attention",
        "ours",
        "NeMo, Megatron's attention",
        "NeMo, PyTorch's attention, full recompute",
        "ours, kept attention, tiled loss and MLP",
    ]
    assert all(float(row[6]) <= 1e-5 for row in rows)
    by_category = rows_of(step_beside_nemo, ("training", "", "weights", "gradients"))
    for row, categories in zip(rows, by_category, strict=True):
        assert sum(map(float, categories[2:])) == pytest.approx(float(row[4]), abs=0.05)


def test_every_cause_of_a_step_takes_time(step_beside_nemo):
    rows = rows_of(step_beside_nemo, ("training", "", *CAUSES))
    assert len(rows) == 5
    for causes in rows:
        assert min(float(cell) for cell in causes[2:]) > 0


def test_our_step_is_compared_with_nemos_of_equal_options(step_beside_nemo):
    rows = rows_of(step_beside_nemo, ("ours", "over", "time", "of rounds", "CPU time", "bytes"))
    assert [row[1] for row in rows] == [
        "NeMo, PyTorch's attention",
        "NeMo, Megatron's attention",
        "NeMo, PyTorch's attention, full recompute",
    ]
    assert all(float(row[at]) > 0 for row in rows for at in (2, 4, 5))


def test_a_loopback_gathers_as_much_as_many_ranks_would():
    mine = torch.arange(2.0 * 4).reshape(2, 1, 4, 1)
    with loopback(4) as group:
        gathered = gather_sequence(mine, group)
    assert gathered.shape == (8, 1, 1, 1)
    # Its own head stays where its tokens belong; a peer's place holds what was sent to it.
    assert gathered.flatten().tolist() == [0, 1, 2, 3, 7, 6, 5, 4]


def fail():
    raise ValueError("on purpose")


def wait():
    import time

    time.sleep(60)


def test_what_a_rank_raises_is_raised():
    with pytest.raises(ProcessRaisedException, match="on purpose"):
        on_ranks(1, fail, timeout_seconds=60)


def test_ranks_that_do_not_end_are_ended():
    with pytest.raises(TimeoutError, match="2 ranks had not ended in 1 s"):
        on_ranks(2, wait, timeout_seconds=1)


def test_a_page_is_written_at_once(tmp_path):
    write(tmp_path / "results" / "page.md", "new")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["page.md"]


def test_the_planner_s_bytes_stand_beside_those_of_a_step(tmp_path):
    few = ["--ranks", "1", "--cards", "tiny", "--tokens", "512", "--only", "micro-batch 2"]
    page = page_of("planner_memory", *few, out=tmp_path / "page.md")
    rows = rows_of(page, ["step"])
    assert [row[0] for row in rows] == ["none; micro-batch 2", "kept; tiled; micro-batch 2"]
    for row in rows:
        measured, predicted = (float(cell.replace(",", "")) for cell in row[4:6])
        assert float(row[6]) == pytest.approx(predicted / measured, abs=0.01)
    assert "2 steps, predicted over measured" in page


def test_a_step_that_the_planner_s_page_does_not_have_is_refused(tmp_path):
    page_of(
        "planner_memory", "--only", "nothing", out=_empty(tmp_path / "page.md"), status=2,
        error="no case on .* has 'nothing' in its name",
    )  # fmt: skip


def test_wall_times_with_failures_are_compared_with_simulated_ones(tmp_path):
    page = page_of("goodput", out=tmp_path / "page.md")
    assert "The claim holds for 5 of 5 cases" in page
    for *_, predicted, simulated, half, twice, _quarters in rows_of(page, ["stage"]):
        share = float(simulated.partition("%")[0])
        assert abs(float(predicted.strip("%")) - share) <= 1
        assert float(half.strip("%")) <= share
        assert float(twice.strip("%")) <= share


def test_published_figures_are_compared_with_the_planner_s_by_family(tmp_path):
    page = page_of("planner_published", out=tmp_path / "page.md")
    points = rows_of(page, ["point", "source"])
    for *_, published, predicted, ratio, kind in points:
        said = float(predicted.replace(",", "")) / float(published.replace(",", ""))
        assert float(ratio) == pytest.approx(said, abs=0.02)
        assert kind in ("fitted", "outside")
    families = rows_of(page, ["family", "kind"])
    of_rates = page.partition("## Rates of a GPU")[2]
    assert sum(int(row[2]) for row in families) == len(rows_of(of_rates, ["point", "source"]))
    assert "all within an eighth" in page


def test_verification_is_measured_beside_loading_and_saving(tmp_path):
    page = page_of(
        "reliability.verification", "--mb", "2", "--rounds", "1", out=tmp_path / "page.md"
    )
    rows = rows_of(page, ("what", "how"))
    assert [row[0] for row in rows] == [
        *2 * ["checkpoint in two files"], *2 * ["checkpoint in one file"], *2 * ["token store"],
    ]  # fmt: skip
    assert all(float(row[3]) > 0 for row in rows[:4])


def _empty(path):
    path.write_text("")
    return path


def test_a_store_s_indexes_are_measured_step_by_step(tmp_path):
    text = page_of(
        "index_scale", "--documents", "100", "--pairs", "1", "3", "--scanned-tokens", "10000",
        out=tmp_path / "page.md",
    )  # fmt: skip
    rows = rows_of(text, ["step"])
    assert [row[0] for row in rows] == [
        "index checked", "store written", "manifest loaded", "opened by Megatron",
        "lengths counted", "padding packed", "tokens read",
    ]  # fmt: skip
    assert all(float(row[1]) >= 0 and float(row[2].replace(",", "")) > 0 for row in rows)
    assert re.search(r"Indexes take 20\.\d bytes a document", text)


def test_a_small_model_is_asked_for_numbers_of_its_context(tmp_path):
    from data.tokenization.tokenizer import train

    train([file.read_text() for file in sorted((TREE / "data").glob("*.py"))], 512).save(tmp_path)
    size = ["--layers", "1", "--hidden", "64", "--batch", "2", "--every", "2", "--minutes", "0.01"]
    page = page_of("retrieval_budget", "--tokenizer", tmp_path, *size, out=tmp_path / "page.md")
    rows = rows_of(page, ["step", "tokens"])
    assert [row[0] for row in rows][:2] == ["0", "2"]
    assert all(float(row[3]) > 1 for row in rows)
