# SPDX-License-Identifier: Apache-2.0
import pytest

from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.notation.layout import layout_from, words_of
from recipes.shipped.table import ROWS
from recipes.spec.layout import ContextParallel, Fp8, Layout


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
    assert layout_from("tp2 pp4x2") == Layout(tp=2, pp=4, vpp=2)
    assert layout_from("tp4 dp4 ep8 etp1") == Layout(tp=4, dp=4, ep=8, etp=1)
    assert layout_from("selective:core_attn,mlp zero3 fp8:tensorwise") == Layout(
        recompute=Recompute(kind="selective", modules=["core_attn", "mlp"]),
        sharding="parameters",
        fp8=Fp8(recipe="tensorwise"),
    )


@pytest.mark.parametrize("name", ROWS)
def test_the_words_of_a_layout_say_all_of_it(name):
    layout = ROWS[name].layout
    assert layout_from(words_of(layout)) == layout


@pytest.mark.parametrize("words", ["tp4 dp4 ep8 etp1", "dp8 ep4", "tp2 etp1", "tp2 etp4 dp2",
                                   "tp2 ring2 pp4x2 dp2 mb2", "pp2x8", "pp1x2"])  # fmt: skip
def test_the_words_of_experts_and_chunks_are_written_as_they_are_read(words):
    assert layout_from(words_of(layout_from(words))) == layout_from(words)


def test_one_rank_has_words_too():
    assert words_of(Layout()) == "one rank"
    assert layout_from("one rank") == Layout()


@pytest.mark.parametrize(
    "word",
    ["tpp2", "ulysses4x2", "ring4/8", "hybrid4", "kept_attention:3", "tile-loss:5", "zero3:9",
     "offload-all:3", "fp8:int8", "fp8", "fp8:mxfp8:1", "tp2:3", "pp2x", "tp2x2"],
)  # fmt: skip
def test_a_word_that_says_nothing_is_refused_with_those_that_do(word):
    with pytest.raises(ValueError, match=f"'{word}' is not a layout setting; choose from tp2"):
        layout_from(f"dp8 {word}")


@pytest.mark.parametrize("words", ["tp2 tp4", "full kept_attention", "ulysses2 ring2"])
def test_a_thing_said_twice_is_refused(words):
    with pytest.raises(ValueError, match="again; leave one of them out"):
        layout_from(words)


@pytest.mark.parametrize("word", ["offload-both", "offload-inputs:x", "adam-on-host"])
def test_a_number_that_is_missing_is_asked_for(word):
    with pytest.raises(ValueError, match="a number after the colon"):
        layout_from(word)
