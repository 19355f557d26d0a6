# SPDX-License-Identifier: Apache-2.0
"""Layers with a window in the planner: pairs counted one by one, and sums written out."""

from dataclasses import replace

import pytest

from recipes.models import CARDS
from recipes.planner.documents import WHOLE, DocumentLengths, in_window
from recipes.planner.time import time
from recipes.planner.workload import Workload
from recipes.spec import cluster
from recipes.spec.efficiency import Efficiency
from recipes.spec.layout import ContextParallel, Layout
from recipes.spec.model_card import ModelCard
from recipes.spec.units import K, M
from tests.recipes.planner.test_documents import UNEVEN, attended, cut

H100 = cluster.load("dgx_h100")
PEAK = Efficiency(
    matmul=1, attention_forward=1, attention_backward=1, memory=1, nvlink=1, ring_block=1e-9
)
AT_PEAK = replace(H100, efficiency=PEAK)
OLMO3 = CARDS["olmo3_7b"]
WITHOUT = replace(OLMO3, pattern=None)
"""The same model, its local layers without a window."""


def workload(
    card: ModelCard = OLMO3, documents: DocumentLengths | None = None, seq=64 * K, **layout
) -> Workload:
    given = Layout(**layout)
    return Workload(
        card=card, seq_length=seq, tokens_per_batch=4 * M, layout=given, gpus_per_node=8,
        documents=documents,
    )  # fmt: skip


def pairs(first: int, end: int, window: int) -> int:
    """Return the pairs of a query and a key of a document's part, counted token by token."""
    return sum(min(token - first + 1, window) for token in range(first, end))


@pytest.mark.parametrize("window", [1, 7, 64, 511])
def test_shares_of_a_window_are_the_pairs_counted_one_by_one(window: int):
    found = in_window(window, seq_length=512, block=0.0)
    counted = pairs(0, 512, window) / (512**2 / 2)
    assert found.pairs == found.mean == found.slowest
    assert found.pairs == pytest.approx(counted, rel=2 / window)  # a diagonal is half of a pair


@pytest.mark.parametrize("window", [32, 200])
@pytest.mark.parametrize("ring", [1, 2])
def test_shares_of_a_window_within_documents_are_those_of_many_sequences(window: int, ring: int):
    seq_length = 512
    rows = cut(UNEVEN, seq_length, 1000)
    counted = [sum(pairs(*part, window) for part in row) / (seq_length**2 / 2) for row in rows]
    found = attended(UNEVEN, seq_length, ring=ring, window=window)
    assert found.mean == found.pairs == pytest.approx(sum(counted) / 1000, rel=0.04)
    assert found.mean <= found.slowest <= 1


@pytest.mark.parametrize("seq_length", [300, 4096, 64 * K])
def test_documents_shorter_than_a_window_do_not_notice_it(seq_length: int):
    given = {"ring": 2, "data_ranks": 4, "block": 700.0}
    plain = attended(UNEVEN, seq_length, **given)
    assert attended(UNEVEN, seq_length, window=9000, **given) == plain
    assert attended(UNEVEN, seq_length, window=200, **given).pairs < plain.pairs


def test_one_document_of_all_tokens_has_the_share_of_whole_sequences():
    found = attended(DocumentLengths(((10**9, 1),)), window=256, block=1024.0)
    alone = in_window(256, seq_length=4096, block=1024.0)
    assert tuple(found) == pytest.approx(tuple(alone), rel=1e-4)  # but where two meet


def test_a_window_of_the_whole_sequence_is_none():
    assert in_window(4096, seq_length=4096, block=1024.0) == WHOLE
    assert workload(seq=4 * K).window is None
    short, plain = (time(workload(one, seq=4 * K), H100) for one in (OLMO3, WITHOUT))
    assert short == plain


def test_attention_of_both_kinds_of_layers_added_up_by_hand():
    found = time(workload(cp=ContextParallel.ulysses(8), dp=64), AT_PEAK)
    length, window, width = 64 * K, 4 * K, 32 * 128
    # causal: 2 A S t of a forward, 5/2 of that backward; t tokens of a rank, 1 micro-batch
    full, local = length, 2 * window - window**2 / length
    by_hand = 7 * width * (length / 8) * (8 * full + 24 * local) / 989e12
    assert found.categories["attention"] == pytest.approx(by_hand)
    flops = OLMO3.flops_per_token(length)
    assert found.mfu == pytest.approx(found.tokens_per_gpu_second * flops / 989e12)
    assert flops == 6 * OLMO3.matmul_parameters + 6 * width * (8 * full + 24 * local)


def test_a_window_saves_attention_and_costs_the_merge_of_its_squares():
    layout = {"cp": ContextParallel.ulysses(8), "dp": 8}
    found, plain = (time(workload(one, **layout), H100).categories for one in (OLMO3, WITHOUT))
    assert found["attention"] < 0.5 * plain["attention"]
    assert found["memory"] > plain["memory"]
    assert found["matmul"] == plain["matmul"]
    assert found["CP"] == plain["CP"]


def test_small_windows_have_smaller_squares_at_a_lower_rate():
    def share(window: int) -> float:
        pattern = replace(OLMO3.pattern, window=window)
        found = time(workload(replace(OLMO3, pattern=pattern)), H100)
        return found.categories["attention"]

    full = time(workload(replace(OLMO3, pattern=None)), H100).categories["attention"] / 4
    assert share(512) - full > 0.2 * (share(4096) - full)


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_a_ring_sends_of_local_layers_the_keys_that_their_windows_reach(ulysses: int):
    """With attention that takes no time, all that is sent in the ring is exposed.

    The hybrid's exchange is that of the same model without a window.
    """
    machine = replace(AT_PEAK, gpu=replace(H100.gpu, bf16_tflops=1e12))
    ring = 8 // ulysses
    cp = (
        ContextParallel.ring(8)
        if ulysses == 1
        else ContextParallel.hybrid(ulysses=ulysses, ring=ring)
    )
    found, plain = (
        time(workload(one, cp=cp, dp=8), machine).categories["CP"] for one in (OLMO3, WITHOUT)
    )
    of_token = 2 * 32 * 128 * 2 / ulysses  # bytes of K and V of the heads after the exchange
    turned, halo = (ring - 1) * 64 * K / ring, 2 * (4 * K - 1)
    link = H100.nvlink_gbps * 1e9
    # forward, backward, and gradients in fp32, in 8 micro-batches
    if ulysses == 1:
        assert plain == pytest.approx(8 * 32 * 4 * turned * of_token / link)
    saved = 8 * 24 * 4 * (turned - halo) * of_token / link
    assert plain - found == pytest.approx(saved)


def test_within_documents_local_layers_wait_less():
    lengths = DocumentLengths(((1 * K, 200), (60 * K, 2)))
    given = {"cp": ContextParallel.ring(8), "dp": 8}
    found, plain = (
        time(workload(one, lengths, **given), H100).categories for one in (OLMO3, WITHOUT)
    )
    assert 0 < found["waiting"] < plain["waiting"]
    assert found["attention"] < plain["attention"]
