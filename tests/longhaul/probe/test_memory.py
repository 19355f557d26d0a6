# SPDX-License-Identifier: Apache-2.0
"""`longhaul probe memory`: a step of a recipe by category, and refusals before any rank starts."""

import copy
from pathlib import Path

import pytest

from custom_modules.profiling.categories import CATEGORIES
from longhaul.probe import memory
from recipes.shipped.table import ROWS
from tests.recipes.support.chosen_rows import card_and_layout, chosen

TINY = ("probe", "memory", "--factory", "tiny_512")
KEEP = ("model.config.recompute.kind=kept_attention", "model.config.tiling.mlp=True")


@pytest.mark.slow
def test_a_step_is_shown_by_cause_with_the_settings_it_ran_under(answer, monkeypatch):
    measured = []
    measure = memory.measure_on_ranks

    def kept(ranks: int, recipe: Path, device: str):
        measured.extend(measure(ranks, recipe, device))
        return measured

    monkeypatch.setattr(memory, "measure_on_ranks", kept)
    code, shown, said = answer(*TINY, "--shrink", "--layers", 2, "--seq", 128, *KEEP)
    assert code == 0, said
    assert "on 2 cpu ranks: 2 layers of 128, 128 tokens x 4, 1 of 1 micro-batches" in shown
    assert "recompute kept_attention, tiling mlp, offload none, cp ulysses" in shown
    lines = [line[1:].strip() for line in shown.splitlines()]
    rows = [name for line in lines for name in CATEGORIES if line.startswith(f"{name} ")]
    assert rows == list(CATEGORIES)
    assert len(measured) == 2
    for one in measured:
        assert sum(one.at_peak.values()) == one.peak_bytes
        # Tied embeddings, two layers, three kinds of norm; fp32 weights and gradients alike.
        parameters = 512 * 128 + 2 * (128 * 32 * 2 * (4 + 2) + 3 * 128 * 384 + 2 * 128) + 128
        for name in ("weights", "gradients", "optimizer"):  # two moments over two data ranks
            assert one.at_peak[name] == pytest.approx(4 * parameters, rel=0.01)
        tokens = 128 * 4
        assert one.most["saved inputs"] == 2 * tokens * 4 * (128 + 4 * (32 + 1))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*TINY[:-1], "tiny_51"), "did you mean tiny_512"),
        ((*TINY, "--device", "tpu"), "cpu or cuda"),
        ((*TINY, "--device", "cuda"), "laid out for CPU ranks"),
        ((*TINY, "--hidden", 48), "does not divide the widths"),
        ((*TINY, "--layers", 3, "trainer.strategy.pipeline_model_parallel_size=2"), "PP 2"),
        ((*TINY, "model.config.num_layer=3"), "did you mean model.config.num_layers"),
        ((*TINY, "trainer.devices=512", "data.global_batch_size=2048",
          "trainer.callbacks[0].tokens_per_batch=1048576"), "leaves out its data parallelism"),
        (("probe", "memory", "--factory", "llama31_8b_nemo_16k"), "add --shrink"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value)),
)  # fmt: skip
def test_what_cannot_be_probed_is_one_sentence(answer, monkeypatch, words, said):
    def no_ranks(*_: object):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(memory, "measure_on_ranks", no_ranks)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("custom_modules.memory.pinned_pool.host_memory_left", lambda: 8 * 2**30)
    code, shown, answered = answer(*words)
    assert code == 2, answered
    errors = [line for line in answered.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, answered
    assert said in errors[0]
    assert not shown


# Blocks of FP8 do not divide what is made small, and the CPUs of a laptop have none.
@pytest.mark.parametrize(
    "name", chosen(card_and_layout, [row for row in ROWS.values() if row.variant != "fp8"])
)
def test_a_recipe_shrinks_with_its_structure_and_within_a_laptop(name):
    from longhaul.probe import resize
    from recipes.resolved.read import world_size
    from recipes.shipped.factories import recipe_named
    from recipes.spec.pipeline import divides, is_uneven

    recipe = recipe_named(name)
    whole = copy.copy(recipe.model.config)
    resize.resized(recipe, shrunk=True, seq=0, layers=0, hidden=0)
    config, strategy = recipe.model.config, recipe.trainer.strategy
    assert config.num_attention_heads == whole.num_attention_heads
    assert config.num_query_groups == whole.num_query_groups
    assert config.ffn_hidden_size / config.hidden_size == pytest.approx(
        whole.ffn_hidden_size / whole.hidden_size
    )
    pp = strategy.pipeline_model_parallel_size
    assert is_uneven(config.num_layers, pp) == is_uneven(whole.num_layers, pp)
    assert divides(pp, config.num_layers)
    started = min(world_size(recipe), 2 * memory.RANKS_PER_CORE)  # more are refused
    assert resize.about_bytes(recipe) * started < 2 * 2**30


def test_experts_count_in_the_memory_of_a_step_by_their_own_groups():
    from longhaul.probe import resize
    from recipes.shipped.factories import recipe_named

    recipe = recipe_named("mixtral_8x7b_nemo_64k")
    strategy = recipe.trainer.strategy
    strategy.pipeline_model_parallel_size = 1
    strategy.expert_tensor_parallel_size = 1
    found = []
    for strategy.expert_model_parallel_size in (4, 8):
        found.append(resize.about_bytes(recipe))
    weights = 32 * 8 * 3 * 4096 * 14_336  # of all experts, whose optimizer is whole over the ranks
    assert found[0] - found[1] == pytest.approx((weights / 4 - weights / 8) * 6, rel=1e-3)
