# SPDX-License-Identifier: Apache-2.0
"""`longhaul plan`: a page, a bill, JSON, a picture, and refusals in one sentence."""

import json
import re
from pathlib import Path

import pytest

from data.splits import LengthBucket, Part, SourceFacts, Split, StoredFile
from data.store import Manifest, TokenizerFacts
from longhaul.pages.plan_plot import picture
from recipes.models import CARDS
from recipes.planner.search.ranking import search
from recipes.planner.search.request import SearchRequest
from recipes.spec import cluster
from recipes.spec.units import GiB, K

PLAN = ("plan", "llama31_8b", "--seq", "1M", "--nodes", "4")


def test_the_page_has_layout_memory_time_limits_ranks_and_the_next_best(answer):
    code, shown, said = answer(*PLAN)
    assert code == 0, said
    assert "llama31_8b at 1M tokens on 32 GPUs of dgx_h100" in shown
    for part in ("layout: ", "memory of a rank", "a step, ", "MFU", "a rank is considered hung",
                 "ranks: ", "the next best", "GPU-hours"):  # fmt: skip
        assert part in shown


def test_memory_and_time_add_up_in_json(answer):
    code, shown, _ = answer(*PLAN, "--json", "--tokens", "2B")
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


def test_the_kv_cache_of_the_length_is_told_and_is_in_json(answer):
    words = ("plan", "llama31_8b", "--seq", "128K")
    assert (
        "a sequence has a KV cache of 16.00 GiB in bf16 or 8.00 GiB in FP8; next to bf16 weights "
        "(TP 8) these GPUs hold 35 or 70 of them"
    ) in answer(*words).out
    for one in json.loads(answer(*words, "--json").out)["plans"]:
        assert one["serving"] == {
            "tensor_parallel": 8,
            "pipeline": 1,
            "kv_cache_bytes": {"bf16": 16 * GiB, "fp8": 8 * GiB},
            "sequences": {"bf16": 35, "fp8": 70},
        }
    large = ("plan", "llama31_405b", "--seq", "128K", "--nodes", "32")
    assert (
        "next to bf16 weights (TP 8, PP 2) these GPUs hold 96 or 192 of them" in answer(*large).out
    )


def test_what_was_ruled_out_is_shown(answer):
    _, shown, _ = answer(*PLAN, "--why")
    assert "too little GPU memory" in shown


def test_the_longest_length_is_found(answer):
    code, shown, _ = answer("plan", "llama31_8b", "--max-seq")
    assert code == 0
    assert "the longest context that fits: at least 4608K tokens" in shown
    assert "not proven: Adam on the host" in shown
    found = answer("plan", "llama31_8b", "--max-seq", "--json")
    longest = json.loads(found.out)["seq_length"]
    assert longest == 4608 * 1024
    power = 2 ** (longest.bit_length() - 1)
    assert answer("plan", "llama31_8b", "--seq", longest).code == 0
    assert answer("plan", "llama31_8b", "--seq", longest + power // 8).code != 0


def test_the_longest_length_of_a_layout_of_one_s_own(answer):
    words = "ulysses8 kept_attention tile-loss"
    shown = answer("plan", "llama31_8b", "--max-seq", "--layout", words).out
    assert f"layout: {words}" in shown
    longest = re.search(r"that fits: at least (\S+) tokens", shown)[1]
    assert answer("plan", "llama31_8b", "--seq", longest, "--layout", words).code == 0
    assert "lacks" in answer("plan", "llama31_8b", "--seq", "4M", "--layout", words).error()


def test_a_faster_layout_with_untried_parts_is_named_and_not_taken(answer):
    shown = answer("plan", "llama3_70b", "--seq", "2M", "--nodes", 8).out
    assert "layout: tp8 ring4 pp2 kept_attention tile-loss tile-mlp offload-both" in shown
    said = re.search(r"not taken: (hybrid8x8 .* zero3) takes (\d+)% less time, but (.*);", shown)
    assert int(said[2]) == 34
    assert said[3] == "Megatron FSDP could not read the weights of an import on an H100"
    found = json.loads(answer("plan", "llama3_70b", "--seq", "2M", "--nodes", 8, "--json").out)
    chosen, fastest, *others = found["plans"]
    assert (chosen["untried"], fastest["untried"]) == ([], ["Megatron FSDP"])
    assert not any(one["untried"] for one in others)
    assert fastest["layout"] == said[1]
    assert chosen["gpu_hours"] > 1.5 * fastest["gpu_hours"]


def test_a_leaner_layout_is_explained_and_the_fastest_can_be_asked_for(answer):
    question = ("plan", "llama31_8b", "--seq", "512K")
    shown = answer(*question).out
    assert re.search(r"leaner: it takes 20\.\d GiB less than the fastest .* .--tightest", shown)
    assert "-1.0%" in shown  # the fastest, among the next best
    tight = answer(*question, "--tightest").out
    assert "layout: ulysses4 dp2" in tight
    assert "leaner:" not in tight


def test_a_batch_that_divides_better_is_offered_with_its_gain(answer):
    question = ("plan", "llama31_8b", "--seq", "12K", "--nodes", "8")
    assert "320 sequences" in answer(*question).out
    shown = answer(*question, "--tokens-per-batch", 341 * 12 * 1024).out
    assert "faster: a batch of 320 sequences (-6% tokens)" in shown
    assert "--tokens-per-batch 3932160" in shown
    assert "more GPUs as data ranks" not in shown
    named = answer(*question, "--tokens-per-batch", 341 * 12 * 1024, "--layout", "tp8 ring8 full")
    assert "faster:" not in named.out  # it would be another layout's gain


def test_a_budget_and_its_cost_have_units(answer):
    shown = answer("plan", "llama31_8b", "--seq", "64K", "--tokens", "1.5T").out
    assert "1.5T tokens: " in shown
    assert re.search(r"cost [\d,]+ USD at the cluster file's 2.5 USD per GPU-hour", shown)
    found = json.loads(answer("plan", "llama31_8b", "--seq", "64K", "--json").out)["plans"][0]
    assert (found["cost"], found["currency"]) == (pytest.approx(2.5 * found["gpu_hours"]), "USD")
    assert "cost (USD)" in answer("plan", "--ladder", "prolong", "--nodes", 4).out


def test_one_gpu_may_be_asked_for(answer):
    shown = answer("plan", "llama32_1b", "--seq", "64K", "--gpus", 1).out
    assert "llama32_1b at 64K tokens on 1 GPU of dgx_h100" in shown


@pytest.mark.parametrize("name", cluster.names())
def test_a_small_model_has_a_layout_on_every_shipped_machine(answer, name):
    machine = cluster.load(name)
    fp8 = ["--fp8", "delayed"] if machine.gpu.fp8_tflops else []
    shown = answer("plan", "llama32_1b", "--seq", "32K", "--cluster", name, "--json", *fp8)
    found = json.loads(shown.out)
    assert found["plans"][0]["layout"].endswith("fp8:delayed") == bool(fp8)
    assert found["gpus"] == machine.gpus_per_node


def test_a_layout_of_one_s_own_is_planned_as_it_is(answer):
    words = "tp2 ring4 kept_attention tile-loss"
    code, shown, _ = answer("plan", "llama31_8b", "--seq", "64K", "--layout", words)
    assert code == 0
    assert f"layout: {words}" in shown
    assert "the next best" not in shown


def test_a_ladder_is_planned_with_the_facts_of_its_longest_stage(answer):
    words = "plan", "llama31_8b", "--ladder", "ultralong_4m", "--nodes", 32
    sentence = "8 KV heads are fewer than TP x CP = 128: Ulysses alone"
    assert sentence in answer(*words).err
    found = json.loads(answer(*words, "--json").out)["extension_facts"]
    assert any(sentence in fact["words"] for fact in found)


def test_a_ladder_is_a_bill(answer):
    code, shown, _ = answer("plan", "llama3_8b", "--ladder", "prolong", "--nodes", "4", "--json")
    assert code == 0
    found = json.loads(shown)
    assert [one["stage"] for one in found["stages"]] == [
        "llama3_8b_prolong_64k", "llama3_8b_prolong_512k",
    ]  # fmt: skip
    assert found["gpu_hours"] == pytest.approx(sum(one["gpu_hours"] for one in found["stages"]))
    assert "llama3_8b_prolong_512k" in answer("plan", "--ladder", "prolong", "--nodes", 4).out


def store_without_tokens(folder: Path) -> Path:
    """Write a store whose manifest lists documents of 8K tokens, and whose files are empty."""
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("train.bin", "train.idx", "tokenizer/tokenizer.json"):
        (folder / name).touch()
    files = [StoredFile(path=f"train.{end}", bytes=0, sha256="") for end in ("bin", "idx")]
    part = Part(
        source="documents", documents=100, tokens=900_000, longest=9_000, bins=(files[0],),
        lengths=(LengthBucket(at_least=8192, documents=100, tokens=900_000),), idx=files[1],
    )  # fmt: skip
    Manifest(
        root=folder, sources=(SourceFacts(name="documents", kind="documents", origin="here"),),
        heldout_fraction=0.1, seed=0, train=Split(parts=(part,)), heldout=Split(parts=(part,)),
        tokenizer=TokenizerFacts(name="t", fingerprint="f", vocab_size=300, eod_id=0), skipped={},
    ).write()  # fmt: skip
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("llama3_8b", "--ladder", "prolong", "--nodes", 4),  # each stage, or jobs of all
        ("llama3_8b", "--ladder", "prolong", "--nodes", 1),
        ("llama3_8b", "--seq", "64K", "--nodes", 1),
        ("llama3_8b", "--seq", "96K", "--nodes", 1),  # of a ladder of one's own
    ],
)
def test_the_commands_of_a_plan_name_its_store(answer, tmp_path, words):
    store = store_without_tokens(tmp_path / "my store")
    asked = answer("plan", *words, "--store", store, "--json")
    assert asked.code == 0, asked.err
    found = json.loads(asked.out)
    commands = [found["command"]] if found.get("command") else [
        stage["command"] for stage in found["stages"]
    ]  # fmt: skip
    assert commands
    assert all(f"--store '{store}'" in command for command in commands)
    shown = answer("plan", *words, "--store", store).out
    assert f"--store '{store}'" in shown
    assert "longhaul prepare" not in shown
    assert "--store" not in answer("plan", *words).out.replace("without --store", "")


def test_what_a_narrow_terminal_has_no_column_for_is_below_the_bill(answer, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    shown = answer("plan", "--ladder", "prolong", "--nodes", 4).out
    (line,) = re.findall(r"^llama3_8b_prolong_64k: .*", shown, re.M)
    assert re.fullmatch(r".*: layout \S+ .*; GiB \d+\.\d(; s/step [\d.]+)?(; MFU \d+%)?", line)


def test_a_picture_is_drawn(answer, tmp_path):
    code, shown, said = answer("plan", "llama31_8b", "--seq", "64K", "--plot", "x.png", "--json")
    assert code == 0, said
    assert json.loads(shown)["seq_length"] == 64 * 1024
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_rate_at_each_length_and_says_where_nothing_fits():
    machine = cluster.load("dgx_h100")
    asked = SearchRequest(
        card=CARDS["llama31_8b"], seq_length=5_000 * K, tokens_per_batch=5_000 * K,
        cluster=machine, gpus=8,
    )  # fmt: skip
    memory, time = picture(asked).axes
    rates = [text.get_text() for text in time.texts]
    lengths = [tick.get_text() for tick in time.get_xticklabels()]
    assert lengths[-3:] == ["4M", "5000K", "8M"]
    assert rates[-1] == "does not fit"
    fastest = search(asked.at_length(64 * K)).plans[0].time.tokens_per_gpu_second
    assert rates[lengths.index("64K")] == f"{fastest:,.0f}"
    tops = [bar.get_y() + bar.get_height() for bar in memory.patches]
    assert max(tops) <= machine.gpu.memory_gib < memory.get_ylim()[1]
    assert all(text.get_position()[1] < time.get_ylim()[1] for text in time.texts)


def test_the_picture_of_the_tightest_plans_is_of_the_fastest():
    asked = SearchRequest(
        card=CARDS["llama31_8b"], seq_length=512 * K, tokens_per_batch=4 * 1024 * K,
        cluster=cluster.load("dgx_h100"), gpus=8,
    )  # fmt: skip
    for tightest in (False, True):
        memory, _ = picture(asked, tightest=tightest).axes
        plan = search(asked, tightest=tightest).plans[0]
        tops = [bar.get_y() + bar.get_height() for bar in memory.patches]
        assert any(top == pytest.approx(plan.memory.total / GiB) for top in tops)
    lean, tight = (search(asked, tightest=one).plans[0].memory.total for one in (False, True))
    assert lean < tight


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
        (("plan", "llama31_8b", "--seq", "64K", "--layout", "dp8"),
         "GiB of GPU memory at 65,536 tokens; the planner would take tp2"),
        (("plan", "llama31_8b", "--seq", "64K", "--layout", "tp2 ring4 zero3 tile-loss"),
         "sharding parameters with tiling loss"),
        (("plan", "llama31_8b", "--seq", "1M", "--nodes", "8", "--layout", "tp2 ulysses4 dp8"),
         "a batch of 4 sequences of 1,048,576 tokens is not divisible by micro-batch 1 x DP 8"),
        (("plan", "llama31_8b", "--seq", "64K", "--nodes", "3", "--layout", "tp8 pp3"),
         "32 layers are not divisible by PP 3"),
        (("plan", "llama31_8b", "--seq", "64K", "--layout", "tp2 ulysses4 fp8:tensorwise",
          "--cluster", "dgx_a100"), "needs 8.9 (Ada)"),
        (("plan", "llama31_8b", "--seq", "64K", "--fp8", "mxfp8"), "needs 10.0 (Blackwell)"),
        (("plan", "llama31_8b", "--seq", "64K", "--fp8", "blockwise", "--cluster", "l40s"),
         "needs 9.0 (Hopper) and CUDA 12.9, and this device has compute capability 8.9"),
        (("plan", "llama31_8b", "--seq", "64K", "--fp8", "mxfp8", "--cluster", "rtx_4090"),
         "and this device has compute capability 8.9; take tensorwise"),
        (("plan", "llama31_8b", "--seq", "32K", "--cluster", "rtx_4090"),
         "no layout of llama31_8b at 32,768 tokens fits 2 GPUs of rtx_4090"),
        (("plan", "llama31_8b", "--seq", "64K", "--layout", "dp8", "--fp8", "tensorwise"),
         "--fp8 cannot go with --layout"),
        (("plan", "--ladder", "prolong", "--seq", "1M", "--plot", "y.png"),
         "--seq and --plot cannot go with --ladder"),
        (("plan", "llama31_8b", "--seq", "64K", "--layout", "dp8", "--tightest"),
         "--tightest cannot go with --layout"),
        (("plan", "llama31_8b", "--max-seq", "--seq", "64K"), "--seq cannot go with --max-seq"),
        (("plan", "llama31_8b", "--seq", "64K", "--gpus", "12"), "not a whole number of nodes"),
        (("plan", "llama31_8b", "--seq", "64K", "--gpus", "8", "--nodes", "2"),
         "leave one of --nodes and --gpus out"),
        (("plan", "llama31_8b", "--seq", "64K", "--tokens", "1G"), "as 1B, 0.5T, 400M"),
        (("plan", "llama31_8b", "--seq", "64K", "--layout", "offload-inputs dp8"),
         "has no GiB; write offload-inputs:64"),
        (("plan", "llama31_8b", "--seq", "64K", "--plot", "x.pdf"), "is not a .png file"),
        (("plan", "llama31_8b", "--seq", "64K", "--tokens-per-batch", "100K"),
         "not a whole number of sequences"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_a_mistake_is_one_sentence(answer, words, said):
    assert said in answer(*words).error()


def test_facts_that_make_a_context_hard_to_extend_are_notes_and_in_numbers(answer):
    code, _, said = answer("plan", "qwen3_8b", "--seq", "64K")
    assert code == 0
    assert "note: queries and keys are normalised (QK norm)" in said
    found = json.loads(answer("plan", "qwen3_8b", "--seq", "64K", "--json")[1])
    assert [fact["name"] for fact in found["extension_facts"]] == ["qk_norm"]
    code, _, said = answer("plan", "qwen3_8b", "--seq", "16K")  # within its native context
    assert (code, "normalised" in said) == (0, False)
