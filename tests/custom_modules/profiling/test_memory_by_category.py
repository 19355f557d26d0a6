# SPDX-License-Identifier: Apache-2.0
"""Every byte has one category, forward, backward and in a layer that is rebuilt."""

import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.context_parallel.p2p import post
from custom_modules.cpu.backend import cpu_backend
from custom_modules.memory.config import Recompute
from custom_modules.profiling.categories import CATEGORIES, category, retag
from custom_modules.profiling.memory_by_category import MemoryByCategory
from custom_modules.profiling.step_memory import Measured, Training, measure
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.ranks import run_ranks

KIB = 256
"""Elements of fp32."""


def live(memory: MemoryByCategory) -> dict[str, int]:
    """Return what lives, in KiB, without the categories of nothing."""
    return {name: size / 1024 for name, size in memory.live.items() if size}


def test_the_innermost_cause_takes_what_is_allocated():
    with MemoryByCategory() as memory:
        held = [torch.zeros(KIB)]
        with category("attention"):
            held.append(torch.zeros(2 * KIB))
            with category("mlp"):
                held.append(torch.zeros(3 * KIB))
            held.append(torch.zeros(4 * KIB))
    assert live(memory) == {"other": 1, "attention": 6, "mlp": 3}


def test_a_cause_that_an_error_ends_is_over():
    with MemoryByCategory() as memory:
        with pytest.raises(RuntimeError), category("attention"):
            raise RuntimeError
        held = torch.zeros(KIB)
    assert live(memory) == {"other": 1}
    del held


def test_the_peak_is_split_as_it_was_then_and_each_cause_has_its_own():
    with MemoryByCategory() as memory:
        with category("attention"):
            held = torch.zeros(5 * KIB)
        del held
        with category("mlp"):
            held = torch.zeros(6 * KIB)
        with category("attention"):
            also = torch.zeros(KIB)
        del held, also
    assert (memory.at_peak["attention"], memory.most["attention"]) == (1024, 5 * 1024)
    assert memory.at_peak["mlp"] == memory.most["mlp"] == 6 * 1024
    assert sum(memory.at_peak.values()) == memory.peak_bytes == 7 * 1024
    assert memory.peak_in == ("attention", False)
    assert not live(memory)


def test_backward_belongs_to_the_cause_of_its_forward():
    x = torch.ones(KIB, requires_grad=True)
    with MemoryByCategory() as memory:
        with category("attention"):
            y = x.sin()
        with category("mlp"):
            z = y.exp()
        with category("loss"):
            total = z.sum()
        assert live(memory) == {"attention": 1, "mlp": 1, "loss": 4 / 1024}
        memory.restart()
        total.backward()
    # exp: grad * z; sin: cos(x), and grad * cos(x), which becomes the gradient of x.
    assert (memory.most["attention"], memory.most["mlp"]) == (3 * 1024, 2 * 1024)
    assert memory.most["other"] == 4, "the seed of backward"
    del y, z


def test_nodes_that_a_backward_makes_belong_to_the_node_that_made_them():
    weight, x = torch.ones(KIB, requires_grad=True), torch.ones(4, KIB, requires_grad=True)
    with MemoryByCategory() as memory:
        with category("mlp"):
            y = torch.nn.functional.rms_norm(x, (KIB,), weight)  # composite on CPU
        with category("loss"):
            total = y.sum()
        memory.restart()
        total.backward()
    assert memory.most["mlp"] > 8 * 1024
    assert memory.most["other"] == 4
    del y


class Rebuilt(torch.autograd.Function):
    """`x.sin().exp()`, twice: its two steps name their categories in both runs."""

    @staticmethod
    def run(x):
        with category("attention"):
            y = x.sin()
        with category("mlp"):
            return y.exp()

    @staticmethod
    def forward(ctx, x):
        retag(x, "saved inputs")
        ctx.save_for_backward(x)
        return Rebuilt.run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = Rebuilt.run(x)
        torch.autograd.backward(out, grad)
        return x.grad


def test_a_part_that_is_rebuilt_in_backward_names_its_causes_again():
    leaf = torch.ones(KIB, requires_grad=True)
    with MemoryByCategory() as memory:
        x = leaf + 1
        out = Rebuilt.apply(x)
        assert live(memory) == {"saved inputs": 1, "mlp": 1}
        total = out.sum()
        del x, out
        memory.restart()
        total.backward()
    assert memory.most["saved inputs"] == 1024
    assert memory.most["mlp"] == 2 * 1024, "the rebuilt exp(y), and its gradient"
    assert memory.most["attention"] == 2 * 1024, "cos(x) and its gradient; exp keeps no y"


def test_weights_and_gradients_are_not_renamed_by_who_passes_them_on():
    with MemoryByCategory() as memory:
        with category("weights"):
            weight = torch.zeros(KIB)
        other = torch.zeros(KIB)
        retag(weight, "saved inputs")
        retag(other.view(2, -1), "saved inputs")
        retag(torch.zeros(KIB), "attention")
    assert live(memory) == {"weights": 1, "saved inputs": 1}
    del weight, other


def test_host_bytes_are_counted_beside_the_peak():
    with MemoryByCategory() as memory, category("host"):
        held = torch.zeros(8 * KIB)
        with category("mlp"):
            also = torch.zeros(KIB)
    assert live(memory) == {"host": 8, "mlp": 1}
    assert memory.peak_bytes == memory.live_bytes == 1024
    del held, also


def test_a_resized_storage_counts_at_its_size():
    with MemoryByCategory() as memory, category("mlp"):
        held = torch.zeros(4 * KIB)
        held.untyped_storage().resize_(0)
        assert live(memory) == {}
        held.untyped_storage().resize_(2048)
        assert live(memory) == {"mlp": 2}
        del held
    assert live(memory) == {}


def test_nothing_happens_where_nobody_counts():
    with category("mlp"):
        x = torch.zeros(1)
    retag(x, "loss")
    assert category("mlp") is category("loss")


def eventually(memory: MemoryByCategory, expected: dict[str, int]) -> dict[str, float]:
    """Return what lives: gloo's thread drops its tensors a moment after a message has ended."""
    deadline = time.monotonic() + 60
    while live(memory) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return live(memory)


INSIDE = {"weights": 1, "attention": 2, "communication": 6}
AFTER = {"weights": 1, "attention": 4}
AT_END = {"weights": 1}


def received() -> list[dict[str, float]]:
    """Return what lives after messages in a module, after it, and when its result is dropped."""
    rank, group = dist.get_rank(), dist.group.WORLD
    found = []
    with MemoryByCategory() as memory:
        with category("weights"):
            weight = torch.zeros(KIB)
        with category("attention"):
            kept, buffer = torch.zeros(2 * KIB), torch.zeros(4 * KIB)
            post([(1 - rank, kept)], [(1 - rank, buffer[: 2 * KIB])], group).wait()
            gathered = torch.empty(2 * KIB)
            dist.all_gather_into_tensor(gathered, weight)
            found.append(eventually(memory, INSIDE))
            del buffer
        found.append(eventually(memory, AFTER))
        dist.all_gather_into_tensor(weight, weight[: KIB // 2].clone())
        del gathered, kept
        found.append(eventually(memory, AT_END))
    return found


def test_what_is_received_is_communication_until_its_module_keeps_it():
    for found in run_ranks(received, 2):
        assert found == [INSIDE, AFTER, AT_END]


TOKENS, BATCH = 64, 2
FULL = {"recompute": Recompute(kind="full")}


class Step(NamedTuple):
    """What was measured, beside bytes counted from the model's own tensors."""

    measured: Measured
    parameters: int
    gradients: int
    adam: int


def step(tp: int = 1, cp: int = 1, how: str = "ulysses", memory: object = None) -> Step:
    """Measure one step of the small Llama in Megatron's groups as they are now."""
    made = []

    def build() -> Training:
        model = llamas.ours(
            RopeScaling.base_change(10_000),
            llamas.megatron_weights(llamas.made_up_weights()),
            torch.float32,
            cp=ContextParallelKind(kind=how),
            memory=memory,
            calculate_per_token_loss=True,
        )
        ddp = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True), [ddp]
        )
        made.extend((ddp, optimizer))

        def run() -> None:
            tokens = torch.zeros(BATCH, TOKENS // cp, dtype=torch.long)
            positions = torch.arange(TOKENS // cp).repeat(BATCH, 1)
            loss = ddp(tokens, positions, None, labels=tokens)
            with category("loss"):
                total = loss.sum()
            total.backward()
            finalize_model_grads([ddp], torch.tensor(float(tokens.numel())))

        return Training(model=[ddp], optimizer=optimizer, step=run)

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp
    )
    measured = measure(build, torch.device("cpu"))
    ddp, optimizer = made
    (inner,) = optimizer.chained_optimizers
    state = [t for of in inner.optimizer.state.values() for t in of.values() if t.ndim]
    parallel_state.destroy_model_parallel()
    return Step(
        measured,
        parameters=sum(p.nbytes for p in ddp.parameters()),
        gradients=sum(buffer.grad_data.nbytes for buffer in ddp.buffers),
        adam=sum(t.nbytes for t in state),
    )


def steps(*cases: dict[str, object]) -> list[Step]:
    with cpu_backend(force=True):
        return [step(**case) for case in cases]


ON_2_RANKS = {
    "dp": {},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "ring": {"cp": 2, "how": "ring"},
    "cp full": {"cp": 2, "memory": FULL},
    "cp kept": {"cp": 2, "memory": {"recompute": Recompute(kind="kept_attention")}},
}


@pytest.fixture(scope="module")
def on_2_ranks() -> dict[str, Step]:
    return dict(zip(ON_2_RANKS, run_ranks(steps, 2, *ON_2_RANKS.values())[0], strict=True))


@pytest.fixture(scope="module")
def on_1_rank() -> dict[str, Step]:
    cases = {"plain": {}, "full": {"memory": FULL}}
    return dict(zip(cases, run_ranks(steps, 1, *cases.values())[0], strict=True))


@pytest.fixture(scope="module")
def every_step(on_1_rank, on_2_ranks) -> dict[str, Step]:
    return on_1_rank | on_2_ranks


def test_the_causes_add_up_to_the_peak_to_the_byte(every_step):
    for name, (measured, *_) in every_step.items():
        assert set(measured.at_peak) == set(CATEGORIES)
        assert sum(measured.at_peak.values()) == measured.peak_bytes, name
        assert all(measured.most[one] >= measured.at_peak[one] for one in CATEGORIES), name


def test_weights_gradients_and_optimizer_are_those_of_the_model(every_step):
    for name, (measured, parameters, gradients, adam) in every_step.items():
        assert 0 <= measured.at_peak["weights"] - parameters < 1024, name  # padded by Megatron
        assert measured.at_peak["gradients"] == gradients, name
        assert adam <= measured.at_peak["optimizer"] < adam + 1024, name


def test_the_optimizer_is_shared_by_data_and_context_ranks(on_1_rank, on_2_ranks):
    whole = on_1_rank["plain"].adam
    for name in ("dp", "cp"):
        assert on_2_ranks[name].adam == pytest.approx(whole / 2, rel=0.02)


def test_saved_inputs_are_those_of_the_layers(every_step):
    of_one = TOKENS * BATCH * llamas.HIDDEN * 4
    attention = TOKENS * BATCH * llamas.HEADS * (llamas.HEAD_DIM + 1) * 4
    split = {"plain": 1, "full": 1, "dp": 1}
    for name, (measured, *_) in every_step.items():
        kept = of_one + (attention if name == "cp kept" else 0)
        assert measured.most["saved inputs"] == llamas.LAYERS * kept / split.get(name, 2), name


def test_rebuilt_layers_hold_less_of_attention_and_mlp(every_step):
    for plain, full in (("plain", "full"), ("cp", "cp full")):
        before, after = every_step[plain].measured, every_step[full].measured
        for name in ("attention", "mlp"):
            assert after.most[name] < before.most[name], (name, full)
        assert after.peak_bytes < before.peak_bytes


def test_ranks_that_exchange_hold_communication_buffers(on_1_rank, on_2_ranks):
    assert on_1_rank["plain"].measured.most["communication"] == 0
    for name in ("tp", "cp", "ring"):
        assert on_2_ranks[name].measured.most["communication"] > 0, name


def test_what_no_part_claims_is_small(every_step):
    embedded = TOKENS * BATCH * llamas.HIDDEN * 4
    embedding = llamas.VOCAB * llamas.HIDDEN * 4
    for name, (measured, *_) in every_step.items():
        assert measured.at_peak["other"] < embedding, name
        assert measured.most["other"] < 2 * embedded + 2 * embedding, name
