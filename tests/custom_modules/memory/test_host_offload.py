# SPDX-License-Identifier: Apache-2.0
"""Which tensor leaves and returns when, and that no copy is read before it has ended."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.cpu.backend import cpu_backend
from custom_modules.memory.config import Offload, Recompute, SavedTensors
from custom_modules.memory.host_offload import HostOffload, Transfer
from custom_modules.memory.pinned_pool import GIB, HostPool, left_to_groups
from custom_modules.memory.recompute import Checkpoint, recomputed, reuse_saved_attention
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.ranks import run_ranks

BOTH = Offload(tensors="both", cap_gib=1)
INPUTS = Offload(tensors="inputs", cap_gib=1)
KEPT = Recompute(kind="kept_attention")


class LateCopies:
    """Copies that end only when somebody waits for them, as late as a slow link could make them.

    Before its end a target reads NaN, and a source that is gone by then is a fault.
    """

    def __init__(self) -> None:
        self.pending: dict[object, Any] = {}

    def out(self, source: Tensor, target: Tensor) -> object:
        target.fill_(torch.nan)
        return self._later(source, target, None, held=False)

    def back(self, source: Tensor, target: Tensor, after: object) -> object:
        target.fill_(torch.nan)
        return self._later(source, target, after, held=True)

    def wait(self, end: object) -> None:
        copy = self.pending.pop(end, None)
        if copy is not None:
            source, target, after = copy
            self.wait(after)
            source, target = source(), target()
            assert source is not None, "memory was let go before the copy from it had ended"
            if target is not None:
                target.copy_(source)

    reuse = wait

    def _later(self, source: Tensor, target: Tensor, after: object, *, held: bool) -> object:
        end = object()
        alive = (lambda: source) if held else weakref.ref(source)
        self.pending[end] = (alive, (lambda: target), after)
        return end


def layers(first: int, stop: int) -> dict[int, str]:
    """Return the kinds of layers that keep attention, by number."""
    return dict.fromkeys(range(first, stop), "kept_attention")


def run(offload: HostOffload, layers: int, x: Tensor) -> Tensor:
    """Return the output of layers that each keep their input and something like attention."""

    def layer(number: int, t: Tensor) -> Tensor:
        (out,) = reuse_saved_attention(lambda: ((t.detach() * number).transpose(0, 1),))
        return t + out.transpose(0, 1) * t

    for number in range(1, layers + 1):
        how = Checkpoint(keep_attention=True, keeping=partial(offload.keeping, number))
        x = recomputed(x, partial(layer, number), how)
    return x


def listed(moved: list[Transfer]) -> list[str]:
    """Return the steps as text, those of input and attention together where they are alike."""
    return [f"{one.what} {one.micro_batch}.{one.layer} {one.name}" for one in moved]


def test_the_schedule_of_one_micro_batch():
    moved: list[Transfer] = []
    offload = HostOffload(BOTH, layers(1, 4), listener=moved.append)
    x = torch.randn(2, 1, 3, requires_grad=True)
    out = run(offload, 3, x)
    assert listed(moved) == [
        "leaves 0.1 input", "leaves 0.1 attention", "let go 0.1 input", "let go 0.1 attention",
        "leaves 0.2 input", "leaves 0.2 attention", "let go 0.2 input", "let go 0.2 attention",
        "leaves 0.3 input", "leaves 0.3 attention",
    ]  # fmt: skip
    moved.clear()
    out.sum().backward()
    assert listed(moved) == [
        "taken 0.3 input", "taken 0.3 attention",  # still on the device
        "returns 0.2 input",  # under the gradients of layer 3's projection
        "taken 0.2 input",
        "returns 0.2 attention",  # under the rebuilt projection of layer 2
        "taken 0.2 attention",
        "returns 0.1 input",
        "taken 0.1 input",
        "returns 0.1 attention",
        "taken 0.1 attention",
    ]  # fmt: skip


def test_accumulated_micro_batches_follow_each_other():
    moved: list[Transfer] = []
    offload = HostOffload(INPUTS, layers(1, 3), listener=moved.append)
    for _ in range(2):
        run(offload, 2, torch.randn(2, 1, 3, requires_grad=True)).sum().backward()
    one = ["leaves {0}.1", "let go {0}.1", "leaves {0}.2", "taken {0}.2", "returns {0}.1",
           "taken {0}.1"]  # fmt: skip
    assert listed(moved) == [f"{step.format(batch)} input" for batch in (0, 1) for step in one]


def test_after_a_micro_batch_comes_the_last_layer_of_the_next_one_in_the_pipeline():
    moved: list[Transfer] = []
    offload = HostOffload(INPUTS, layers(5, 7), listener=moved.append)

    def forward():
        x = torch.randn(2, 1, 3, requires_grad=True)
        for number in (5, 6):
            how = Checkpoint(keep_attention=False, keeping=partial(offload.keeping, number))
            x = recomputed(x, torch.square, how)
        return x.sum()

    first, second = forward(), forward()
    moved.clear()
    first.backward()
    third = forward()
    second.backward()
    third.backward()
    assert listed(moved) == [
        "returns 0.6 input", "taken 0.6 input", "returns 0.5 input", "taken 0.5 input",
        "leaves 2.5 input", "let go 1.6 input", "let go 2.5 input", "leaves 2.6 input",
        "returns 1.6 input", "taken 1.6 input", "returns 1.5 input", "taken 1.5 input",
        "taken 2.6 input", "returns 2.5 input", "taken 2.5 input",
    ]  # fmt: skip


@pytest.mark.parametrize("plan", [BOTH, INPUTS, Offload(tensors="attention", cap_gib=1, every=2)])
def test_results_do_not_depend_on_how_late_copies_are(plan):
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    plain, late = (x.clone().requires_grad_() for _ in range(2))
    run(HostOffload(Offload(), layers(1, 6)), 5, plain).sum().backward()
    offload = HostOffload(plan, layers(1, 6), copies=LateCopies())
    for _ in range(2):
        late.grad = None
        run(offload, 5, late).sum().backward()
        torch.testing.assert_close(late.grad, plain.grad, rtol=0, atol=0)


def test_a_tensor_returns_in_its_own_order_of_dimensions():
    offload = HostOffload(BOTH, layers(1, 3))
    tensors = [torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(6, 4)[:, ::2], torch.ones(3)]
    first = offload.keeping(1)
    first.add("attention", tensors)
    first.finish()
    taken = first.take("attention")
    assert [t.stride() for t in taken] == [tensors[0].stride(), (2, 1), (1,)]
    for back, there in zip(taken, tensors, strict=True):
        torch.testing.assert_close(back, there, rtol=0, atol=0)


def test_what_has_left_is_not_on_the_device():
    offload = HostOffload(INPUTS, layers(1, 3))
    first = offload.keeping(1)
    x = torch.ones(5)
    there = weakref.ref(x)
    first.add("input", [x])
    del x
    assert there() is not None
    first.finish()
    assert there() is None


def test_host_memory_is_made_once_and_reused():
    offload = HostOffload(BOTH, layers(1, 5))
    sizes = []
    for _ in range(3):
        run(offload, 4, torch.randn(2, 1, 3, requires_grad=True)).sum().backward()
        sizes.append(offload.pool.made_bytes)
    assert sizes == [4 * 2 * 6 * 4] * 3  # layers, tensors, elements, bytes


def test_a_graph_without_a_backward_gives_its_host_memory_back():
    offload = HostOffload(BOTH, layers(1, 4))
    out = run(offload, 3, torch.randn(2, 1, 3, requires_grad=True))
    made = offload.pool.made_bytes
    del out
    gc.collect()
    run(offload, 3, torch.randn(2, 1, 3, requires_grad=True)).sum().backward()
    assert offload.pool.made_bytes == made


def test_too_small_a_cap_is_told_at_the_first_layer_with_what_is_needed():
    offload = HostOffload(Offload(tensors="inputs", cap_gib=100 / GIB), layers(1, 9))
    with pytest.raises(MemoryError, match=r"needs 1.79e-07 GiB.*cap_gib is 9.3.*e-08; raise it"):
        run(offload, 8, torch.randn(2, 1, 3, requires_grad=True))
    assert offload.pool.made_bytes == 0


def test_a_host_too_small_is_an_error_and_not_swap():
    offload = HostOffload(BOTH, layers(1, 3), memory_left=lambda: GIB + 10)
    with pytest.raises(MemoryError, match="it would swap: offload fewer layers"):
        run(offload, 2, torch.randn(2, 1, 3, requires_grad=True))


def test_ranks_of_a_machine_share_what_it_has_left():
    pool = HostPool(10 * GIB, pin=False, memory_left=lambda: 5 * GIB)
    pool.require(2 * GIB, ranks=2)
    with pytest.raises(MemoryError, match="needs 6 GiB more host memory for 3 ranks"):
        pool.require(2 * GIB, ranks=3)


def test_a_job_s_own_memory_limit_is_found_below_the_root(tmp_path):
    job = tmp_path / "slurm" / "job_1"
    job.mkdir(parents=True)
    (tmp_path / "memory.max").write_text("max")
    (job / "memory.max").write_text("1000\n")
    (job / "memory.current").write_text("700\n")
    (job / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert list(left_to_groups("0::/slurm/job_1\n", tmp_path)) == [450]
    old = tmp_path / "memory" / "job_2"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("90")
    (old / "memory.usage_in_bytes").write_text("60")
    (old / "memory.stat").write_text("total_inactive_file 5")
    assert list(left_to_groups("3:cpu:/x\n4:memory:/job_2\n", tmp_path)) == [35]


def test_a_single_layer_s_memory_is_let_go_when_the_next_step_begins():
    offload = HostOffload(INPUTS, layers(1, 2))
    run(offload, 1, torch.randn(2, 1, 3, requires_grad=True)).sum().backward()
    assert offload.keeping(1) is not None
    assert offload._borrowed == {}


def trained_in_a_pipeline(memory: dict[str, Any]) -> tuple[list[str], dict[str, Tensor]]:
    """Run Megatron's 1F1B over 3 micro-batches; return this rank's copies and gradients."""
    model = llamas.ours(
        RopeScaling.base_change(10_000),
        pipeline_weights(),
        torch.float64,
        cp=ContextParallelKind(kind="ulysses"),
        memory=memory,
        num_layers=4,
        pipeline_model_parallel_size=2,
        deallocate_pipeline_outputs=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).train()
    moved: list[Transfer] = []
    if model.decoder.layers[0].offload is not None:
        model.decoder.layers[0].offload.listener = moved.append
    tokens = torch.arange(12)[None] % llamas.VOCAB

    def forward_step(data, model):
        out = model(tokens, torch.arange(12)[None], None, labels=tokens)
        return out, lambda loss: (loss.sum(), {"loss": loss.detach().sum()})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([]),
        model=[model],
        num_microbatches=3,
        seq_length=12,
        micro_batch_size=1,
        forward_only=False,
    )
    return listed(moved), {name: p.grad for name, p in model.named_parameters()}


def pipeline_weights() -> dict[str, Tensor]:
    """Return weights of this pipeline stage: its two layers, and an end of the model."""
    weights = llamas.megatron_weights(llamas.made_up_weights())
    ends = ("embedding",) if parallel_state.is_pipeline_first_stage() else ("final", "output_layer")
    return {
        name: weight
        for name, weight in weights.items()
        if "layers." in name or any(end in name for end in ends)
    }


def pipeline_rank() -> tuple[list[str], float]:
    with cpu_backend(force=True):
        parallel_state.initialize_model_parallel(1, pipeline_model_parallel_size=2)
        _, plain = trained_in_a_pipeline({})
        moved, ours = trained_in_a_pipeline({"recompute": KEPT, "offload": INPUTS})
        assert ours.keys() == plain.keys()
        return moved, max(float((ours[name] - plain[name]).abs().max()) for name in plain)


def test_offload_in_a_pipeline_of_two_stages():
    (first, off_first), (last, off_last) = run_ranks(pipeline_rank, 2)
    assert max(off_first, off_last) < 1e-10
    # The first stage is one forward ahead: F0 F1 B0 F2 B1 B2.
    assert first == [
        "leaves 0.1 input", "let go 0.1 input", "leaves 0.2 input",
        "leaves 1.1 input", "let go 0.2 input", "let go 1.1 input", "leaves 1.2 input",
        "returns 0.2 input", "taken 0.2 input", "returns 0.1 input", "taken 0.1 input",
        "leaves 2.1 input", "let go 1.2 input", "let go 2.1 input", "leaves 2.2 input",
        "returns 1.2 input", "taken 1.2 input", "returns 1.1 input", "taken 1.1 input",
        "taken 2.2 input", "returns 2.1 input", "taken 2.1 input",
    ]  # fmt: skip
    # The last goes forward and back at once, and its first input is the pipeline's to hold.
    assert last == [f"{step} {batch}.4 input" for batch in range(3) for step in ("leaves", "taken")]


@pytest.mark.usefixtures("megatron_rank")
def test_the_host_holds_the_bytes_that_were_foreseen():
    model = llamas.ours(
        RopeScaling.base_change(10_000),
        llamas.megatron_weights(llamas.made_up_weights()),
        torch.float32,
        cp=ContextParallelKind(kind="head_chunked"),
        memory={"recompute": KEPT, "offload": BOTH},
    ).train()
    tokens = torch.arange(24).view(2, 12)
    model(tokens, tokens % 12, None, labels=tokens).sum().backward()
    saved = SavedTensors(
        tokens=24, hidden=llamas.HIDDEN, heads=llamas.HEADS, head_dim=llamas.HEAD_DIM,
        element_bytes=4,
    )  # fmt: skip
    made = model.decoder.layers[0].offload.pool.made_bytes
    assert made == saved.on_host(BOTH, KEPT, layers=range(1, llamas.LAYERS + 1))
