# SPDX-License-Identifier: Apache-2.0
"""When head-chunked attention posts the messages of a stage, and when it waits for them."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from custom_modules.attention.qkv_projection import Projection
from custom_modules.context_parallel import ulysses
from custom_modules.context_parallel.head_chunked import HeadChunked, head_chunked_attention
from custom_modules.context_parallel.head_stages import HeadStages
from custom_modules.context_parallel.p2p import Messages, post
from custom_modules.patching import patched
from custom_modules.tensor_parallel import TensorParallel
from tests.custom_modules.support.plain_attention import kernel
from tests.custom_modules.support.zigzag import made_up
from tests.ranks import run_ranks

HEAD_DIM, HIDDEN, TOKENS = 2, 6, 8
# heads, KV heads, heads of a stage
ONE_CHUNK, TWO_CHUNKS, A_CHUNK_EACH = (8, 2, 2), (8, 4, 2), (4, 4, 2)


class Moment(NamedTuple):
    """Stages attended with, and stages whose products of the backward had run."""

    attended: int
    products: int


@dataclass
class Batch:
    """One batch of messages: the tensors it fills, and when it was posted and waited for."""

    received: list[Tensor]
    posted: Moment
    waited: Moment | None = None

    def fills(self, t: Tensor) -> bool:
        return t.untyped_storage().data_ptr() in {
            into.untyped_storage().data_ptr() for into in self.received
        }


class Recorder:
    """The messages of a block, and what its kernel attended with; tensors are kept alive."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.attended: list[list[Tensor]] = []
        self.products = 0
        self.events: list[object] = []
        self._batch_of: dict[int, Batch] = {}
        self._alive: list[Messages] = []

    def now(self) -> Moment:
        return Moment(len(self.attended), self.products)

    def post(
        self,
        sent: Sequence[tuple[int, Tensor]],
        received: Sequence[tuple[int, Tensor]],
        group: dist.ProcessGroup,
    ) -> Messages:
        messages = post(sent, received, group)
        batch = Batch([t for _, t in received], self.now())
        self.batches.append(batch)
        self.events.append(["post", *(tuple(t.shape) for _, t in sent)])
        self._batch_of[id(messages)] = batch
        self._alive.append(messages)
        return messages

    def wait(self, messages: Messages) -> None:
        batch = self._batch_of.get(id(messages))
        if batch is not None and batch.waited is None:
            batch.waited = self.now()
            self.events.append("wait")

    def attend(self, *inputs: Tensor) -> None:
        self.attended.append(list(inputs))
        self.events.append("attend")

    def batch_of(self, stage: int, argument: int) -> tuple[Moment, Moment | None]:
        """Return when the messages of an input of a stage's kernel were posted and waited for."""
        (batch,) = [one for one in self.batches if one.fills(self.attended[stage][argument])]
        return batch.posted, batch.waited


def recorded(heads: int, kv_heads: int, heads_per_stage: int) -> tuple[object, object, object]:
    """Return the moments of each input in the forward and in the backward, and all events."""
    group = dist.group.WORLD
    rows = (heads + 2 * kv_heads) * HEAD_DIM
    inner = kernel()
    x, weight = (t.requires_grad_() for t in made_up((TOKENS, 1, HIDDEN), (rows, HIDDEN)))
    recorders = [Recorder()]

    def forward(q, k, v, causal, documents):
        recorders[-1].attend(q, k)
        return inner.forward(q, k, v, causal, documents)

    def backward(grad_out, q, k, v, out, lse, causal, documents):
        recorders[-1].attend(q, k, grad_out, out)
        return inner.backward(grad_out, q, k, v, out, lse, causal, documents)

    wait, products = Messages.wait, Projection.backward

    def posting(*given: object) -> Messages:
        return recorders[-1].post(*given)

    def waiting(messages: Messages) -> None:
        recorders[-1].wait(messages)
        wait(messages)

    def multiplying(projection: Projection, *arguments: object) -> None:
        recorders[-1].products += 1
        recorders[-1].events.append("products")
        products(projection, *arguments)

    block = HeadChunked(
        projection=Projection(
            weight=weight, bias=None, heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM,
            q_norm=None, k_norm=None,
        ),
        stages=HeadStages(
            heads=heads, kv_heads=kv_heads, ranks=dist.get_world_size(),
            heads_per_stage=heads_per_stage,
        ),
        kernel=replace(inner, forward=forward, backward=backward),
        ulysses=group,
        tensor_parallel=TensorParallel(group=None, sequence_parallel=False),
        table=None,
        causal=True,
        documents=None,
    )  # fmt: skip
    with ExitStack() as stack:
        for owner, name, new in (
            (ulysses, "post", posting),
            (Messages, "wait", waiting),
            (Projection, "backward", multiplying),
        ):
            stack.enter_context(patched(owner, name, new))
        out = head_chunked_attention(x, block)
        recorders.append(Recorder())
        torch.autograd.grad(out.sum(), (x, weight))
    moments = [
        [
            [recorder.batch_of(stage, argument) for argument in range(len(inputs))]
            for stage, inputs in enumerate(recorder.attended)
        ]
        for recorder in recorders
    ]
    return moments[0], moments[1], [recorder.events for recorder in recorders]


def answers() -> dict[object, object]:
    return {case: recorded(*case) for case in (ONE_CHUNK, TWO_CHUNKS, A_CHUNK_EACH)}


@pytest.fixture(scope="module")
def ran() -> list[dict[object, object]]:
    return run_ranks(answers, 2)


# By stage: how many stages had been attended with when the messages were posted.
FORWARD = {
    ONE_CHUNK: {"queries": [0, 0, 1, 2], "keys": [0, 0, 0, 0]},
    TWO_CHUNKS: {"queries": [0, 0, 2, 2], "keys": [0, 0, 2, 2]},
    A_CHUNK_EACH: {"queries": [0, 1], "keys": [0, 1]},
}


@pytest.mark.parity
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_the_next_queries_are_sent_before_a_stage_attends(ran, case):
    for answer in ran:
        forward, _, _ = answer[case]
        posted = {
            name: [inputs[at][0].attended for inputs in forward]
            for at, name in enumerate(("queries", "keys"))
        }
        assert posted == FORWARD[case]


@pytest.mark.parity
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_queries_are_waited_for_just_before_their_stage_attends(ran, case):
    for answer in ran:
        forward, _, _ = answer[case]
        assert [inputs[0][1].attended for inputs in forward] == list(range(len(forward)))


# By stage: how many stages' products of the backward had run when the messages were posted.
BACKWARD = {
    ONE_CHUNK: {"queries": [0, 0, 1, 2], "results": [0, 0, 1, 2]},
    TWO_CHUNKS: {"queries": [0, 0, 2, 2], "results": [0, 0, 1, 2]},
    A_CHUNK_EACH: {"queries": [0, 1], "results": [0, 0]},
}


@pytest.mark.parity
@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_a_backward_sends_what_the_next_stage_needs_before_the_products_of_a_stage(ran, case):
    for answer in ran:
        _, backward, _ = answer[case]
        posted = {
            name: [inputs[at][0].products for inputs in backward]
            for name, at in (("queries", 0), ("results", 2))
        }
        assert posted == BACKWARD[case]
        for stage, inputs in enumerate(backward):
            assert inputs[0][1] == inputs[2][1] == inputs[3][1] == (stage, stage)


@pytest.mark.parity
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_all_ranks_post_the_same_messages_in_the_same_order(ran, case):
    first, second = (answer[case][2] for answer in ran)
    assert first == second
    assert [len([event for event in run if event == "attend"]) for run in first] == [
        len(FORWARD[case]["queries"])
    ] * 2
