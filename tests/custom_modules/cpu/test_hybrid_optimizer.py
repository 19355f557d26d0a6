# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's optimizer with a part of it on the CPU takes the steps of the whole."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from custom_modules.memory.optimizer_on_host import mend_copies
from custom_modules.rope.config import RopeScaling
from tests.custom_modules.support import llamas
from tests.custom_modules.support.device_stand_ins import HostIsApart


def trained(fraction: float) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Return the loss of each of 4 steps, the fp32 weights after them, and the part on the host."""
    made = llamas.ours(
        RopeScaling.base_change(10_000),
        llamas.megatron_weights(llamas.made_up_weights()),
        torch.bfloat16,  # fp32 weights would be sharded as views, which it refuses to optimize
    )
    ddp = DistributedDataParallel(
        made.config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        made,
    )
    config = OptimizerConfig(
        optimizer="adam",
        bf16=True,
        lr=1e-2,
        weight_decay=0.1,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=fraction > 0,
        optimizer_offload_fraction=fraction,
        overlap_cpu_optimizer_d2h_h2d=fraction > 0,
    )
    tokens = torch.randint(0, llamas.VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    with HostIsApart():
        optimizer = get_megatron_optimizer(config, [ddp])
        for _ in range(4):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            loss = ddp(tokens, torch.arange(16)[None], None, labels=tokens).mean()
            loss.backward()
            ddp.finish_grad_sync()
            optimizer.step()
            losses.append(float(loss))
        inner = [one.optimizer for one in optimizer.chained_optimizers]
        weights = {name: p.main_param.clone() for name, p in made.named_parameters()}
        on_host = sum(
            copy.numel()
            for one in inner
            if isinstance(one, HybridDeviceOptimizer)
            for copy in one.cpu_copys_map_gpu_param
        )
    return losses, weights, on_host / sum(weight.numel() for weight in weights.values())


@pytest.mark.usefixtures("megatron_rank")
def test_an_offloaded_optimizer_takes_the_steps_of_one_on_the_device():
    losses, weights, on_host = trained(0.0)
    assert on_host == 0
    for fraction in (0.5, 1.0):
        ours, moved, on_host = trained(fraction)
        assert fraction <= on_host < fraction + 0.25  # whole tensors, until the fraction is there
        for name, weight in weights.items():
            torch.testing.assert_close(moved[name], weight, rtol=1e-5, atol=1e-6)
        assert ours == losses


class Stream:
    """Records what is queued, in one list for all streams."""

    def __init__(self, name: str, queued: list[tuple[str, ...]]) -> None:
        self.name, self._queued = name, queued

    def wait_stream(self, other: "Stream") -> None:
        self._queued.append((self.name, "waits for", other.name))

    def record_event(self) -> "Stream":
        return self

    def wait(self, stream: "Stream") -> None:
        stream.wait_stream(self)

    def synchronize(self) -> None:
        self._queued.append(("host", "waits for", self.name))


@pytest.mark.usefixtures("megatron_rank")
def test_what_follows_a_step_waits_for_the_weights_that_it_copied(monkeypatch):
    queued: list[tuple[str, ...]] = []
    current = Stream("current", queued)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    weight = torch.nn.Parameter(torch.ones(8))
    with HostIsApart():
        optimizer = HybridDeviceOptimizer(
            [weight], offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW, pin_cpu_grads=False,
            overlap_cpu_optimizer_d2h_h2d=True, lr=0.5,
        )  # fmt: skip
        optimizer._h2d_stream = Stream("to device", queued)
        optimizer._d2h_stream = Stream("to host", queued)
        mend_copies(SimpleNamespace(optimizer=optimizer))
        weight.grad = torch.ones(8)
        optimizer.step()
    assert ("current", "waits for", "to host") in queued  # Megatron-Core's own
    assert queued[-1] == ("current", "waits for", "to device")


@pytest.mark.usefixtures("megatron_rank")
def test_weights_on_the_host_are_pinned_in_fp32_also_after_a_load():
    weight = torch.nn.Parameter(torch.arange(8.0, dtype=torch.bfloat16))
    with HostIsApart() as host:
        optimizer = HybridDeviceOptimizer(
            [weight], offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW, pin_cpu_grads=False, param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=True, lr=0.5,
        )  # fmt: skip
        mend_copies(SimpleNamespace(optimizer=optimizer))
        for _ in range(2):
            (copy,) = optimizer.cpu_copys_map_gpu_param
            before = copy.clone()
            assert torch.equal(weight, before.bfloat16())
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            assert (copy < before).all()
            assert torch.equal(weight, copy.bfloat16())
            assert copy.data_ptr() in [one.data_ptr() for one in host.pinned]
            optimizer.load_state_dict(optimizer.state_dict())
            assert copy is not next(iter(optimizer.cpu_copys_map_gpu_param))
