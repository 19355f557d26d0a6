# SPDX-License-Identifier: Apache-2.0
"""The tiled loss on one rank: losses and gradients of whole logits, what is computed and held."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from custom_modules.profiling.byte_counter import ByteCounter
from custom_modules.tiling import cross_entropy
from custom_modules.tiling.cross_entropy import split_into_tiles, tiled_cross_entropy
from custom_modules.tiling.softmax_tile import IN_PLACE, LogitGradient, accumulate, compiled
from tests.custom_modules.support.losses import (
    HIDDEN,
    MASKS,
    UPSTREAMS,
    VOCAB,
    Case,
    computed,
    largest_difference,
    part,
    whole,
)
from tests.custom_modules.support.zigzag import made_up
from tests.reference.loss import language_model_loss

CASES = [
    Case(length, batch, tile, masked, upstream)
    for length, batch in ((13, 1), (7, 3))
    for tile in (1, 5, 64)
    for masked in MASKS
    for upstream in UPSTREAMS
] + [
    Case(7, 3, 5, masked, upstream, smoothing, z_loss)
    for masked in ("none", "some")
    for upstream in UPSTREAMS
    for smoothing, z_loss in ((0.1, 0.0), (0.0, 0.01), (0.1, 0.01), (1.0, 0.0))
]
CASES += [
    Case(7, 3, 5, "some", upstream, smoothing, 0.01, padding=3)
    for upstream, smoothing in (("scalar", 0.0), ("each", 0.1))
]
PADDED = CASES[-2:]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_gradients_are_those_of_whole_logits(case):
    assert largest_difference(computed(case), part(case)) < 1e-10


@pytest.mark.parametrize("case", [*CASES[:-2:5], *PADDED], ids=str)
def test_the_pair_for_a_gpu_gives_the_same_through_torch_compile(monkeypatch, case):
    # No kernels are made: the backend runs what was traced, without mutation, by PyTorch.
    monkeypatch.setattr(cross_entropy, "passes_for", lambda device: compiled("aot_eager"))
    assert largest_difference(computed(case), part(case)) < 1e-10


def test_tiles_of_other_sizes_compile_nothing_anew():
    torch._dynamo.reset()
    passes = compiled("eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (12, 7, 5):
            (logits,), labels = made_up((rows, VOCAB)), torch.arange(rows)
            own = passes.reduce(logits, labels, False)
            passes.gradient(logits, labels, own, None, LogitGradient(None, own[0], None))


# bf16 has 8 bits. Logits, dx and dlogits are each rounded to them, relative to the largest.
BF16_TOLERANCE = 2**-6


@pytest.mark.parametrize("passes", [IN_PLACE, compiled("eager")], ids=["in place", "compiled"])
def test_bf16_has_fp32_losses_and_bf16_gradients(monkeypatch, passes):
    monkeypatch.setattr(cross_entropy, "passes_for", lambda device: passes)
    given, case = whole(Case(64, 3, 10)), Case(64, 3, 10)
    hidden, weight = (t.bfloat16().requires_grad_() for t in (given.hidden, given.weight))
    losses = tiled_cross_entropy(hidden, weight, given.labels, given.mask, tile=case.tile)
    losses.backward(given.upstream.float())
    assert losses.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    found = {"losses": losses.detach(), "hidden": hidden.grad, "weight": weight.grad}
    for name, right in part(case).items():
        error = (found[name].double() - right).abs().max() / right.abs().max()
        assert error < BF16_TOLERANCE, name


def test_many_tiles_of_bf16_are_added_in_fp32():
    into, grad = torch.full((3, 2), 256.0), torch.ones(1, 3, dtype=torch.bfloat16)
    for _ in range(4):  # in bf16, 256 + 1 is 256
        accumulate(into, grad, torch.ones(1, 2, dtype=torch.bfloat16))
    assert into.tolist() == [[260.0] * 2] * 3


def test_logits_too_large_for_an_exponential_are_reduced_right():
    logits = torch.tensor([[1000.0, 998.0, -2000.0], [-1000.0] * 3], dtype=torch.float64)
    for passes in (IN_PLACE, compiled("eager")):
        tile, labels = logits.clone(), torch.tensor([2, 0])
        own = passes.reduce(tile, labels, False)
        torch.testing.assert_close(own[0], logits.logsumexp(1))
        passes.gradient(tile, labels, own, None, LogitGradient(None, torch.ones_like(own[0]), None))
        onehot = torch.tensor([[0, 0, 1], [1, 0, 0]])
        torch.testing.assert_close(tile, logits.softmax(1) - onehot)


class Products(TorchDispatchMode):
    """Counts the matrix products [n, k] x [k, m] that run, by (n, k, m)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.counts[(*left.shape, right.shape[1])] += 1
        elif "mm" in str(func):
            raise AssertionError(f"{func} is not counted")
        return func(*args, **(kwargs or {}))


def products(case: Case) -> Counter:
    with Products() as counted:
        computed(case)
    return counted.counts


@pytest.mark.parametrize("upstream", ["one", "scalar"])
def test_each_product_runs_once_over_counted_tokens_when_training(upstream):
    case = Case(100, 2, 32, "some", upstream)
    tokens = int(whole(case).mask.sum())
    full, rest = divmod(tokens, 32)
    assert (full, rest) == (3, 23)
    tiles = {32: 3, 23: 1}
    assert products(case) == {
        product: tiles[n]
        for n in tiles
        for product in ((n, HIDDEN, VOCAB), (n, VOCAB, HIDDEN), (VOCAB, n, HIDDEN))
    }


def test_another_upstream_takes_the_weights_products_once_more():
    case = Case(32, 1, 32, "none", "each")
    expected = {(32, HIDDEN, VOCAB): 2, (32, VOCAB, HIDDEN): 1, (VOCAB, 32, HIDDEN): 2}
    assert products(case) == expected


def test_masked_tokens_take_part_in_no_product():
    assert products(Case(100, 1, 8, "all")) == {}
    assert {n for n, _, m in products(Case(100, 1, 8, "one")) if m == VOCAB} == {1}


def losses_of(hidden: Tensor, weight: Tensor) -> Tensor:
    given = whole(Case(12, 1, 5))
    return tiled_cross_entropy(hidden, weight, given.labels, given.mask, tile=5)


@pytest.mark.parametrize("taker", ["hidden", "weight"])
def test_what_takes_no_gradient_costs_no_product(taker):
    given = whole(Case(12, 1, 5))
    leaves = {"hidden": given.hidden, "weight": given.weight}
    leaves[taker].requires_grad_()
    with Products() as counted:
        losses_of(**leaves).sum().backward()
    assert all((k == VOCAB) == (taker == "hidden") for n, k, m in counted.counts if m == HIDDEN)
    right = language_model_loss(given.hidden, given.weight, given.labels, given.mask).sum()
    (grad,) = torch.autograd.grad(right, leaves[taker])
    torch.testing.assert_close(leaves[taker].grad, grad, rtol=0, atol=1e-10)


def test_evaluation_computes_logits_alone():
    given = whole(Case(12, 1, 5))
    with Products() as counted, torch.no_grad():
        losses = losses_of(given.hidden.requires_grad_(), given.weight.requires_grad_())
    assert {(k, m) for _, k, m in counted.counts} == {(HIDDEN, VOCAB)}
    assert not losses.requires_grad


def test_a_second_backward_through_the_same_graph_has_the_same_gradients():
    given = whole(Case(12, 1, 5))
    leaves = given.hidden.requires_grad_(), given.weight.requires_grad_()
    total = 3 * losses_of(*leaves).sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(total, leaves)
    for ours in (first, second):
        torch.testing.assert_close(list(ours), kept, rtol=0, atol=1e-12)


def test_a_tied_weight_receives_the_sum_and_each_use_sends_one_gradient():
    given = whole(Case(13, 3, 5))
    ids = given.labels.clamp(min=0).t()

    def gradient(loss):
        weight = given.weight.clone().requires_grad_()
        sent = []
        weight.register_post_accumulate_grad_hook(lambda parameter: sent.append("once"))
        embedded = torch.nn.functional.embedding(ids, weight)
        loss(embedded + given.hidden, weight, given.labels, given.mask).sum().backward()
        assert sent == ["once"]
        return weight.grad

    ours = gradient(lambda *of: tiled_cross_entropy(*of, tile=5))
    torch.testing.assert_close(ours, gradient(language_model_loss), rtol=0, atol=1e-10)


def test_a_transposed_view_of_hidden_has_the_same_gradient():
    case = Case(7, 3, 5, "none")
    given = whole(case)
    view = given.hidden.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not view.is_contiguous()
    tiled_cross_entropy(view, given.weight, given.labels, tile=5).backward(given.upstream)
    torch.testing.assert_close(view.grad, part(case)["hidden"], rtol=0, atol=1e-10)


def test_no_more_is_held_than_gradients_and_one_tile_of_logits():
    tokens, hidden_size, vocabulary, tile = 512, 8, 4096, 16
    hidden, weight = made_up(
        (tokens, 1, hidden_size), (vocabulary, hidden_size), dtype=torch.float32
    )
    labels = torch.zeros(1, tokens, dtype=torch.long)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with ByteCounter() as ledger:
        losses = tiled_cross_entropy(*leaves, labels, tile=tile)
        gradients = torch.autograd.grad(losses.sum(), leaves)
    returned = losses.nbytes + sum(t.nbytes for t in gradients)
    of_a_tile = tile * vocabulary * 4
    of_tokens = 64 * tokens  # labels, mask, indices, losses
    assert ledger.peak_bytes - returned < of_a_tile + 4 * tile * hidden_size * 4 + of_tokens


def test_rounds_take_as_many_tokens_of_each_shard_as_there_are():
    counted = torch.tensor([0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0], dtype=torch.bool)
    # Shards of six tokens have five and one; a tile of 3 takes two of each.
    first, second = split_into_tiles(counted, 3, 2, 0), split_into_tiles(counted, 3, 2, 1)
    assert [one.counts for one in first] == [[2, 1], [2, 0], [1, 0]]
    assert [one.tokens.tolist() for one in first] == [[1, 2, 10], [3, 4], [5]]
    assert [one.rows.tolist() for one in first] == [[1, 2], [3, 4], [5]]
    assert [one.rows.tolist() for one in second] == [[4], [], []]


def refused(words, *, hidden=None, weight=None, labels=None, mask=None, **other):
    given = whole(Case(6, 2, 4))
    with pytest.raises(ValueError, match=words):
        tiled_cross_entropy(
            given.hidden if hidden is None else hidden,
            given.weight if weight is None else weight,
            given.labels if labels is None else labels,
            given.mask if mask is None else mask,
            **({"tile": 4} | other),
        )


@pytest.mark.parametrize("tile", [0, -3])
def test_an_empty_tile_is_refused(tile):
    refused(f"tile is {tile} tokens; it must be at least 1", tile=tile)


def test_objectives_out_of_range_are_refused():
    refused(r"label_smoothing is 1\.5; it is a share", label_smoothing=1.5)
    refused(r"z_loss is -1\.0; it must be at least 0", z_loss=-1.0)


def test_mixed_dtypes_are_refused():
    (hidden,) = made_up((6, 2, HIDDEN), dtype=torch.float32)
    refused(r"hidden is torch\.float32 and the LM head torch\.float64", hidden=hidden)


def test_shapes_that_do_not_go_together_are_refused():
    flat, narrow = made_up((12, HIDDEN), (VOCAB, HIDDEN - 1))
    refused(r"hidden is \[12, 6\]", hidden=flat)
    refused(r"the LM head \[44, 5\]; \[s, b, h\] and \[v, h\] are needed", weight=narrow)
    labels = torch.zeros(6, 2, dtype=torch.long)  # [s, b]
    refused(r"labels are \[6, 2\] .* \[2, 6\] is needed", labels=labels)
    refused(r"mask are \[2, 5\] .* \[2, 6\] is needed", mask=torch.ones(2, 5))


@pytest.mark.parametrize("label", [-100, VOCAB])
def test_a_counted_label_outside_the_vocabulary_is_refused(label):
    labels = torch.full((2, 6), label)
    refused(f"label {label} is outside the vocabulary of 44; mask", labels=labels)
    (padded,) = made_up((VOCAB + 4, HIDDEN))
    words = f"label {label} is outside the vocabulary of 44; mask"
    refused(words, labels=labels, weight=padded, vocabulary=VOCAB)


def test_a_vocabulary_of_more_tokens_than_rows_is_refused():
    refused("vocabulary is 45 and the LM head has 44 rows over all ranks", vocabulary=45)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", BF16_TOLERANCE)])
def test_a_gpu_gives_the_losses_and_gradients_of_the_reference(dtype, tolerance):
    case = Case(701, 3, 512, "some", "each", 0.1, 0.001)
    given, dtype = whole(case), getattr(torch, dtype)
    hidden, weight = (t.to("cuda", dtype).requires_grad_() for t in (given.hidden, given.weight))
    losses = tiled_cross_entropy(
        hidden, weight, given.labels.cuda(), given.mask.cuda(), tile=512, **case.objective
    )
    losses.backward(given.upstream.float().cuda())
    found = {"losses": losses.detach(), "hidden": hidden.grad, "weight": weight.grad}
    for name, right in part(case).items():
        error = (found[name].double().cpu() - right).abs().max() / right.abs().max()
        assert error < tolerance, name
