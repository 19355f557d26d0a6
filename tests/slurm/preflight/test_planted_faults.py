# SPDX-License-Identifier: Apache-2.0
"""Ten faults, planted for real where a machine without GPUs allows it, each found by its check."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.spec import cluster as clusters
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.units import GiB
from slurm.preflight.check import Group, PreflightCheck, blamed, exit_code, failures
from slurm.preflight.machine import Machine
from slurm.preflight.node.checks import node_checks
from slurm.preflight.requirements import Expected
from slurm.preflight.run import all_checks
from tests.slurm.preflight.support import jobs, samples

WITHOUT_GPU = {"NCCL", "transformer-engine"}
"""What fails here where GPUs are expected, since torch is a CPU build."""
EIGHT = Expected.of(clusters.load("dgx_h100"), Layout(tp=2, cp=ContextParallel.ulysses(4)))


def found(checks: list[PreflightCheck], name: str) -> PreflightCheck:
    """Return the one failure; what fails for want of a GPU aside, no other check may fail."""
    failed = [check for check in failures(checks) if check.name not in WITHOUT_GPU]
    assert [check.name for check in failed] == [name], failed
    assert failed[0].remedy
    return failed[0]


@pytest.fixture
def dgx(tmp_path, monkeypatch) -> Path:
    """Make nvidia-smi, CUDA's variables and the HCAs those of a DGX H100; return the HCAs."""
    folder = samples.nvidia_smi(tmp_path / "bin", rows=samples.listed())
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name in ("CUDA_VISIBLE_DEVICES", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    for hca in ("mlx5_0", "mlx5_3", "mlx5_10"):
        port = tmp_path / "infiniband" / hca / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
    return tmp_path / "infiniband"


def on_dgx(dgx: Path, expected: Expected = EIGHT) -> list[PreflightCheck]:
    return list(node_checks(expected, Machine(infiniband=dgx), None))


def test_a_healthy_node_lacks_only_what_this_machine_does(dgx):
    failed = {check.name for check in failures(on_dgx(dgx))}
    assert failed == WITHOUT_GPU


def test_one_gpu_fewer(dgx):
    samples.nvidia_smi(dgx.parent / "bin", rows=samples.listed(7))
    fault = found(on_dgx(dgx), "GPUs")
    assert fault.said == "7 (NVIDIA H100 80GB HBM3); 8 needed"
    assert exit_code([fault]) == Group.GPUS == 21


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("0,1,2,3,4,5,6,9", "there is no GPU 9, the last is 7"),
        ("0,1,2,3,4,5,6,6", "6 is listed twice"),
        ("0,1,2,3", "4 devices for 8 ranks"),
        ("0,1,2,3,4,5,6,seven", "'seven' is not a device, and hides all after it"),
    ],
)
def test_wrong_visible_devices(dgx, monkeypatch, devices, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    assert said in found(on_dgx(dgx), "visible devices").said


def test_too_little_host_memory(dgx):
    offload = Expected.of(clusters.load("dgx_h100"), Layout(tp=8), host_bytes_per_rank=2**20 * GiB)
    fault = found(on_dgx(dgx, offload), "host memory")
    assert "1,048,576.0 pinned by each of 8 ranks" in fault.said


@pytest.mark.parametrize(
    ("hca", "said"),
    [
        ("mlx5_0,mlx5_99", "no HCA is called mlx5_99"),
        ("=mlx5_1", "no HCA is called mlx5_1"),
        ("mlx5_0:2", "mlx5_0 has no port 2"),
        ("^mlx5", "it leaves out every HCA"),
    ],
)
def test_a_bad_hca_name(dgx, monkeypatch, hca, said):
    monkeypatch.setenv("NCCL_IB_HCA", hca)
    fault = found(on_dgx(dgx), "HCA")
    assert said in fault.said
    assert exit_code([fault]) == Group.NETWORK == 26


@pytest.mark.parametrize(
    ("hca", "down", "state", "said"),
    [
        ("mlx5", ["mlx5_10"], "warning", "NCCL_IB_HCA=mlx5: mlx5_10 is down"),
        ("mlx5_1", ["mlx5_10"], "failure", "mlx5_10 is down"),
        ("mlx5", ["mlx5_0", "mlx5_10", "mlx5_3"], "failure", "mlx5_0 is down, mlx5_10 is down, "),
        ("mlx5_0,mlx5_3", ["mlx5_3"], "failure", "mlx5_3 is down"),
        ("=mlx5_3", ["mlx5_3"], "failure", "mlx5_3 is down"),
        ("=mlx5_0", ["mlx5_3"], "ok", ""),
    ],
)
def test_a_port_that_is_down_fails_only_where_nccl_would_need_it(
    dgx, monkeypatch, hca, down, state, said
):
    for name in down:
        (dgx / name / "ports" / "1" / "state").write_text("1: DOWN\n")
    monkeypatch.setenv("NCCL_IB_HCA", hca)
    (check,) = [check for check in on_dgx(dgx) if check.name == "HCA"]
    assert check.state == state
    assert said in check.said


def test_ranks_on_the_cpu_need_no_hca(dgx, monkeypatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_99")
    cpu = Expected.of(clusters.load("dgx_h100"), Layout(device="cpu", precision="fp32", dp=4))
    assert "HCA" not in {check.name for check in on_dgx(dgx, cpu)}


@pytest.mark.parametrize("hca", ["mlx5", "=mlx5_0:1,mlx5_10", "^mlx5_3", "^=mlx5_1"])
def test_a_good_hca_name_in_every_form_nccl_takes(dgx, monkeypatch, hca):
    monkeypatch.setenv("NCCL_IB_HCA", hca)
    assert {check.name for check in failures(on_dgx(dgx))} == WITHOUT_GPU


@pytest.fixture
def read_only(tmp_path) -> Iterator[Path]:
    """Return a folder of a file system mounted read-only; without the right to, one by mode."""
    folder = tmp_path / "run"
    folder.mkdir()
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True, check=False
    ).returncode
    if not mounted:
        folder.chmod(0o555)
    yield folder
    if mounted:
        subprocess.run(["umount", folder], check=True)
    folder.chmod(0o755)


def test_a_read_only_file_system(read_only):
    page = all_checks(Expected(run_folder=read_only), Machine(environ={}, host="n7"), seconds=0)
    fault = found(page.checks, "run folder")
    assert "read-only" in fault.said or "permission denied" in fault.said
    assert (exit_code(page.checks), page.shown, page.nodes) == (25, True, ("n7",))


def test_a_wrong_version(tmp_path, monkeypatch):
    metadata = tmp_path / "nemo_run-0.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: nemo_run\nVersion: 0.9.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    checks = all_checks(Expected(), Machine(environ={}), seconds=0).checks
    assert found(checks, "nemo_run").said.startswith("0.9.0; nemo_run==")
    assert exit_code(checks) == 23


def test_an_unreachable_port():
    with socket.socket() as taken:  # bound, and never listening
        taken.bind(("localhost", 0))
        fault = jobs.OutOfReach(taken.getsockname()[1])
        waiting, alone = jobs.pages_of(Expected(meet_seconds=3), 2, nodes=2, fault=fault)
    assert "1 of 2 ranks came in 3 s, from n0; not there: 1" in found(waiting.checks, "ranks").said
    said = found(alone.checks, "port")
    assert "the connection is refused" in said.said
    assert said.nodes == alone.nodes == ("n1",)
    assert waiting.nodes == ("n0",)
    assert not alone.met
    assert not waiting.met


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (jobs.slow_link, "slow rank (links in its node)"),
        (jobs.slow_compute, "slow rank (compute)"),
    ],
)
def test_a_slow_rank(fault, name):
    limits = Expected(slow_warned=30, slow_failed=40)  # a busy machine delays one tenfold
    first, *others = jobs.pages_of(limits, 3, fault=fault)
    assert [page.checks for page in others] == [first.checks] * 2
    fault = found(first.checks, name)
    assert fault.said.startswith("rank 2 on n0 takes")
    assert fault.nodes == first.nodes == ("n0",)
    assert all(page.met for page in (first, *others))
    assert exit_code(first.checks) == 28


def test_a_clock_that_is_ahead():
    pages = jobs.pages_of(jobs.loose(Expected()), 3, nodes=3, fault=jobs.clock_ahead)
    assert pages[0].checks == pages[1].checks == pages[2].checks
    assert found(pages[0].checks, "clocks agree").said.startswith("n1 is 7 s ahead")
    assert {page.nodes for page in pages} == {("n0", "n1", "n2")}
    assert blamed(pages[0].checks, pages[0].nodes) == ("n1",)


def test_a_world_of_another_size():
    expected = Expected.of(clusters.load("dgx_h100"), Layout(device="cpu", precision="fp32", dp=4))
    pages = jobs.run_job(jobs.loose(expected), 2)
    assert pages[0] == pages[1]
    failed = [check.name for check in failures(pages[0])]
    assert failed == ["world size", "ranks a node"]
    assert exit_code(pages[0]) == 20


def test_a_damaged_store_fails_the_job_on_all_ranks_and_blames_no_node(tmp_path, small_store):
    store = Path(shutil.copytree(small_store, tmp_path / "store"))
    index = bytearray((store / "heldout.idx").read_bytes())
    index[-1] ^= 1
    (store / "heldout.idx").write_bytes(index)
    expected = Expected(world_size=2, nodes=2, ranks_per_node=1, store=store)
    pages = jobs.pages_of(jobs.loose(expected), 2, nodes=2)
    assert pages[0].checks == pages[1].checks
    failed = found(pages[0].checks, "store's content")
    assert failed.said.startswith(f"{store / 'heldout.idx'} is damaged: its SHA-256")
    assert exit_code(pages[0].checks) == 25
    assert blamed(pages[0].checks, pages[0].nodes) == ()


def test_a_healthy_job_has_no_failure_and_may_meet_again(tmp_path, small_store):
    expected = Expected(
        world_size=4, nodes=2, ranks_per_node=2, run_folder=tmp_path, store=small_store
    )
    pages = jobs.run_job(jobs.loose(expected), 4, nodes=2)
    assert all(page == pages[0] for page in pages)
    assert failures(pages[0]) == []
    assert {
        "world size", "clocks agree", "shared folder", "store's content", "all-to-all",
        "slow rank (network)",
    } <= {check.name for check in pages[0]}  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["preflight.json"]
