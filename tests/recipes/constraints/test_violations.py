# SPDX-License-Identifier: Apache-2.0
import re
from dataclasses import replace

import pytest

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.memory.config import Offload, Recompute, Tiling
from custom_modules.rope.config import RopeScaling
from recipes.constraints import fp8 as fp8_constraints
from recipes.constraints import memory, schedule, shapes, violations
from recipes.constraints import rope as rope_constraints
from recipes.constraints import sharding as sharding_constraints
from recipes.constraints.training_step import TrainingStep
from recipes.spec.layout import Fp8, Layout
from recipes.spec.units import K

FITS = TrainingStep(
    seq_length=8192, heads=32, kv_heads=8, head_dim=128, hidden=4096, ffn_hidden=14_336, layers=32,
    vocab=128_256, tp=2, cp=4, cp_kind=ContextParallelKind(kind="ulysses"), pp=2, world_size=64,
    ranks_per_node=8, global_batch=64, micro_batch=2,
)  # fmt: skip
RING = ContextParallelKind(kind="ring")
SCHEDULE = {"max_steps": 100, "lr": 1e-5}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tp": 1, "cp": 1, "pp": 1, "world_size": 1},
        {"tp": 1, "cp": 1, "pp": 1, "world_size": 1, "seq_length": 8191},
        {"tp": 1, "cp": 8, "world_size": 16},
        {"tp": 8, "cp": 1, "world_size": 16},
        {"global_batch": 8},
        {"kv_heads": 6, "cp": 8, "world_size": 128, "global_batch": 128, "cp_kind": RING},
        {"cp": 8, "world_size": 128, "global_batch": 128},
    ],
    ids=str,
)
def test_numbers_that_fit_violate_no_constraint(change):
    assert list(shapes.violations(replace(FITS, **change))) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 24}, "world size 24 .* TP 2 x CP 4 x PP 2 = 16 ranks"),
        ({"world_size": 8}, "world size 8 .* a multiple of 16"),
        ({"seq_length": 8196}, r"length 8,196 is not divisible by 2 x CP = 8, .* 8,192 would do"),
        (
            {"seq_length": 8188, "cp": 2, "tp": 4},
            r"length 8,188 over CP 2 is not divisible by TP 4, .*; 8,176 would do",
        ),
        ({"heads": 33}, "33 heads and 8 KV heads are not both divisible by TP 2; TP may be 1 only"),
        ({"kv_heads": 1}, "32 heads and 1 KV heads .* TP 2"),
        ({"tp": 16, "cp": 1, "world_size": 32}, "divisible by TP 16; TP may be 1, 2, 4 or 8"),
        (
            {"kv_heads": 6, "cp": 8, "world_size": 128, "global_batch": 128},
            "CP 8 as ulysses .* 16 heads and 3 KV heads on each TP rank.* For CP 8 take ring",
        ),
        (
            {"cp_kind": ContextParallelKind(kind="hybrid", ulysses=3)},
            "ulysses 3 does not divide CP 4; it may be 1, 2 or 4",
        ),
        (
            {"cp_kind": ContextParallelKind(kind="head_chunked", heads_per_stage=6)},
            "heads_per_stage 6 .* it may be 4, 8 or 16",
        ),
        (
            {"layers": 33},
            "33 layers are not divisible by PP 2, nor are 35 .*; PP may be 1, 3, 5, 7, 11 or 33",
        ),
        (
            {"layers": 126, "pp": 8, "ends_count": False},
            "126 layers on PP 8 are not divisible by it, .* do not count as layers; set "
            "trainer.strategy.account_for_embedding_in_pipeline_split=true and ",
        ),
        ({"ends_count": True}, "32 layers on PP 2 are divisible by it, .*_pipeline_split=false"),
        (
            {"global_batch": 4},
            "batch of 4 sequences .* micro-batch 2 x DP 4; .* multiple of 65,536 tokens",
        ),
        ({"micro_batch": 3}, "micro-batch 3 x DP 4"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_violated_constraint_is_one_sentence_with_the_value_and_what_would_do(change, words):
    (sentence,) = shapes.violations(replace(FITS, **change))
    assert re.search(words, sentence)


def test_a_vocabulary_that_tensor_parallelism_does_not_divide_violates_no_constraint():
    assert list(violations.violations(replace(FITS, vocab=128_257))) == []


def test_every_violated_constraint_is_told_at_once():
    assert len(list(shapes.violations(replace(FITS, heads=33, layers=3, global_batch=1)))) == 3


def test_a_schedule_that_fits_violates_no_constraint():
    assert list(schedule.violations(**SCHEDULE)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_steps": 0}, "max_steps is 0"),
        ({"lr": 0.0}, "the learning rate is 0;"),
        ({"lr": 3.0}, "the learning rate is 3; it must lie between 0 and 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_schedule_that_cannot_run_is_told(change, words):
    (sentence,) = schedule.violations(**SCHEDULE | change)
    assert words in sentence


@pytest.mark.parametrize("name", ["tp", "cp", "pp", "world_size", "micro_batch", "seq_length"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_a_sentence_not_a_crash(name, size):
    (sentence,) = shapes.violations(replace(FITS, **{name: size}))
    assert f"{size}; it must be at least 1" in sentence


KEPT = Recompute(kind="kept_attention")
# A layer keeps 64 MiB of input and 130 MiB of attention: 2^16 tokens x 8 heads x 260 bytes.
MEMORY = TrainingStep(
    seq_length=64 * K, heads=16, kv_heads=16, head_dim=128, hidden=1024, ffn_hidden=4096, layers=16,
    vocab=512, tp=2, cp_kind=ContextParallelKind(kind="ulysses"), pp=2, world_size=4,
    ranks_per_node=4, global_batch=4, recompute=KEPT, tiling=Tiling(loss=True, mlp=True),
    offload=Offload(tensors="both", cap_gib=3.5),
)  # fmt: skip
HEAD_CHUNKED = ContextParallelKind(kind="head_chunked")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"recompute": Recompute(kind="selective", modules=["core_attn"]), "offload": Offload()},
        {"recompute": Recompute(kind="block", layers=8), "offload": Offload()},
        {"cp_kind": HEAD_CHUNKED},
    ],
    ids=str,
)
def test_what_layers_keep_may_be(change):
    assert list(memory.violations(replace(MEMORY, **change))) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"offload": Offload(tensors="both", cap_gib=3)},
            r"needs 3\.03 GiB .* on a rank \(8 layers, 2 micro-batches .* cap_gib is 3;",
        ),
        ({"pp": 4, "layers": 32, "world_size": 8}, r"needs 6\.06 GiB .* 4 micro-batches"),
        ({"recompute": Recompute()}, "offload both moves what recompute full or kept_attention"),
        ({"recompute": Recompute(kind="full")}, "keeps no attention output"),
        (
            {"cp_kind": ContextParallelKind(kind="p2p")},
            "kept_attention and the context parallel kind p2p",
        ),
        (
            {
                "cp_kind": ContextParallelKind(kind="a2a"),
                "recompute": Recompute(kind="full", every=2, others=KEPT.kind),
            },
            "kept_attention and the context parallel kind a2a",
        ),
        (
            {"recompute": Recompute(kind="block", layers=9), "offload": Offload()},
            "layers is 9, and a pipeline stage has 8",
        ),
        (
            {"recompute": Recompute(kind="uniform", layers=3), "offload": Offload()},
            "groups of 3 layers, and pipeline stages have 8; take a number that divides",
        ),
        (
            {
                "recompute": Recompute(kind="uniform", layers=2),
                "offload": Offload(),
                "layers": 14,
                "pp": 4,
                "world_size": 8,
            },
            "groups of 2 layers, and pipeline stages have 3 and 4;",
        ),
        (
            {"recompute": Recompute(kind="selective", modules=["mlp"]), "offload": Offload()},
            "modules include mlp, and tiling mlp",
        ),
        (
            {
                "recompute": Recompute(kind="selective", modules=["core_attn"]),
                "offload": Offload(),
                "cp_kind": HEAD_CHUNKED,
            },
            "head-chunked attention keeps no queries",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_layers_cannot_keep_is_one_sentence(change, words):
    (sentence,) = memory.violations(replace(MEMORY, **change))
    assert re.search(words, sentence)


def test_a_tile_is_noted_where_a_rank_has_fewer_tokens():
    tiling = Tiling(loss=True, loss_tile=2 * K, mlp=True, mlp_tile=2 * K)
    assert list(memory.clamped_tiles(tiling, tokens=4 * K, tp=2)) == []
    (note,) = memory.clamped_tiles(tiling, tokens=2 * K, tp=2)
    assert "mlp_tile is 2,048 tokens and a rank has 1,024" in note
    assert list(memory.clamped_tiles(Tiling(), tokens=1, tp=1)) == []


@pytest.mark.parametrize(
    ("sharding", "change", "words"),
    [
        ("parameters", {"pp": 2}, "sharding parameters .* PP is 2; take PP 1"),
        ("gradients", {"vocab": 32_003}, "vocabulary of 32,003, which TP 2 does not divide"),
        ("optimizer", {"optimizer_offload": -0.5}, r"is -0\.5; it is a fraction"),
        ("none", {"optimizer_offload": 1.0}, "is 1 with sharding none; .* take sharding optimizer"),
        ("gradients", {"optimizer_offload": 0.5}, r"0\.5 with sharding gradients"),
        ("optimizer", {"optimizer_offload": 0.5, "precision_aware": False}, "set that too"),
        ("parameters", {"tiling": Tiling(loss=True)}, "parameters with tiling loss"),
        ("gradients", {"tiling": Tiling(mlp=True)}, "after its first tile"),
        ("gradients", {"cp_kind": HEAD_CHUNKED}, "gradients with head-chunked attention"),
    ],
)
def test_sharding_that_cannot_be_is_one_sentence(sharding, change, words):
    fits = replace(FITS, sharding=sharding, pp=1)
    assert list(sharding_constraints.violations(fits)) == []
    (sentence,) = sharding_constraints.violations(replace(fits, **change))
    assert re.search(words, sentence)


FP8 = TrainingStep(
    seq_length=32 * K, heads=16, kv_heads=4, head_dim=128, hidden=4096, ffn_hidden=7168, layers=32,
    vocab=512, pp=4, world_size=4, ranks_per_node=4, global_batch=4, tiling=Tiling(mlp=True),
)  # fmt: skip


@pytest.mark.parametrize("recipe", ["none", "tensorwise", "blockwise", "mxfp8"])
def test_fp8_that_fits_violates_no_constraint(recipe):
    step = replace(FP8, fp8=Fp8(recipe=recipe))
    chunked = replace(step, cp_kind=HEAD_CHUNKED, head_dim=104)  # 2,496 rows, projected in bf16
    assert list(fp8_constraints.violations(step)) == []
    assert list(fp8_constraints.violations(chunked)) == []


@pytest.mark.parametrize(
    ("fp8", "change", "words"),
    [
        (Fp8(recipe="mxfp8"), {"on_cpu": True}, "mxfp8 does not compute on cpu"),
        (Fp8(recipe="mxfp8"), {"bf16": False}, "needs precision bf16"),
        (Fp8(recipe="mxfp8"), {"transformer_engine": False}, "runs without it"),
        (Fp8(recipe="mxfp8", bf16_last=9), {}, "bf16_last 9: each is at most the 8 layers"),
        (Fp8(recipe="delayed"), {}, "delayed with tiling mlp: .* one call of a module per step"),
        (Fp8(recipe="delayed", bf16_first=1), {"tiling": Tiling()}, "delayed with bf16_first 1"),
        (Fp8(recipe="tensorwise"), {"hidden": 4104}, "of 16, and the hidden size are 4,104; 4,096"),
        (
            Fp8(recipe="mxfp8"),
            {"ffn_hidden": 7184},
            "of 32, and the FFN rows of a TP rank are 7,184",
        ),
        (
            Fp8(recipe="blockwise"),
            {"head_dim": 97, "cp_kind": HEAD_CHUNKED},
            "of 128, and the query rows .* 1,552; 1,536 would",
        ),
        (Fp8(recipe="blockwise"), {"head_dim": 104}, "the QKV rows .* are 2,496; 2,432 would"),
        (
            Fp8(recipe="blockwise"),
            {"seq_length": 100},
            "the tokens of a rank are 100; 128 would do",
        ),
        (Fp8(recipe="tensorwise"), {"micro_batch": 3}, "tokens of an MLP tile are 8,190"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_fp8_that_cannot_be_is_one_sentence(fp8, change, words):
    (sentence,) = fp8_constraints.violations(replace(FP8, fp8=fp8, **change))
    assert re.search(words, sentence)


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "words"),
    [
        ("none", (7, 0), (11, 8), None),
        ("delayed", (8, 9), (12, 1), None),
        ("delayed", (8, 9), (11, 8), "needs CUDA 12.1 on Ada"),
        ("tensorwise", (8, 0), (12, 9), "needs 8.9 .* compute capability 8.0; leave fp8 out"),
        ("tensorwise", (12, 0), (12, 9), None),
        ("blockwise", (9, 0), (12, 9), None),
        ("blockwise", (9, 0), (12, 10), None),
        ("blockwise", (9, 0), (12, 8), "CUDA 12.9, and .* 9.0 and CUDA 12.8; take tensorwise"),
        ("blockwise", (8, 9), (13, 0), "needs 9.0"),
        ("blockwise", (10, 0), (13, 0), None),
        ("mxfp8", (9, 0), (12, 9), "needs 10.0 .* 9.0; take tensorwise or blockwise"),
        ("mxfp8", (10, 3), (12, 9), None),
        ("mxfp8", (12, 0), (13, 0), "needs 10.x, and .* 12.0"),
    ],
)
def test_a_device_computes_an_fp8_recipe_or_is_told_why_not(recipe, capability, cuda, words):
    why = fp8_constraints.refusal(recipe, capability, cuda)
    assert why is None if words is None else re.search(words, why)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Fp8(recipe="nvfp4"), "'nvfp4' is unknown; choose none, delayed, tensorwise"),
        (lambda: Fp8(bf16_first=1), "bf16_first is 1 layers, but without fp8 all compute in bf16"),
        (lambda: Fp8(recipe="mxfp8", bf16_last=-1), "bf16_last is -1 layers"),
        (lambda: Layout(sharding="zero3"), "'zero3' is unknown; choose none, optimizer, gradients"),
        (lambda: Layout(device="cpu", optimizer_offload=0.5), r"is 0\.5 on cpu, where the optim"),
    ],
    ids=["recipe", "no fp8", "negative", "sharding", "cpu"],
)
def test_a_layout_without_meaning_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


DYNAMIC = RopeScaling.dynamic(base=10_000, factor=4.0, original_length=512)
LONGROPE = RopeScaling(
    method="longrope", base=10_000, factor=4.0, original_length=512, short_factor=[1.0],
    long_factor=[4.0],
)  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "documents", "refused"),
    [
        (DYNAMIC, "across", False),
        (DYNAMIC, "within", True),
        (LONGROPE, "within", True),
        (replace(LONGROPE, short_factor=[4.0]), "within", False),
        (RopeScaling.base_change(10_000), "within", False),
    ],
)
def test_a_rotation_by_length_is_refused_where_documents_are_apart(rope, documents, refused):
    found = list(rope_constraints.violations(rope, documents=documents))
    assert ["depends on the sequence length" in sentence for sentence in found] == [True] * refused


def test_all_constraints_of_a_step_are_asked_at_once():
    assert list(violations.violations(FITS)) == []
    wrong = replace(FITS, sharding="parameters", fp8=Fp8(recipe="mxfp8"), bf16=False)
    told = list(violations.violations(wrong))
    assert len(told) == 2
    assert "PP is 2" in told[0]
    assert "needs precision bf16" in told[1]


def test_sizes_that_do_not_fit_end_the_other_constraints():
    (told,) = violations.violations(replace(FITS, heads=33, sharding="parameters"))
    assert "33 heads" in told


@pytest.mark.parametrize("change", [{"tiling": Tiling(mlp=True)}, {"fp8": Fp8(recipe="mxfp8")}])
def test_experts_compute_neither_in_tiles_nor_in_fp8(change):
    (told,) = violations.violations(replace(FITS, experts=8, **change))
    assert "has experts, which support neither a tiled MLP" in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ep": 2}, "EP is 2 and ETP 2, but the model has no experts; leave both out"),
        ({"etp": 1}, "EP is 1 and ETP 1, but the model has no experts"),
        ({"experts": 8, "ep": 3}, "8 experts are not divisible by EP 3; EP may be 1, 2, 4 or 8"),
        ({"experts": 8, "etp": 3}, r"FFN rows of an expert .* by ETP 3; ETP may be 1 or 2"),
        (
            {"experts": 64, "ep": 32},
            r"EP 32 x ETP 2 = 64 ranks do not divide the 32 .* \(TP 2 x CP 4 x DP 4\); EP may be "
            "1, 2, 4, 8 or 16",
        ),
        ({"experts": 8, "ep": 0}, "EP is 0; it must be at least 1"),
    ],
    ids=str,
)
def test_experts_that_the_ranks_do_not_divide_are_one_sentence_each(change, words):
    assert re.search(words, next(shapes.violations(replace(FITS, **change))))


def test_experts_divided_in_every_way_that_fits_violate_nothing():
    for ep, etp in ((1, None), (8, None), (16, 2), (32, 1), (1, 1), (4, 4)):
        fits = replace(FITS, experts=64, ep=ep, etp=etp)
        assert list(violations.violations(fits)) == [], (ep, etp)


def test_megatron_fsdp_divides_no_experts():
    told = list(
        violations.violations(replace(FITS, pp=1, sharding="parameters", experts=8, ep=2, etp=1))
    )
    assert any("parameters with EP 2 and ETP 1: Megatron FSDP" in one for one in told)
