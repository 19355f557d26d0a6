# SPDX-License-Identifier: Apache-2.0
import torch

from benchmarks.gpu import measure
from benchmarks.gpu.cases import all_cases
from benchmarks.gpu.results import Results
from benchmarks.gpu.sizes import ON_CPU
from benchmarks.harness.out_of_memory import out_of_memory

SAID = (
    "CUDA out of memory. Tried to allocate 8.40 GiB. GPU 0 has a total capacity of 79.18 GiB of "
    "which 4.12 GiB is free. Process 7 has 75.06 GiB memory in use. Of the allocated memory"
)


def test_a_reason_has_the_sizes_of_torchs_message():
    found = out_of_memory(torch.OutOfMemoryError(SAID))
    assert found.startswith("out of memory: Tried to allocate 8.40 GiB. GPU 0 has")
    assert found.endswith("75.06 GiB memory in use")
    assert out_of_memory(torch.OutOfMemoryError("")) == "out of memory"


def test_a_case_that_runs_out_of_memory_is_the_last_of_its_process(monkeypatch, tmp_path):
    """Itself, or one of the blocks that it compares."""
    cases = all_cases(ON_CPU)[:3]

    def runs_out(sizes):
        raise torch.OutOfMemoryError(SAID)

    def one_block_runs_out(sizes):
        return {"blocks": {"PyTorch": {"reason": out_of_memory(torch.OutOfMemoryError(SAID))}}}

    for answer in (runs_out, one_block_runs_out):
        results = Results(tmp_path / answer.__name__)
        monkeypatch.setitem(measure.MEASUREMENTS, cases[1].kind, answer)
        monkeypatch.setitem(measure.MEASUREMENTS, cases[0].kind, lambda sizes: {"bytes": 1})
        measure.measure(cases, ON_CPU, results, until=float("inf"), peak=1.0)
        assert results.names() == {case.name for case in cases[:2]}
