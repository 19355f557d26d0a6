# SPDX-License-Identifier: Apache-2.0
"""Cases, goals and the page of the measurements of one GPU, without measuring."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.gpu import session
from benchmarks.gpu.cases import FP8_RECIPES, PLAIN_FP8, PLANNED, all_cases
from benchmarks.gpu.figures import Figures, Value, goals, ratio
from benchmarks.gpu.rental.merge import better, merge
from benchmarks.gpu.report import summary, whole_page
from benchmarks.gpu.results import FILE, MEASURED, Result, Results, folder_of, kept
from benchmarks.gpu.sizes import ON_CPU, ON_GPU, SIZES, layered, machine
from recipes.planner.search.alternatives import best
from recipes.spec.layout import Fp8
from recipes.spec.stage import Cosine, Stage

H100 = "NVIDIA H100 80GB HBM3, CUDA 13.0, cuDNN 91900; Xeon, 16 cores"


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_case_has_a_name_of_its_own_and_cards_that_exist(sizes):
    cases = all_cases(sizes)
    names = Counter(case.name for case in cases)
    assert max(names.values()) == 1
    assert all(name.replace("_", "").isalnum() for name in names)
    for case in cases:
        if "card" in case.settings:
            assert sizes.card_named(case.settings["card"]).name == case.settings["card"]


def test_what_never_ran_fits_its_call_and_what_may_run_out_of_memory_comes_last():
    cases = all_cases(ON_GPU)
    starts = session.START_SECONDS["cuda"] + session.PAGE_SECONDS
    for call, seconds, last in (("first", 290, "stack"), ("second", 430, "ranks")):
        some = [case for case in cases if case.call == call]
        alone = [case.alone for case in some]
        assert alone == sorted(alone)
        until = max(n for n, case in enumerate(some) if case.kind == last and not case.alone)
        assert starts + sum(case.seconds for case in some[: until + 1]) < seconds
    with pytest.raises(ValueError, match="llama31_8b_99_layers is not llama31_8b, llama32_1b, or"):
        ON_GPU.card_named(layered(ON_GPU.card, 99))


def test_the_planner_has_a_layout_for_every_step_on_a_gpu_with_128_gib_of_host():
    cluster = replace(machine("cpu", H100), host_memory_gib=120)
    steps = [case.settings for case in all_cases(ON_GPU) if case.kind == "step"]
    planned = [one for one in steps if one["layout"] == PLANNED and one["precision"] == "bf16"]
    assert len(planned) == 9
    for one in planned:
        length = one["length"]
        stage = Stage(
            seq_length=length, rope="native", tokens=length, tokens_per_batch=length,
            lr=Cosine(peak=1e-4), start="scratch",
        )  # fmt: skip
        found = best(ON_GPU.card_named(one["card"]), stage, cluster, gpus=1, fp8=Fp8())
        assert found.fits


def blocks(**found) -> dict:
    return {
        name: {
            "seconds": seconds, "rounds": [seconds], "extra_bytes": size, "reason": reason,
            "norms": [1.0],
        }
        for name, (seconds, size, reason) in found.items()
    }  # fmt: skip


def result(kind, *, settings=None, rental="a", **found) -> Result:
    figures = {k: v for k, v in found.items() if k not in ("reason", "disturbed", "facts", "gpu")}
    more = {k: v for k, v in found.items() if k not in figures}
    return Result(
        case=f"{kind} {settings} {rental}", kind=kind, device="cuda", settings=settings or {},
        rental=rental, figures=figures, **more,
    )  # fmt: skip


def verdicts(*results) -> dict[str, tuple[str, float | None]]:
    of = Figures({one.case: one for one in results}, ON_GPU)
    return {goal.what: (goal.verdict, goal.value) for goal in goals(of)}


OURS = "ours, tiles of 4,096"
BYTES = "loss head: extra bytes over PyTorch's"


def loss(**more) -> Result:
    found = blocks(
        **{OURS: (1.0, 10, ""), "PyTorch": (2.0, 400, ""), "Liger": (0.9, 50, "")},
        **{"Cut Cross-Entropy": (0.0, 0, "not installed")},
    )
    return result("loss", blocks=found, tokens=1, tile=4096, **more)


def test_the_loss_head_is_compared_with_the_fastest_of_all_others():
    found = verdicts(loss())
    assert found[BYTES] == ("holds", 0.025)
    fastest = found["loss head: time over the fastest of 2 others"]
    assert fastest == ("is missed", pytest.approx(1 / 0.9))
    assert found["tiled MLP: extra bytes over PyTorch's"] == ("not measured", None)


def test_a_disturbed_case_decides_no_goal_and_is_named_on_the_page():
    disturbed = loss(disturbed="other processes used the GPU: 4242", gpu={"tflops": 200.0})
    assert verdicts(disturbed)[BYTES] == ("not measured", None)
    cases = all_cases(ON_GPU)
    page = whole_page(cases, {cases[0].name: replace(disturbed, case=cases[0].name)}, ON_GPU)
    assert "| loss | other processes used the GPU: 4242 |" in page
    assert "## Loss head" not in page


def test_times_of_two_rentals_are_not_compared():
    assert ratio(Value(2.0, "a"), Value(1.0, "a")) == 2.0
    assert ratio(Value(2.0, "a"), None) is None
    with pytest.raises(ValueError, match="not compared: a and b are two rentals"):
        ratio(Value(2.0, "a"), Value(1.0, "b"))
    longest = ON_GPU.longest_stack
    some = [stacks("offload", longest, ours=1.0), stacks("ALST", longest, rental="b", ALST=3.0)]
    what = "rate at 524,288 tokens over the ALST-like stack's"
    assert verdicts(*some)[what] == ("not compared: b and a are two rentals", None)
    some[1] = stacks("ALST", longest, ALST=3.0)
    assert verdicts(*some)[what] == ("holds", 3.0)


def stacks(group, length, *, rental="a", away=1.0, loss=2.0, peak=100, **seconds) -> Result:
    names = {"ours": "ours", "nothing_away": "ours, nothing away", "ALST": "ALST-like"}
    ways = {
        names[name]: {
            "rounds": [one, one, 9.0] if one < 9 else [one], "inputs_away": away,
            "peak_bytes": peak, "reason": "", "gradient_norm": 1.0,
            "loss": loss if name == "ALST" else 2.0,
        }
        for name, one in seconds.items()
    }  # fmt: skip
    settings = {"group": group, "length": length}
    return result("stack", settings=settings, rental=rental, ways=ways, flops=1e15, layers=2)


def test_offload_is_only_cheap_where_the_inputs_really_are_away():
    length = ON_GPU.stack_length
    for away, verdict in ((1.0, "holds"), (0.5, "is missed")):
        found = verdicts(stacks("all", length, away=away, ours=1.02, nothing_away=1.0))
        (what,) = (name for name in found if name.startswith(f"offload at {length:,}"))
        assert found[what] == (verdict, pytest.approx(1.02))


def test_another_model_is_named():
    found = Figures({"a": stacks("all", 65_536, loss=2.1, ours=1.0, ALST=2.0)}, ON_GPU)
    assert found.disagreements() == [
        "ALST-like at 65,536 tokens computes another model: loss 2.1, not 2"
    ]
    other = loss()
    other.figures["blocks"]["Liger"]["norms"] = [1.2]
    assert Figures({"a": other}, ON_GPU).disagreements() == [
        "Liger of the loss has other results than PyTorch"
    ]


def test_the_slope_is_between_the_two_lengths():
    some = [
        stacks("all", ON_GPU.stack_length, peak=1000, ours=1.0, ALST=1.0),
        stacks("offload", ON_GPU.longest_stack, peak=4000, ours=1.0),
    ]
    of = Figures({one.case: one for one in some}, ON_GPU)
    assert of.slope("ours") == pytest.approx(3000 / (7 * 65_536))
    assert of.slope("ALST-like") is None


def attention(**seconds) -> Result:
    found = [
        {"kernel": "cudnn", "block": name, "with_products": "x" in name or "U" in name,
         "forward": [one], "backward": [2 * one], "host": [0.1], "peak_bytes": 1, "reason": ""}
        for name, one in seconds.items()
    ]  # fmt: skip
    settings = {"card": "llama31_8b", "length": 131_072}
    return result(
        "attention", settings=settings, blocks=found, tokens=131_072, head_dim=128,
        forward_flops=1e12,
    )  # fmt: skip


def test_the_verdict_of_attention_is_over_all_blocks_and_counts_their_products():
    found = attention(
        **{"bare kernel": 1.0, "products of the projection": 0.5, "ulysses": 1.01},
        **{"ulysses from x": 1.6, "head_chunked, U = 8": 2.0},
    )
    rates = Figures({"a": found}, ON_GPU).attention_rates(found)
    assert rates["cudnn", "ulysses"] == pytest.approx(1 / 1.01)
    assert rates["cudnn", "ulysses from x"] == pytest.approx(1.5 / 1.6)
    what = "attention at 131,072 tokens, heads of 128: least rate of 3 blocks over their kernel's"
    assert verdicts(found)[what] == ("is missed", pytest.approx(0.75))


def step(card="llama32_1b", length=1_048_576, layout=PLANNED, precision="bf16", **more) -> Result:
    settings = {
        "card": card, "length": length, "layout": layout, "precision": precision,
        "attention": "computed", **({"steps": more.pop("steps")} if "steps" in more else {}),
    }  # fmt: skip
    figures = {
        "tokens_per_second": 2000.0, "mfu": 0.4, "host_gib": 120.0, "seconds": 1.0,
        "peak_bytes": 10, "predicted": {"seconds": 1.0, "peak_bytes": 11}, "finite": True,
        "layout": layout, "losses": [2.0],
    }  # fmt: skip
    return result("step", settings=settings, **{**figures, **more})


def test_the_rate_at_a_million_tokens_counts_with_a_small_host_alone():
    for host, verdict in ((120.0, "holds"), (2048.0, "is missed")):
        found = verdicts(step(host_gib=host))
        (what,) = (name for name in found if "tokens/s" in name)
        assert found[what] == (verdict, 2000.0)


def test_the_rate_of_all_layers_is_extrapolated_within_one_rental():
    steps = [step(card=f"llama32_1b_{n}_layers", seconds=s) for n, s in ((1, 46.0), (2, 90.0))]
    found = verdicts(*steps)
    (what,) = (name for name in found if "extrapolated to 16 layers from 1 and 2" in name)
    assert found[what][1] == pytest.approx(1_048_576 / (46 + 15 * 44))
    steps[1].rental = "b"
    assert verdicts(*steps)[what] == ("not compared: a and b are two rentals", None)


def test_a_loss_that_is_no_number_misses_its_goal():
    short = {"length": 32_768, "layout": PLAIN_FP8}
    nan = step(**short, precision="delayed", losses=[2.0, float("nan")])
    found = verdicts(step(**short, losses=[2.0, 2.0]), nan)
    assert found["loss with FP8 delayed: deviation from bf16"][0] == "is missed"


def test_tests_that_were_cut_off_decide_nothing_unless_one_failed():
    for complete, failed, verdict in (
        (True, {}, "holds"), (False, {}, "not measured"), (False, {"a": "b"}, "is missed"),
    ):  # fmt: skip
        counts = {"passed": 3, "failed": failed, "skipped": 0, "complete": complete}
        what = "tests of parity in float64 over ranks that failed (3 passed)"
        assert verdicts(result("parity", **counts, seconds=1.0))[what][0] == verdict


def test_an_fp8_recipe_is_compared_with_bf16_in_the_same_layout():
    short = {"length": 32_768, "layout": PLAIN_FP8}
    some = [step(**short), step(**short, precision="delayed", losses=[2.1])]
    found = verdicts(*some)
    assert found["loss with FP8 delayed: deviation from bf16"] == (
        "is missed", pytest.approx(0.05),
    )  # fmt: skip
    for recipe in set(FP8_RECIPES) - {"delayed"}:
        assert found[f"loss with FP8 {recipe}: deviation from bf16"] == ("not measured", None)


def test_the_loss_of_many_steps_in_fp8_is_compared_with_bf16_at_their_end():
    last = {"bf16": 2.0, "tensorwise": 2.008, "blockwise": 2.02}
    some = [
        step(layout=PLAIN_FP8, steps=200, precision=name, losses=[9.0] * 190 + [loss] * 10)
        for name, loss in last.items()
    ]
    found = verdicts(*some)
    for name, verdict, away in (("tensorwise", "holds", 0.004), ("blockwise", "is missed", 0.01)):
        what = f"loss after 200 steps with FP8 {name} ({last[name]:.4f}) over bf16's (2.0000)"
        assert found[f"{what}: deviation"] == (verdict, pytest.approx(away))
    missing = "loss after 200 steps with FP8 blockwise over bf16's: deviation"
    assert verdicts(*some[:2])[missing] == ("not measured", None)


def test_a_layout_of_ranks_that_deviates_or_fails_is_counted():
    def layout(away=0.0, reason=""):
        found = {"losses": [2.0], "gradient_norms": [1.0], "reason": reason, "seconds": 1.0}
        return found if reason else {**found, "away": {"losses": away, "gradient_norms": 0.0}}

    layouts = {"one rank": layout(), "TP 2": layout(2.5e-4), "PP 2": layout(reason="hangs")}
    found = verdicts(result("ranks", settings={"layouts": "two"}, layouts=layouts))
    what = "1 layouts of ranks on one GPU: largest deviation of losses"
    assert found[what] == ("holds", 2.5e-4)
    assert found["layouts of ranks on one GPU that failed, of 3"] == ("is missed", 1.0)


def test_a_page_of_nothing_says_of_every_case_that_it_was_not_reached():
    cases = all_cases(ON_GPU)
    page = whole_page(cases, {}, ON_GPU)
    assert page.count("| not reached |") == len(cases)
    assert "| not measured |" in page
    assert "| holds |" not in page
    assert "holds" not in summary({}, ON_GPU)


def test_results_are_read_back_and_a_damaged_one_is_named(tmp_path):
    results = Results(tmp_path / "a folder")
    case = all_cases(ON_CPU)[0]
    for number in (1, 2):
        results.write(Result.of(case, "cpu", figures={"a": number}, facts={"machine": "A"}))
    with results.path.open("a") as file:
        file.write('{"case": "cut')
    assert results.read()[case.name].figures == {"a": 2}
    results = Results(tmp_path / "a folder")  # a line that was cut off is gone
    results.write(Result.of(case, "cpu", reason="why"))
    assert results.read()[case.name].reason == "why"
    results.forget([case.name])
    assert results.read() == {}
    for text in ('{"unknown": 1}\n', "{\n"):
        results.path.write_text(text)
        with pytest.raises(ValueError, match=r"results\.jsonl is not a result"):
            results.read()


def test_what_came_back_is_kept_by_gpu_and_good_figures_are_not_lost(tmp_path):
    assert folder_of(H100) == "nvidia_h100_80gb_hbm3"
    case = all_cases(ON_GPU)[0]
    results = Results(tmp_path / "back")
    facts = {"machine": H100, "date": "2026-11-27", "versions": "torch", "commit": "c"}
    good = replace(loss(facts=facts), case=case.name)
    results.write(good)
    folder, page = merge(tmp_path / "back", tmp_path / "measured", tmp_path)
    assert folder.name == "nvidia_h100_80gb_hbm3"
    assert [path.name for path in folder.iterdir()] == [f"{case.name}.json"]
    assert "| loss head: extra bytes over PyTorch's | holds | 0.025 |" in page.read_text()
    results.write(replace(good, disturbed="slow", figures={}))
    merge(tmp_path / "back", tmp_path / "measured", tmp_path)
    assert kept(folder)[case.name].figures == good.figures
    bad, new = replace(good, reason="fails"), replace(good, rental="b")
    assert better({"a": bad}, {"a": new}) == {"a": new}
    assert better({"a": good}, {"a": bad}) == {}


def test_figures_of_a_cpu_and_of_several_machines_are_not_kept(tmp_path):
    results = Results(tmp_path)
    with pytest.raises(ValueError, match=f"has no {FILE}; name the folder that came back"):
        merge(tmp_path, MEASURED, tmp_path)
    case = all_cases(ON_CPU)[0]
    results.write(Result.of(case, "cpu", facts={"machine": "A"}))
    with pytest.raises(ValueError, match="figures of a CPU, which mean nothing"):
        merge(tmp_path, MEASURED, tmp_path)
    results.write(Result.of(all_cases(ON_CPU)[1], "cpu", facts={"machine": "B"}))
    with pytest.raises(ValueError, match="results of 2 machines"):
        merge(tmp_path, tmp_path / "measured", tmp_path)


def test_every_result_that_is_kept_is_of_a_gpu_and_can_be_read():
    for folder in MEASURED.glob("*"):
        for name, one in kept(folder).items():
            assert (one.device, one.case) == ("cuda", name)
            assert folder_of(one.facts["machine"]) == folder.name
            assert json.loads((folder / f"{name}.json").read_text())["rental"]
