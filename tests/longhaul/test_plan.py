# SPDX-License-Identifier: Apache-2.0
"""`longhaul plan`: a page, a bill, JSON, a picture, and refusals in one sentence."""

import json

import pytest

PLAN = ("plan", "llama31_8b", "--seq", "1M", "--nodes", "4")


def test_the_page_has_layout_memory_time_limits_ranks_and_the_next_best(answer):
    code, shown, said = answer(*PLAN)
    assert code == 0, said
    assert "llama31_8b at 1M tokens on 32 GPUs of dgx_h100" in shown
    for part in ("layout: ", "memory of a rank", "a step, ", "MFU", "limits: ", "ranks: ",
                 "the next best", "GPU-hours"):  # fmt: skip
        assert part in shown


def test_memory_and_time_add_up_in_json(answer):
    code, shown, _ = answer(*PLAN, "--json", "--tokens", 2_000_000_000)
    assert code == 0
    found = json.loads(shown)
    assert len(found["plans"]) == 4
    for one in found["plans"]:
        assert sum(one["memory_bytes"].values()) == pytest.approx(one["memory_total_bytes"])
        assert sum(one["time_seconds"].values()) == pytest.approx(one["step_seconds"])
        rate = found["tokens_per_batch"] / one["step_seconds"] / found["gpus"]
        assert one["tokens_per_second_per_gpu"] == pytest.approx(rate)
        assert one["gpu_hours"] == pytest.approx(2e9 / rate / 3600)
        assert one["limits"]["collective"] > one["step_seconds"]


def test_what_was_ruled_out_is_shown(answer):
    _, shown, _ = answer(*PLAN, "--why")
    assert "too little GPU memory" in shown


def test_the_longest_length_is_found(answer):
    code, shown, _ = answer("plan", "llama31_8b", "--max-seq")
    assert code == 0
    assert "the longest context that fits: 3584K tokens" in shown


def test_a_layout_of_one_s_own_is_planned_as_it_is(answer):
    words = "tp2 ring4 kept_attention tile-loss"
    code, shown, _ = answer("plan", "llama31_8b", "--seq", "64K", "--layout", words)
    assert code == 0
    assert f"layout: {words}" in shown
    assert "the next best" not in shown


def test_a_ladder_is_a_bill(answer):
    code, shown, _ = answer("plan", "llama3_8b", "--ladder", "prolong", "--nodes", "4", "--json")
    assert code == 0
    found = json.loads(shown)
    assert [one["stage"] for one in found["stages"]] == [
        "llama3_8b_prolong_64k", "llama3_8b_prolong_512k",
    ]  # fmt: skip
    assert found["gpu_hours"] == pytest.approx(sum(one["gpu_hours"] for one in found["stages"]))
    assert "llama3_8b_prolong_512k" in answer("plan", "--ladder", "prolong", "--nodes", 4).out


def test_a_picture_is_drawn(answer, tmp_path):
    code, _, said = answer("plan", "llama31_8b", "--seq", "64K", "--plot", "x.png")
    assert code == 0, said
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan",), "name a model card"),
        (("plan", "llama31_8b"), "--seq is missing"),
        (("plan", "llama31_8", "--seq", "64K"), "did you mean llama31_8b"),
        (("plan", "llama31_8b", "--seq", "64X"), "not 64X"),
        (("plan", "llama31_8b", "--seq", "64K", "--cluster", "dgx_h10"), "did you mean dgx_h100"),
        (("plan", "llama31_8b", "--ladder", "prolongg"), "did you mean prolong"),
        (("plan", "--ladder", "nemo"), "name one: longhaul plan llama3_8b --ladder nemo"),
        (("plan", "llama31_8b", "--seq", "16M"), "GPUs would do, or these GPUs reach"),
        (("plan", "llama31_405b", "--seq", "8K"), "GiB of GPU memory"),
        (("plan", "llama31_8b", "--seq", "64K", "--fp8", "int8"), "--fp8 is 'int8'"),
        (("plan", "llama31_8b", "--seq", "64K", "--fp8", "tensorwise", "--cluster", "dgx_a100"),
         "has no FP8"),
        (("plan", "llama31_8b", "--seq", "64K", "--layout", "tp2"), "has 2 ranks and 8 GPUs"),
        (("plan", "llama31_8b", "--seq", "64K", "--layout", "dp8"), "the nearest lacks"),
        (("plan", "llama31_8b", "--seq", "64K", "--plot", "x.pdf"), "is not a .png file"),
        (("plan", "llama31_8b", "--seq", "64K", "--tokens-per-batch", "100K"),
         "no whole number of sequences"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_a_mistake_is_one_sentence(answer, words, said):
    assert said in answer(*words).error()
