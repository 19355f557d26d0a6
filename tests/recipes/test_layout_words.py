# SPDX-License-Identifier: Apache-2.0
import pytest

from custom_modules.activation_memory import Offload, Recompute, Tiling
from recipes.collection import ROWS
from recipes.layout import ContextParallel, Fp8, Layout
from recipes.layout_words import layout_from, words_of


def test_every_word_is_what_it_says():
    words = "tp2 hybrid4x8/8 pp2 dp3 mb2 kept_attention tile-loss tile-mlp offload-both:64.5"
    assert layout_from(words) == Layout(
        tp=2,
        cp=ContextParallel.hybrid(ulysses=4, ring=8, heads_per_stage=8),
        pp=2,
        dp=3,
        micro_batch=2,
        recompute=Recompute(kind="kept_attention"),
        tiling=Tiling(loss=True, mlp=True),
        offload=Offload(tensors="both", cap_gib=64.5),
    )
    assert layout_from("selective:core_attn,mlp zero3 fp8:tensorwise") == Layout(
        recompute=Recompute(kind="selective", modules=["core_attn", "mlp"]),
        sharding="parameters",
        fp8=Fp8(recipe="tensorwise"),
    )


@pytest.mark.parametrize("name", ROWS)
def test_the_words_of_a_layout_say_all_of_it(name):
    layout = ROWS[name].layout
    assert layout_from(words_of(layout)) == layout


def test_one_rank_has_words_too():
    assert words_of(Layout()) == "one rank"


def test_a_word_that_says_nothing_is_refused():
    with pytest.raises(ValueError, match="'tpp2' says nothing of a layout"):
        layout_from("tpp2")
