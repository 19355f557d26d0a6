# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from inspect import getattr_static

import pytest
import torch
from megatron.core import optimizer as optimizers
from megatron.core.activations import squared_relu
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as megatron_random

from custom_modules.cpu.backend import cpu_backend
from tests.ranks import one_rank

NEEDS_NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


def attributes() -> dict[tuple[str, str], object]:
    """Return every attribute that the context could have changed."""
    owners = (
        torch.cuda,
        torch.autograd,
        torch.Tensor,
        torch.nn.Module,
        megatron_random,
        DistributedOptimizer,
    )
    return {
        (owner.__name__, name): getattr_static(owner, name)
        for owner in owners
        for name in dir(owner)
        if not name.startswith("__")
    }


def changed(before: dict[tuple[str, str], object]) -> list[tuple[str, str]]:
    """Return the names that no longer stand for the same object."""
    after = attributes()
    assert after.keys() == before.keys()
    return [key for key, value in before.items() if after[key] is not value]


def test_nothing_stays_changed_after_the_context():
    before = attributes()
    with cpu_backend(force=True):
        assert ("torch.cuda", "current_device") in changed(before)
    assert changed(before) == []


def test_nothing_stays_changed_after_an_exception_inside():
    before = attributes()
    with pytest.raises(KeyError), cpu_backend(force=True):
        raise KeyError
    assert changed(before) == []
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_a_cuda_build_of_torch_finds_no_device_to_ask(monkeypatch):
    """As Lightning has it asked: by NVML, which is `device_count`, and Adam asks at each step."""
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with cpu_backend(force=True):
        assert torch.cuda.device_count() == 1
        assert not torch.cuda.is_available()


def test_what_megatron_compiles_for_a_gpu_runs_as_written():
    with cpu_backend(force=True):
        out = squared_relu(torch.tensor([-2.0, 3.0], dtype=torch.float64))
    assert out.tolist() == [0.0, 9.0]


def test_the_compiler_compiles_again_after_the_context():
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda t: 2 * t, backend=backend)
    with torch.compiler.set_stance("default"):  # whatever was entered before in this process
        with cpu_backend(force=True):
            assert double(torch.ones(1)).item() == 2
        assert not compiled
        assert double(torch.ones(1)).item() == 2
        assert len(compiled) == 1


def test_an_inner_context_leaves_the_outer_one_in_force():
    before = attributes()
    with cpu_backend(force=True):
        with cpu_backend(force=True):
            assert torch.empty(1, device="cuda").device.type == "cpu"
        assert torch.empty(1, device="cuda").device.type == "cpu"
        assert torch.cuda.current_device() == 0
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert changed(before) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(1, device="cuda"),
        lambda: torch.zeros(1, device="cuda:1"),
        lambda: torch.ones(1, device=torch.device("cuda", 0)),
        lambda: torch.tensor([1.0], device=torch.cuda.current_device()),
        lambda: torch.zeros(1).to("cuda"),
        lambda: torch.zeros(1).to(0, non_blocking=True),
        lambda: torch.zeros(1).to(device="cuda", dtype=torch.float64),
        lambda: torch.zeros(1).cuda(),
        lambda: torch.zeros(1).cuda(non_blocking=True),
        lambda: torch.zeros(1).pin_memory(),
        lambda: torch.zeros(1, pin_memory=True),
        lambda: torch.nn.Linear(1, 1).cuda().weight,
        lambda: torch.nn.Linear(1, 1).to("cuda").weight,
        lambda: torch.nn.Linear(1, 1, device="cuda").weight,
    ],
)
def test_what_is_made_for_cuda_is_made_on_the_cpu(make):
    with cpu_backend(force=True):
        tensor = make()
    assert tensor.device.type == "cpu"
    assert not tensor.is_pinned()


class MadeForCudaInBackward(torch.autograd.Function):
    """As Megatron's sequence-parallel linear layer does."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.ones(1, device="cuda")


@pytest.mark.parametrize(
    "run",
    [
        lambda out, leaf: out.backward(),
        lambda out, leaf: torch.autograd.backward(out),
        torch.autograd.grad,
    ],
    ids=["Tensor.backward", "autograd.backward", "autograd.grad"],
)
def test_what_backward_makes_for_cuda_is_made_on_the_cpu(run):
    leaf = torch.zeros(1, requires_grad=True)
    with cpu_backend(force=True):
        run(MadeForCudaInBackward.apply(leaf), leaf)


@NEEDS_NO_CUDA
def test_cuda_means_cuda_again_after_the_context():
    with cpu_backend():
        pass
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA driver"):
        torch.empty(1, device="cuda")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "torch.cuda.FloatTensor"),
        (torch.bfloat16, "torch.cuda.BFloat16Tensor"),
        (torch.float16, "torch.cuda.HalfTensor"),
    ],
    ids=str,
)
def test_a_tensor_has_the_type_name_of_cuda(dtype, name):
    with cpu_backend(force=True):
        assert torch.zeros(1, dtype=dtype).type() == name


def test_a_tensor_still_changes_its_type():
    with cpu_backend(force=True):
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64


def test_a_machine_with_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = attributes()
    with (
        pytest.raises(RuntimeError, match="started on a machine with CUDA"),
        cpu_backend(),
    ):
        pass
    assert changed(before) == []


def test_a_machine_with_cuda_is_used_as_a_cpu_when_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with cpu_backend(force=True):
        assert torch.empty(1, device="cuda").device.type == "cpu"


def test_the_random_state_of_cuda_is_that_of_the_cpu():
    with cpu_backend(force=True):
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)


def test_events_measure_milliseconds_and_streams_have_no_effect():
    with cpu_backend(force=True):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(torch.cuda.Stream()):
            start.record()
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            end.record(torch.cuda.current_stream())
        end.synchronize()
        assert start.elapsed_time(end) >= 0


def test_gradients_are_measured_and_scaled_without_the_kernels_of_transformer_engine(monkeypatch):
    """An environment made for GPUs has them, and they take no tensor of a CPU."""

    def kernel(*tensors):
        raise AssertionError("a CUDA kernel was called")

    for name in ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl"):
        monkeypatch.setattr(clip_grads, name, kernel)
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    with one_rank(), cpu_backend(force=True):
        norm = clip_grads.get_grad_norm_fp32([parameter.grad], grad_stats_parallel_group=None)
        clip_grads.clip_grad_by_total_norm_fp32([parameter], 1.0, norm)
    assert norm == pytest.approx(5)
    assert parameter.grad.tolist() == pytest.approx([0.6, 0.8])


def test_adam_is_torchs_though_another_is_installed(monkeypatch):
    other = object()
    monkeypatch.setattr(optimizers, "Adam", other)
    monkeypatch.setattr(optimizers, "USING_PYTORCH_OPTIMIZER", False)
    with cpu_backend(force=True):
        assert (optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER) == (torch.optim.AdamW, True)
    assert (optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER) == (other, False)
