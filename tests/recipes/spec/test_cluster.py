# SPDX-License-Identifier: Apache-2.0
from typing import get_args

import pytest
import yaml

from custom_modules.attention.registry import KERNELS
from recipes.spec import cluster
from recipes.spec.efficiency import ATTENTION, HOPPER, AttentionKernel
from recipes.spec.units import GiB


@pytest.mark.parametrize("name", cluster.names())
def test_every_shipped_file_is_a_cluster(name):
    found = cluster.load(name)
    assert found.name == name
    assert found.gpu_bytes < found.host_memory_gib * GiB


def test_the_clusters_of_the_collection_are_shipped():
    of_nvidia = {"dgx_a100", "dgx_a100_40", "dgx_b200", "dgx_h100", "dgx_h200", "gb200_nvl72"}
    assert of_nvidia | {"gh200", "l40s", "rtx_4090"} == set(cluster.names())


@pytest.mark.parametrize("name", cluster.names())
def test_peaks_are_dense_in_both_precisions(name):
    gpu = cluster.load(name).gpu
    assert gpu.fp8_tflops == pytest.approx(2 * gpu.bf16_tflops if gpu.capability >= (8, 9) else 0,
                                           rel=0.02)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "processors", "each_clock", "ghz", "bits", "gigabits"),
    [
        ("dgx_a100_40", 108, 2048, 1.41, 5120, 2.43),
        ("l40s", 142, 1024, 2.49, 384, 18),
        ("rtx_4090", 128, 512, 2.52, 384, 21),  # GeForce has half of it with sums in fp32
        ("gh200", 132, 4096, 1.83, 6144, 5.2),
    ],
)
def test_rates_are_those_of_the_processors_and_of_the_memory_bus(
    name, processors, each_clock, ghz, bits, gigabits
):
    gpu = cluster.load(name).gpu
    assert gpu.bf16_tflops == pytest.approx(processors * each_clock * ghz / 1e3, rel=0.005)
    assert gpu.memory_gbps == pytest.approx(bits * gigabits / 8, rel=0.005)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="no cluster is called 'dgx_h10'; did you mean dgx_h100"):
        cluster.load("dgx_h10")


def changed(tmp_path, **hardware):
    """Return a copy of a shipped file with other fields."""
    given = yaml.safe_load((cluster.FOLDER / "dgx_h100.yaml").read_text())
    given["hardware"] |= hardware
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(given))
    return str(path)


def test_a_file_that_is_not_there_is_told_the_nearest_beside_it(tmp_path):
    path = tmp_path / "sit.yaml"
    with pytest.raises(ValueError, match=r"no cluster file .*sit\.yaml; `longhaul clusters` lists"):
        cluster.path_of(str(path))
    (tmp_path / "site.yaml").touch()
    with pytest.raises(ValueError, match=r"no cluster file .*sit\.yaml; did you mean site\.yaml\?"):
        cluster.path_of(str(path))


def test_a_file_of_one_s_own_is_read(tmp_path):
    assert cluster.load(changed(tmp_path, gpus_per_node=4)).gpus_per_node == 4


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ({"gpus_per_nod": 8}, "did you mean gpus_per_node"),
        ({"gpus_per_node": 0}, "gpus_per_node is 0; it must be positive, and finite"),
        ({"gpus_per_node": 2.5}, "gpus_per_node is 2.5; expected a whole number"),
        ({"nvlink_gbps": "fast"}, "nvlink_gbps is 'fast'; expected a number"),
        ({"nodes_per_block": 4}, "nodes_per_block is 4 and block_gbps 0; state both"),
        ({"nodes_per_block": 4, "block_gbps": 60}, "block_gbps is 60; it must be between 0 and"),
        ({"gpu": "H100"}, "hardware.gpu is 'H100'; expected a mapping of fields"),
        ({"gpu": {"name": "H100"}}, "hardware.gpu lacks 'memory_gib', 'bf16_tflops'"),
    ],
    ids=str,
)
def test_a_mistaken_file_is_told(tmp_path, hardware, said):
    with pytest.raises(ValueError, match=said):
        cluster.load(changed(tmp_path, **hardware))


def test_a_file_that_is_no_cluster_is_told(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="is a list, not a mapping; copy"):
        cluster.load(str(path))


def test_shares_of_peaks_may_be_one_s_own(tmp_path):
    found = cluster.load(changed(tmp_path, efficiency={"attention_forward": 0.65}))
    assert found.efficiency.attention_forward == 0.65
    with pytest.raises(ValueError, match="did you mean attention_forward"):
        cluster.load(changed(tmp_path, efficiency={"attention_foward": 0.65}))


def test_nvlink_may_span_nodes(tmp_path):
    rack = cluster.load(changed(tmp_path, gpus_per_node=4, gpus_per_link=64))
    assert rack.joins(64, world=128)
    assert not rack.joins(128, world=128)
    assert not cluster.load("dgx_h100").joins(16, world=16)
    with pytest.raises(
        ValueError, match="gpus_per_link is 6, not a multiple of the 4 GPUs of a node"
    ):
        cluster.load(changed(tmp_path, gpus_per_node=4, gpus_per_link=6))


def test_the_fast_link_joins_groups_of_any_size_within_a_node():
    node = cluster.load("dgx_h100")
    assert node.joins(3, world=6)
    assert not node.joins(3, world=12)  # the third group is on both nodes


def test_attention_has_the_shares_of_the_kernel_that_training_takes_on_the_gpu():
    for name in cluster.names():
        shares = cluster.load(name).efficiency
        assert shares.attention_kernel == "cudnn"
        of_gpu = ATTENTION[cluster.load(name).gpu.capability[0]]
        assert (shares.attention_forward, shares.attention_backward) == of_gpu["cudnn"]
    assert cluster.load("dgx_b200").efficiency.matmul < HOPPER.matmul


def test_a_named_kernel_has_its_own_shares_and_stated_ones_stay(tmp_path):
    older = cluster.load(changed(tmp_path, efficiency={"attention_kernel": "flash_attn_2"}))
    assert older.efficiency.attention_forward < 0.7 * HOPPER.attention_forward
    mine = {"attention_kernel": "flash_attn_2", "attention_forward": 0.4}
    stated = cluster.load(changed(tmp_path, efficiency=mine)).efficiency
    assert stated.attention_forward == 0.4
    assert stated.attention_backward == older.efficiency.attention_backward


@pytest.mark.parametrize(
    ("efficiency", "said"),
    [
        ({"attention_kernel": "flash_attn_4"}, "attention_kernel is 'flash_attn_4'"),
        ({"attention_kernel": "flash_attn_3"}, "does not run on compute capability 10.0; choose"),
        ({"attention_kernel": "cpu_flash"}, "measure it: longhaul calibrate --device cpu"),
    ],
    ids=str,
)
def test_a_kernel_that_the_gpu_does_not_run_is_refused(tmp_path, efficiency, said):
    gpu = yaml.safe_load((cluster.FOLDER / "dgx_b200.yaml").read_text())["hardware"]["gpu"]
    with pytest.raises(ValueError, match=said):
        cluster.load(changed(tmp_path, gpu=gpu, efficiency=efficiency))


def test_kernels_with_shares_are_those_that_training_knows():
    assert set(get_args(AttentionKernel)) - {""} == set(KERNELS)
    named = {name for of_gpu in ATTENTION.values() for name in of_gpu}
    assert named == set(KERNELS) - {"cpu_flash"}


@pytest.mark.parametrize(
    ("efficiency", "head_dim", "share"),
    [
        ({}, 128, 1),
        ({}, 256, 1),
        ({}, 96, 0.855),
        ({}, 64, 0.71),
        ({}, 32, 0.71),
        ({"attention_kernel": "cuda_flash"}, 64, 1),
        ({"attention_forward": 0.5}, 64, 1),
        ({"attention_backward": 0.5}, 64, 1),
        ({"attention_small_heads": 0.8}, 64, 0.8),
    ],
)
def test_small_heads_have_less_of_the_rate_of_cudnn_on_hopper_or_what_is_stated(
    tmp_path, efficiency, head_dim, share
):
    shares = cluster.load(changed(tmp_path, efficiency=efficiency)).efficiency
    forward, backward = shares.attention_of(head_dim)
    assert forward == pytest.approx(share * shares.attention_forward)
    assert backward == pytest.approx(share * shares.attention_backward)


def test_small_heads_are_as_fast_as_large_ones_where_nothing_else_is_known():
    for name in ("dgx_a100", "dgx_b200"):
        assert cluster.load(name).efficiency.attention_small_heads == 1
