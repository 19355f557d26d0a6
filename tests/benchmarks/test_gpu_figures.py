# SPDX-License-Identifier: Apache-2.0
"""Cases, goals and the page of the measurements of one GPU, without measuring."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.gpu.cases import PLANNED, all_cases
from benchmarks.gpu.figures import Figures, goals
from benchmarks.gpu.report import whole_page
from benchmarks.gpu.results import Result, Results
from benchmarks.gpu.session import require_same_machine
from benchmarks.gpu.sizes import ON_CPU, ON_GPU, SIZES, machine
from recipes.planner.search.alternatives import best
from recipes.spec.layout import Fp8
from recipes.spec.stage import Cosine, Stage


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_case_has_a_file_of_its_own(sizes):
    names = Counter(case.name for case in all_cases(sizes))
    assert max(names.values()) == 1
    assert all(name.replace("_", "").isalnum() for name in names)
    assert {case.kind for case in all_cases(sizes)} == {
        "copies", "fork", "loss", "mlp", "attention", "stack", "step", "longest", "run",
    }  # fmt: skip


def test_ways_that_are_compared_take_turns():
    cases = all_cases(ON_GPU)
    rounds = [
        (case.settings["way"], case.round)
        for case in cases
        if case.kind == "stack" and case.settings["length"] == 65_536 and case.connections == "1"
    ]
    once = [way for way, number in rounds if number == 1]
    twice = [way for way, number in rounds if number == 2]
    assert once[: len(twice)] == twice
    assert len(twice) == 5


def test_the_planner_has_a_layout_for_every_step_on_a_gpu_with_128_gib_of_host():
    cluster = replace(machine("cpu", "NVIDIA H100 80GB HBM3"), host_memory_gib=120)
    steps = [case.settings for case in all_cases(ON_GPU) if case.kind == "step"]
    planned = [one for one in steps if one["layout"] == PLANNED and one["precision"] == "bf16"]
    assert len(planned) == 9
    for one in planned:
        length = one["length"]
        stage = Stage(
            seq_length=length, rope="native", tokens=length, tokens_per_batch=length,
            lr=Cosine(peak=1e-4), start="scratch",
        )  # fmt: skip
        found = best(ON_GPU.cards[one["card"]], stage, cluster, gpus=1, fp8=Fp8())
        assert found.fits


def blocks(**found) -> dict:
    return {
        name: {"seconds": seconds, "extra_bytes": size, "reason": reason}
        for name, (seconds, size, reason) in found.items()
    }


def result(kind, reason="", number=1, **figures) -> Result:
    settings = {key: figures.pop(key) for key in ("way", "length", "card", "layout", "precision")
                if key in figures}  # fmt: skip
    return Result(
        case=f"{kind}_{number}_{settings}", kind=kind, device="cuda", settings=settings,
        round=number, figures=figures, reason=reason,
    )  # fmt: skip


def verdicts(*results) -> dict[str, tuple[str, float | None]]:
    of = Figures({one.case: one for one in results}, ON_GPU)
    return {goal.what: (goal.verdict, goal.value) for goal in goals(of)}


def test_a_goal_is_the_ratio_to_the_peer_and_none_is_claimed_without_one():
    loss = result(
        "loss", blocks=blocks(ours=(1.0, 10, ""), PyTorch=(2.0, 400, ""), Liger=(0.9, 50, ""))
        | blocks(**{"Cut Cross-Entropy": (0.0, 0, "not installed")}),
    )  # fmt: skip
    found = verdicts(loss)
    assert found["loss head: extra bytes over PyTorch's"] == ("holds", 0.025)
    faster = found["loss head: time over the faster of Liger and Cut Cross-Entropy"]
    assert faster == ("is missed", pytest.approx(1 / 0.9))
    assert found["tiled MLP: extra bytes over PyTorch's"] == ("not measured", None)
    out = result("loss", blocks=blocks(ours=(1.0, 10, ""), PyTorch=(0, 0, "out of memory")))
    assert verdicts(out)["loss head: extra bytes over PyTorch's"] == ("not measured", None)


def stack(way, seconds, *, length=131_072, away=1.0, number=1, peak=100, loss=2.0) -> Result:
    return result(
        "stack", way=way, length=length, number=number, seconds=seconds, inputs_away=away,
        peak_bytes=peak, loss=loss, gradient_norm=1.0, flops=1e15,
    )  # fmt: skip


def test_offload_is_only_cheap_where_the_inputs_really_are_away():
    both = [stack("ours", 1.02), stack("ours, nothing away", 1.0, away=0.0)]
    (what,) = (name for name in verdicts(*both) if name.startswith("offload at 131,072"))
    assert verdicts(*both)[what] == ("holds", pytest.approx(1.02))
    half = [stack("ours", 1.02, away=0.5), both[1]]
    (what,) = (name for name in verdicts(*half) if name.startswith("offload at 131,072"))
    assert verdicts(*half)[what][0] == "is missed"


def test_the_rate_at_a_million_tokens_counts_with_a_small_host_alone():
    for host, verdict in ((120.0, "holds"), (2048.0, "is missed")):
        step = result(
            "step", card="llama32_1b", length=1_048_576, layout=PLANNED, precision="bf16",
            tokens_per_second=2000.0, mfu=0.4, host_gib=host, seconds=1.0, peak_bytes=1,
            predicted={"seconds": 1.0, "peak_bytes": 1},
        )  # fmt: skip
        (what,) = (name for name in verdicts(step) if "tokens/s" in name)
        assert verdicts(step)[what] == (verdict, 2000.0)


def test_rounds_give_their_median_and_another_model_is_named():
    rounds = [stack("ours", s, number=n) for n, s in enumerate((1.0, 5.0, 2.0), start=1)]
    of = Figures({one.case: one for one in rounds}, ON_GPU)
    assert of.stack(131_072, "ours", "seconds") == 2.0
    assert of.disagreements() == []
    rounds.insert(0, stack("ALST-like", 2.0, loss=2.1))
    of = Figures({one.case: one for one in rounds}, ON_GPU)
    assert of.disagreements() == [
        "ALST-like at 131,072 tokens computes another model: loss 2.1, not 2"
    ]


def test_the_slope_is_between_the_shortest_and_the_longest_that_were_measured():
    some = [stack("ours", 1.0, length=65_536 * n, peak=1000 * n) for n in (1, 2, 4)]
    of = Figures({one.case: one for one in some}, ON_GPU)
    assert of.slope("ours") == pytest.approx(1000 / 65_536)
    assert of.slope("ALST-like") is None


def test_a_page_of_nothing_says_of_every_case_that_it_was_not_reached():
    cases = all_cases(ON_GPU)
    page = whole_page(cases, {}, ON_GPU)
    assert page.count("| not reached |") == len(cases)
    assert "| not measured |" in page
    assert "| holds |" not in page


def test_results_are_read_back_and_a_damaged_one_is_named(tmp_path):
    results = Results(tmp_path / "a folder")
    case = all_cases(ON_CPU)[0]
    results.write(Result.of(case, "cpu", figures={"a": 1}, facts={"machine": "A"}))
    assert results.read()[case.name].figures == {"a": 1}
    with pytest.raises(ValueError, match="another machine \\(A\\); this one is B: take another"):
        require_same_machine(results.read(), "B", "cpu")
    with pytest.raises(ValueError, match="another device than cuda; take another --out"):
        require_same_machine(results.read(), "A", "cuda")
    path = results.files / f"{case.name}.json"
    path.write_text(json.dumps({"unknown": 1}))
    with pytest.raises(ValueError, match=f"{case.name}.json is no result"):
        results.read()
    path.write_text("{")
    with pytest.raises(ValueError, match="is no result"):
        results.read()
