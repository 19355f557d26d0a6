# SPDX-License-Identifier: Apache-2.0
"""A layout as Python source: it makes the layout again, and `ruff format` leaves it as it is."""

import subprocess
import sys

import pytest

from custom_modules.memory.config import Offload, Recompute, Tiling
from recipes.notation.python_source import formatted, layout_call
from recipes.shipped.table import ROWS
from recipes.spec.layout import ContextParallel, Fp8, Layout
from tests.recipes.support.rows_to_rehearse import ROWS_TO_REHEARSE

NAMES = {
    made.__name__: made
    for made in (ContextParallel, Fp8, Layout, Offload, Recompute, Tiling)
}  # fmt: skip
WIDE = Layout(
    tp=16, cp=ContextParallel.hybrid(ulysses=64, ring=128, heads_per_stage=64), pp=16, dp=1024,
    micro_batch=4, recompute=Recompute(kind="selective", modules=["core_attn", "mlp"]),
    tiling=Tiling(loss=True, mlp=True, loss_tile=1024, mlp_tile=2048),
    offload=Offload(), sharding="gradients", optimizer_offload=0.25, precision="bf16",
    fp8=Fp8(recipe="blockwise", bf16_first=1, bf16_last=2),
)  # fmt: skip
LAYOUTS = {name: row.layout for name, row in {**ROWS, **ROWS_TO_REHEARSE}.items()} | {
    "nothing but defaults": Layout(),
    "every field": WIDE,
    "ring": Layout(cp=ContextParallel.ring(4)),
    "auto": Layout(cp=ContextParallel.auto(8)),
    "Transformer Engine": Layout(cp=ContextParallel.transformer_engine("all_gather", 2)),
    "both of its levels": Layout(cp=ContextParallel.transformer_engine_hybrid(a2a=4, p2p=2)),
}


def layout_of(source: str) -> Layout:
    """Return what the source of a layout makes."""
    names = dict(NAMES)
    exec(f"layout = {source}", names)
    return names["layout"]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_source_of_a_layout_makes_it_again(layout):
    assert layout_of(formatted(layout_call(layout))) == layout
    assert layout_of(str(layout_call(layout))) == layout


def test_fields_that_have_their_default_are_left_out():
    assert str(layout_call(Layout(tp=2, cp=ContextParallel.ulysses(4)))) == (
        "Layout(tp=2, cp=ContextParallel.ulysses(4))"
    )
    assert str(layout_call(Layout())) == "Layout()"


def test_source_is_formatted_as_ruff_does():
    rows = "".join(
        f"row_{number} = Row(\n    name={name!r},\n".replace("'", '"')
        + formatted(layout_call(layout), before="layout=", after=",", indent=4)
        + "\n)\n"
        for number, (name, layout) in enumerate(LAYOUTS.items())
    )
    ruff = [sys.executable, "-m", "ruff", "format", "--line-length", "100", "-"]
    done = subprocess.run(ruff, input=rows, capture_output=True, text=True, check=True)
    assert done.stdout == rows
