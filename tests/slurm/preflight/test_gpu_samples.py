# SPDX-License-Identifier: Apache-2.0
"""What is read of nvidia-smi's formats, and how it is judged."""

from dataclasses import replace

import pytest

from recipes.notation.layout import layout_from
from recipes.spec import cluster as clusters
from slurm.preflight.check import PreflightCheck
from slurm.preflight.machine import Machine
from slurm.preflight.node.gpus import connection_checks, gpu_checks, parsed, visible_fault
from slurm.preflight.node.topology import device_order, topology_checks
from slurm.preflight.node.topology import parsed as topology
from slurm.preflight.requirements import Expected
from tests.slurm.preflight.support.samples import BRIDGED, DGX_H100, listed

UNDERLINED = DGX_H100.replace("\tGPU0", "\t\x1b[4mGPU0", 1).replace("GPU NUMA ID", "\x1b[0m", 1)


def dgx(words: str, *, nodes: int = 0) -> Expected:
    return Expected.of(clusters.load("dgx_h100"), layout_from(words), nodes=nodes)


def states(checks: list[PreflightCheck]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def linked(expected: Expected, said: str, **environ: str) -> list[PreflightCheck]:
    return list(topology_checks(expected, Machine(environ=environ, run=lambda _: said)))


def test_the_rows_of_a_query_become_gpus_and_a_warning_among_them_is_passed_over():
    found = parsed("WARNING: infoROM is corrupted at gpu 0000:1B:00.0\n" + listed(8))
    assert [gpu.index for gpu in found] == list(range(8))
    assert found[0].memory_gib == pytest.approx(79.65, abs=0.01)
    assert (found[0].driver, found[0].sm_clock_mhz, found[0].uncorrected) == ("535.161.08", 1980, 0)


def test_what_nvidia_smi_does_not_know_is_not_judged():
    (gpu,) = parsed("0, GPU-1, NVIDIA GB10, [N/A], 580.65.06, [N/A], [N/A], Not Active\n")
    assert (gpu.memory_gib, gpu.sm_clock_mhz, gpu.uncorrected, gpu.reasons) == (None, None, None, 0)
    checks = list(gpu_checks(Expected(gpus_per_node=1, gpu_memory_gib=79), [gpu]))
    assert states(checks) == {"GPUs": "ok", "driver": "ok", "clocks": "ok"}


@pytest.mark.parametrize(
    ("rows", "name", "said"),
    [
        (listed(reasons="0x0000000000000048"), "clocks", "hardware slowdown, hardware thermal"),
        (listed(driver="525.60.13"), "driver", "525.60.13; at least 535.104 needed"),
        (listed().replace("81559", "40537"), "GPU memory", "39.6 GiB on the smallest"),
        (listed().replace(", 1980, 0,", ", 1980, 3,"), "GPU memory errors", "GPU 0: 3"),
        (listed().replace("1980", "1410"), "clocks", "1700 MHz needed"),
    ],
)
def test_a_gpu_that_is_not_as_expected_fails_by_name(rows, name, said):
    expected = replace(dgx("tp8"), least_driver="535.104", least_sm_clock_mhz=1700)
    (failed,) = [c for c in gpu_checks(expected, parsed(rows)) if c.state == "failure"]
    assert failed.name == name
    assert said in failed.said


def test_devices_by_uuid_are_taken_by_any_beginning_that_is_one_gpu_s():
    gpus = parsed(listed(2))
    one, other = (gpu.uuid for gpu in gpus)
    assert visible_fault([one, other[:8]], Expected(ranks_per_node=2), gpus) is None
    assert visible_fault(["MIG-1", "MIG-2"], Expected(ranks_per_node=2), gpus) is None
    said = "GPU- is not a prefix of exactly one UUID"
    assert visible_fault(["GPU-", other], Expected(), gpus) == said
    assert visible_fault([], Expected(ranks_per_node=1), gpus) == "0 devices for 1 ranks"


@pytest.mark.parametrize("said", [DGX_H100, UNDERLINED])
def test_the_matrix_of_a_dgx_is_read_with_its_nics(said):
    found = topology(said)
    assert found.gpus == list(range(8))
    assert found.between(0, 7) == found.between(7, 0) == "NV18"
    assert found.nearest(0) == ("mlx5_0", "PXB")
    assert found.nearest(5) == ("mlx5_9", "PXB")


def test_tp_and_the_all_to_all_of_a_dgx_are_inside_nvlink():
    checks = linked(dgx("tp2 ulysses4 dp4"), DGX_H100)
    assert states(checks) == {"TP 2": "ok", "CP all-to-all 4": "ok", "NICs": "ok"}


def test_tp_over_pcie_fails_and_names_the_pair():
    four = replace(dgx("tp4"), ranks_per_node=4, gpus_per_node=4)
    (check,) = linked(four, BRIDGED)
    assert check.state == "failure"
    assert check.said.startswith("without NVLink: local ranks 0 and 2 (GPU0, GPU2) by SYS and 3")


def test_the_order_of_visible_devices_decides_who_is_a_neighbour():
    pairs = replace(dgx("tp2 dp2"), ranks_per_node=4, gpus_per_node=4)
    assert states(linked(pairs, BRIDGED)) == {"TP 2": "ok"}
    crossed = linked(pairs, BRIDGED, CUDA_VISIBLE_DEVICES="0,2,1,3")
    assert states(crossed) == {"TP 2": "failure"}
    assert device_order(pairs, Machine(environ={"CUDA_VISIBLE_DEVICES": "3,2,1,0"})) == [3, 2, 1, 0]


def test_an_all_to_all_over_nodes_and_a_far_nic_are_warnings():
    wide = linked(dgx("ulysses16"), DGX_H100)
    assert states(wide) == {"CP all-to-all 16": "warning", "NICs": "ok"}
    far = linked(replace(dgx("dp8"), nodes=2, gpus_per_node=4, ranks_per_node=4), BRIDGED)
    assert states(far) == {"NICs": "warning"}
    assert "GPU2 SYS to mlx5_0" in far[0].said


def test_nvlink_over_the_nodes_of_a_rack_is_no_fault():
    rack = Expected.of(clusters.load("gb200_nvl72"), layout_from("tp2 ulysses4 dp8"), nodes=16)
    four = "\n".join(DGX_H100.splitlines()[:5])
    assert states(linked(rack, four))["CP all-to-all 4"] == "ok"


@pytest.mark.parametrize(
    ("cluster", "words", "said", "state"),
    [
        ("dgx_h100", "tp2 dp4", "1", "ok"),
        ("dgx_h100", "tp2 dp4", "8", "failure"),
        ("dgx_h100", "ring2 dp4", None, "failure"),
        ("dgx_h100", "tp2 dp4 zero3", "1", "warning"),
        ("dgx_b200", "tp2 dp4", "1", "warning"),
        ("dgx_b200", "tp2 dp4", "32", "ok"),
    ],
)
def test_connections_follow_megatron_s_rule_by_architecture(cluster, words, said, state):
    expected = Expected.of(clusters.load(cluster), layout_from(words))
    environ = {} if said is None else {"CUDA_DEVICE_MAX_CONNECTIONS": said}
    (check,) = connection_checks(expected, Machine(environ=environ))
    assert check.state == state


def test_a_layout_without_tp_and_cp_asks_for_no_connections():
    assert not list(connection_checks(dgx("dp8"), Machine(environ={})))
