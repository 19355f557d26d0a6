# SPDX-License-Identifier: Apache-2.0
"""Constraints of layers that differ, and the layouts that a search then leaves out."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from custom_modules.context_parallel.config import TRANSFORMER_ENGINE_KINDS, ContextParallelKind
from custom_modules.rope.layers import LayerPattern
from recipes.constraints import layers, violations
from recipes.models import CARDS
from recipes.planner.search.parallel_sizes import parallel_sizes
from recipes.spec.units import K
from tests.recipes.constraints.test_violations import FITS
from tests.recipes.planner.search.questions import question

WINDOWS = LayerPattern(every=4, window=4096)
OLMO3 = replace(FITS, pattern=WINDOWS, tp=1, cp=1, global_batch=128)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_stages_with_the_same_number_of_full_layers_are_no_violation(pp: int):
    assert list(violations.violations(replace(OLMO3, pp=pp))) == []


def test_a_pipeline_that_cuts_the_pattern_is_refused_with_the_sizes_that_do_not():
    (said,) = violations.violations(replace(OLMO3, pp=16, world_size=64))
    assert re.fullmatch(
        r"PP 16 cuts the pattern \(full attention in every 4th layer; .* 4,096 tokens\): its "
        r"stages have 0 or 1 full layers, .*; PP may be 1, 2, 4, 8",
        said,
    )


def test_sizes_that_divide_the_layers_and_cut_the_pattern_are_not_proposed():
    (said,) = violations.violations(replace(OLMO3, layers=8, pp=3, world_size=12))
    assert said.endswith("PP may be 1 or 2")
    (said,) = violations.violations(replace(OLMO3, layers=8, pp=3, world_size=12, pattern=None))
    assert said.endswith("PP may be 1, 2, 4, 5 or 8")


def test_an_interleaved_pipeline_that_cuts_the_pattern_is_refused():
    given = replace(OLMO3, pp=4, vpp=8, global_batch=128)
    (said,) = violations.violations(given)
    assert said.startswith("PP 4 x VPP 8 cuts the pattern")
    assert list(violations.violations(replace(given, vpp=2))) == []


@pytest.mark.parametrize(
    "pattern",
    [LayerPattern(every=4, full_rotates=False), LayerPattern(every=4, window=8192)],
    ids=["no window", "longer than the sequence"],
)
def test_a_pattern_whose_layers_take_the_same_time_may_be_cut(pattern: LayerPattern):
    assert list(violations.violations(replace(OLMO3, pp=16, pattern=pattern))) == []


@pytest.mark.parametrize("kind", TRANSFORMER_ENGINE_KINDS)
def test_a_window_is_refused_with_transformer_engines_kinds(kind: str):
    inner = {"ulysses": 2} if "+" in kind else {}
    step = replace(OLMO3, cp=4, cp_kind=ContextParallelKind(kind=kind, **inner))
    (said,) = layers.violations(step)
    assert said == (
        f"local layers have a window of 4,096 tokens and the context parallel kind is {kind}, "
        "which is Transformer Engine's and has no window here; take ring, ulysses, head_chunked "
        "or hybrid"
    )
    assert list(layers.violations(replace(step, pattern=None))) == []


@pytest.mark.parametrize(
    "kind",
    [
        ContextParallelKind(kind="head_chunked"),
        ContextParallelKind(kind="hybrid", ulysses=2, heads_per_stage=16),
    ],
    ids=lambda kind: kind.kind,
)
def test_norms_of_all_heads_at_once_are_refused_with_a_few_heads_at_a_time(kind):
    step = replace(OLMO3, cp=4, cp_kind=kind, world_size=64)
    assert list(violations.violations(step)) == []
    (said,) = violations.violations(replace(step, wide_qk_norm=True))
    assert "take ulysses, ring, or hybrid without heads_per_stage" in said


def test_a_search_tries_neither_what_cuts_the_pattern_nor_a_few_of_its_normalised_heads():
    asked = question(card=CARDS["olmo3_7b"], seq_length=64 * K, gpus=64)
    ruled_out: Counter[str] = Counter()
    found = list(parallel_sizes(asked, ruled_out))
    assert {layout.pp for layout in found} == {1, 2, 4, 8}
    assert ruled_out["PP 16 has stages with different numbers of full layers"]
    assert {layout.cp.how.kind for layout in found} == {"ulysses", "ring", "hybrid"}
    assert not any(layout.cp.how.heads_per_stage for layout in found)
    of_llama = list(parallel_sizes(replace(asked, card=CARDS["llama31_8b"]), Counter()))
    assert {layout.pp for layout in of_llama} == {1, 2, 4, 8, 16}
    assert "head_chunked" in {layout.cp.how.kind for layout in of_llama}
