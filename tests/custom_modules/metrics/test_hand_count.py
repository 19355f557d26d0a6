# SPDX-License-Identifier: Apache-2.0
"""The figures of a line against numbers counted by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from custom_modules.callbacks.step_measures import StepMeasures, _of_device
from custom_modules.metrics import gpu_sensors
from custom_modules.metrics.gpu_sensors import GpuSensors
from custom_modules.metrics.loss_bins import LossBins
from custom_modules.metrics.rank_facts import by_rank, gather
from custom_modules.metrics.tally import Tally
from custom_modules.rope.layers import LayerPattern

# A layer of 2 heads of 8, hidden 16, MLP of 3 matrices 16 x 24, 32 words, untied:
# 16 * 16 * 4 + 3 * 16 * 24 = 2176 weights in the layer, and 512 in the head and in the embedding.
S, LAYER, WORDS = 64, 2176, 512
CAUSAL = 6 * (LAYER + WORDS) + 6 * 1 * 16 * S
CONFIG = SimpleNamespace(
    num_layers=1, num_attention_heads=2, kv_channels=8, hidden_size=16, vocab_size=32,
    share_embeddings_and_output_weights=False,
)  # fmt: skip


@pytest.fixture
def module() -> SimpleNamespace:
    return SimpleNamespace(
        config=CONFIG, optim=None, tally=Tally(), training_loss_reduction=SimpleNamespace()
    )


def measures_of(module, **options) -> StepMeasures:
    parts = [SimpleNamespace(source="web"), SimpleNamespace(source="code")]
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        datamodule=SimpleNamespace(manifest=SimpleNamespace(train=SimpleNamespace(parts=parts))),
    )
    given = {"flops_per_token": CAUSAL, "seq_length": S, "gpu": "", "peak_flops": 1e6} | options
    return StepMeasures(trainer, module, **given)


@pytest.mark.usefixtures("megatron_rank")
def test_a_line_has_the_figures_of_a_hand_count(module):
    measures = measures_of(module)
    measures.begin()
    # Two rows of 64 tokens: documents of 40, 20 and 4 of padding; and of 10 and 54.
    tokens = torch.zeros(2, S, dtype=torch.int64)
    module.tally.add(tokens, torch.tensor([0, 1]), torch.tensor([[2, 2000, 4], [2, 3016, 0]]))
    mask = torch.ones(2, S)
    mask[0, 60:] = 0
    losses = torch.full((2, S), 9.0)
    losses[0], losses[1, :32], losses[1, 32:] = 1.0, 2.0, 4.0
    positions = torch.arange(S).expand(2, S)
    module.training_loss_reduction.bins.add(losses, mask, positions, torch.tensor([1, 0]))
    measures.end()
    gathered = gather({"tokens": 128.0} | measures.facts(module.tally), [0, 1], measures.sums())
    line = measures.line(gathered, seconds=2.0, tokens=128)
    assert line["documents"] == 4
    assert line["sum_squared_lengths"] == 40**2 + 20**2 + 10**2 + 54**2 == 5016
    assert line["sum_squared_lengths_max_over_mean"] == 1
    assert line["padding_tokens"] == 4
    assert line["mfu"] == pytest.approx((6 * 2688 + 6 * 16 * 64) * 128 / (2 * 1e6))
    assert line["mfu_documents"] == pytest.approx((6 * 2688 * 124 + 6 * 16 * 5016) / (2 * 1e6))
    assert line["mfu_6n"] == pytest.approx(6 * 3200 * 128 / (2 * 1e6))
    assert line["loss_by_source"] == {"web": 3.0, "code": 1.0}
    of_last = (28 * 1 + 32 * 4) / 60
    octaves = ["0-1", "1-2", "2-4", "4-8", "8-16", "16-32"]
    expected = {**dict.fromkeys(octaves, 1.5), "32+": pytest.approx(of_last)}
    assert line["loss_by_position"] == expected
    assert gathered.samples.tolist() == [[0, 1]]


@pytest.mark.usefixtures("megatron_rank")
def test_layers_with_a_window_count_by_the_pairs_in_it(module):
    # Two layers, of which the first has a window of 16 tokens; the rows are those of above.
    pattern = LayerPattern(every=2, window=16)
    module.config = SimpleNamespace(**{**vars(CONFIG), "num_layers": 2, "pattern": pattern})
    lengths = (40, 20, 10, 54)
    pairs = sum(min(at + 1, 16) for length in lengths for at in range(length))
    squares = 2 * pairs - sum(min(length, 16) for length in lengths)  # as l^2 of l (l + 1) / 2
    causal = 6 * (2 * LAYER + WORDS) + 6 * 16 * (S + 2 * 16 - 16**2 / S)
    measures = measures_of(module, flops_per_token=causal)
    measures.begin()
    module.tally.add(
        torch.zeros(2, S, dtype=torch.int64), torch.tensor([0, 1]),
        torch.tensor([[2, 2000, 4, 1408], [2, 3016, 0, squares - 1408]]),
    )  # fmt: skip
    measures.end()
    gathered = gather({"tokens": 128.0} | measures.facts(module.tally), [0, 1], measures.sums())
    line = measures.line(gathered, seconds=2.0, tokens=128)
    assert line["sum_squared_lengths_in_window"] == squares
    assert line["mfu"] == pytest.approx(causal * 128 / (2 * 1e6))
    within = 6 * (2 * LAYER + WORDS) * 124 + 6 * 16 * (5016 + squares)
    assert line["mfu_documents"] == pytest.approx(within / (2 * 1e6))


@pytest.mark.usefixtures("megatron_rank")
def test_data_without_the_pairs_of_a_window_has_no_share_of_documents(module):
    pattern = LayerPattern(every=2, window=16)
    module.config = SimpleNamespace(**{**vars(CONFIG), "num_layers": 2, "pattern": pattern})
    measures = measures_of(module)
    measures.begin()
    tokens = torch.zeros(1, S, dtype=torch.int64)
    module.tally.add(tokens, torch.tensor([0]), torch.tensor([[2, 2000, 4]]))
    measures.end()
    gathered = gather({"tokens": 64.0} | measures.facts(module.tally), [0], measures.sums())
    line = measures.line(gathered, seconds=2.0, tokens=64)
    assert line["mfu_documents"] is None
    assert line["sum_squared_lengths"] == 2000
    assert "sum_squared_lengths_in_window" not in line


@pytest.mark.usefixtures("megatron_rank")
def test_what_is_not_known_is_null(module):
    measures = measures_of(module, peak_flops=None)
    measures.begin()
    measures.end()
    gathered = gather({"tokens": 0.0} | measures.facts(module.tally), [], measures.sums())
    line = measures.line(gathered, seconds=1.0, tokens=128)
    assert line["mfu"] is line["mfu_documents"] is line["gpu_power_watts"] is None
    assert "documents" not in line  # the data did not say
    assert line["loss_by_position"] == line["loss_by_source"] == {}


def test_a_loss_that_is_not_finite_is_null_in_its_bin_alone():
    bins = LossBins(8, ["web"], torch.device("cpu"))
    losses = torch.ones(1, 8)
    losses[0, 7] = math.inf
    bins.add(losses, torch.ones(1, 8), torch.arange(8)[None], None)
    positions, sources = bins.means(bins.sums())
    assert positions == {"0-1": 1.0, "1-2": 1.0, "2-4": 1.0, "4+": None}
    assert sources == {"web": None}
    bins.clear()
    assert bins.means(bins.sums()) == ({}, {})


def test_many_ranks_have_the_largest_its_rank_and_the_median():
    assert by_rank([5.0, 7.0]) == [5, 7]
    assert by_rank([float(value) for value in range(100)]) == {"max": 99, "median": 49, "rank": 99}


def test_sensors_give_the_mean_of_the_samples_since_the_last_step(monkeypatch):
    busy = iter([50, 100, 90])

    def utilization(device: torch.device) -> int:
        value = next(busy, None)
        if value is None:
            raise RuntimeError("NVML has ended")
        return value

    def power(device: torch.device) -> int:
        raise RuntimeError("this GPU does not tell its power")

    for name, sensor in {"utilization": utilization, "power_draw": power}.items():
        monkeypatch.setattr(gpu_sensors.torch.cuda, name, sensor)
    monkeypatch.setattr(gpu_sensors.torch.cuda, "clock_rate", lambda device: 1980)
    sensors = GpuSensors(torch.device("cuda", 0), seconds=0.0)
    monkeypatch.setattr(sensors._ended, "wait", lambda seconds: len(sensors._samples) == 3)
    sensors.start()
    sensors._thread.join(10)
    utilization_, watts, mhz = sensors.means()
    assert (utilization_, mhz) == (80, 1980)
    assert math.isnan(watts)
    assert sensors.means()[0] == 90  # a step between two samples has the last one
    assert all(map(math.isnan, GpuSensors(torch.device("cpu")).means()))


def test_sensors_that_are_lost_have_no_old_values(monkeypatch):
    asked = iter(range(4))

    def sensor(device: torch.device) -> int:
        if next(asked) == 3:
            monkeypatch.setattr(gpu_sensors.torch.cuda, "power_draw", lost)
            monkeypatch.setattr(gpu_sensors.torch.cuda, "clock_rate", lost)
            lost(device)
        return 1000

    def lost(device: torch.device) -> int:
        raise RuntimeError("Failed to initialize NVML: Unknown Error")

    for name in ("utilization", "power_draw", "clock_rate"):
        monkeypatch.setattr(gpu_sensors.torch.cuda, name, sensor)
    sensors = GpuSensors(torch.device("cuda", 0), seconds=0.0)
    sensors.start()
    sensors._thread.join(10)
    assert not sensors._thread.is_alive()
    sensors.means()  # of the step in which they were lost
    assert all(map(math.isnan, sensors.means()))


@pytest.mark.parametrize(
    ("gpu", "name", "same"),
    [
        ("H100 SXM5 80 GB", "NVIDIA H100 80GB HBM3", True),
        ("A100 SXM4 80 GB", "NVIDIA A100-SXM4-80GB", True),
        ("H100 SXM5 80 GB", "NVIDIA H100 PCIe", False),
        ("H100 PCIe 80 GB", "NVIDIA H100 PCIe", True),
        ("H100 SXM5 80 GB", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", False),
        ("H100 PCIe 80 GB", "NVIDIA H100 80GB HBM3", False),
        ("NVIDIA A100 SXM4", "NVIDIA H100 80GB HBM3", False),
        ("NVIDIA H100 SXM5", "NVIDIA H100 80GB HBM3", True),
        (" ", "NVIDIA H100 80GB HBM3", False),
        ("B200 180 GB", "NVIDIA GB200", False),
        ("GB200 186 GB", "NVIDIA GB200", True),
        ("H200 SXM 141 GB", "NVIDIA H100 80GB HBM3", False),
    ],
)
def test_a_peak_is_used_on_the_gpu_that_it_is_of(gpu, name, same, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert _of_device(torch.device("cuda", 0), gpu, 1e15) == (1e15 if same else None)
