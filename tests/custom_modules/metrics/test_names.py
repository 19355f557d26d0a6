# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path

from custom_modules.metrics.names import METRICS, tracked

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_the_page_has_the_table_of_the_code():
    rows = []
    for one in METRICS:
        tracked_as = f"`{one.tracked}`" if one.tracked else ""
        rows.append(f"| `{one.key}` | {one.unit} | {one.meaning} | {tracked_as} |")
    table = PAGE.read_text().partition("| --- | --- | --- | --- |\n")[2].partition("\n\n")[0]
    assert table.splitlines() == rows


def test_names_are_given_once():
    names = [metric.tracked for metric in METRICS if metric.tracked]
    assert len(names) == len(set(names))
    assert len({metric.key for metric in METRICS}) == len(METRICS)


def test_a_tracker_gets_known_numbers_in_the_units_of_its_names():
    line = {
        "step": 3, "tokens": 2048, "loss": 2.5, "mfu": 0.4, "mfu_6n": None, "grad_norm": math.nan,
        "peak_memory_bytes": 2**31, "model_flops_per_second_per_rank": 3e14, "samples": [8, 11],
        "loss_by_source": {"web": 2.0, "code": None}, "host_memory_bytes_by_rank": [1],
    }  # fmt: skip
    assert tracked(line) == {
        "n_tokens_seen": 6144.0,
        "loss_metrics/global_avg_loss": 2.5,
        "mfu(%)": 40.0,
        "memory/max_active(GiB)": 2.0,
        "tflops": 300.0,
        "loss_by_source/web": 2.0,
    }
