# SPDX-License-Identifier: Apache-2.0
"""The parts of `make gpu-check` that need no build of torch with CUDA, against torch's own."""

import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_check import by_hand, known_experts
from benchmarks.gpu_check.device_meshes import real_meshes
from benchmarks.gpu_check.engine_in_python import gemm, layer_backward, norm_forward, rms_backward
from benchmarks.gpu_check.fake_ranks import rank_of
from benchmarks.gpu_check.groups import Kind, built
from tests.house.rooms import TREE
from tests.ranks import Ranks, Server

SERVER = Server("recipes.nemo2.strategy", "nemo.lightning._strategy_lib")


class Halved(torch.autograd.Function):
    """Has an argument that is not a tensor, and two outputs, the second of which is unused."""

    @staticmethod
    def forward(ctx, factor, x):
        ctx.factor = factor
        return x * factor, x.sum()

    @staticmethod
    def backward(ctx, grad, of_sum):
        return None, grad * ctx.factor + of_sum


def gradients(backward) -> list[torch.Tensor]:
    """Return those of a small model by `backward(loss)`: views, broadcasts, recompute, a branch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    last = nn.Linear(3, 3)
    x = torch.randn(5, 4)
    middle = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    halved, _ = Halved.apply(0.5, middle)
    loss = (halved.split(1, -1)[0] * last(middle).softmax(-1)).sum() + middle.mean()
    backward(loss)
    return [parameter.grad for parameter in (*model.parameters(), *last.parameters(), x)]


def test_a_backward_by_hand_has_the_gradients_of_the_engine():
    wanted = gradients(lambda loss: loss.backward())
    with mock.patch.object(torch.autograd, "backward", by_hand.backward):
        found = gradients(by_hand.backward)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(found, wanted, strict=True))


def test_gradients_of_leaves_by_hand_are_not_accumulated():
    x, w, unused = torch.randn(5, 4), nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.ones(1))
    out = (x.requires_grad_() @ w).exp()
    given = torch.randn_like(out)
    found = by_hand.grad(out, [x, w, unused], given, allow_unused=True)
    wanted = torch.autograd.grad(out, [x, w], given)
    assert torch.allclose(found[0], wanted[0])
    assert torch.allclose(found[1], wanted[1])
    assert found[2] is None
    assert w.grad is None
    with pytest.raises(RuntimeError, match="was not used"):
        by_hand.grad((x @ w).sum(), [unused])


def test_products_have_the_operands_of_each_layout():
    x, weight, grad = torch.randn(2, 5, 4), torch.randn(3, 4), torch.randn(2, 5, 3)
    assert torch.allclose(gemm(weight, x, None, layout="TN")[0], x @ weight.T)
    assert torch.allclose(gemm(weight, grad, None, layout="NN")[0], grad @ weight)
    wanted = grad.flatten(0, 1).T @ x.flatten(0, 1)
    assert torch.allclose(gemm(x, grad, None, layout="NT")[0], wanted)
    total = torch.ones(3, 4)
    gemm(x, grad, None, layout="NT", out=total, accumulate=True)
    assert torch.allclose(total, wanted + 1)
    bias = torch.randn(3)
    assert torch.allclose(gemm(weight, x, None, bias=bias)[0], x @ weight.T + bias)
    of_bias = gemm(x, grad, None, layout="NT", bias=bias, grad=True)[1]
    assert torch.allclose(of_bias, grad.sum((0, 1)))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_and_their_backward_are_those_of_torch(zero_centered):
    x, weight, bias = torch.randn(6, 8), torch.randn(8), torch.randn(8)
    grad = torch.randn(6, 8)
    leaves = [one.clone().requires_grad_() for one in (x, weight, bias)]
    scale = leaves[1] + zero_centered
    wanted = nn.functional.rms_norm(leaves[0], (8,), scale, 1e-5)
    out, _, deviation = norm_forward(
        x, None, weight, None, 1e-5, None, None, "RMSNorm", 0, zero_centered
    )
    assert torch.allclose(out, wanted, atol=1e-6)
    found = rms_backward(grad, x, deviation, weight, 0, zero_centered)
    for one, other in zip(found, torch.autograd.grad(wanted, leaves[:2], grad), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    wanted = nn.functional.layer_norm(leaves[0], (8,), leaves[1] + zero_centered, leaves[2], 1e-5)
    out, mean, deviation = norm_forward(
        x, None, weight, bias, 1e-5, None, None, "LayerNorm", 0, zero_centered
    )
    assert torch.allclose(out, wanted, atol=1e-6)
    found = layer_backward(grad, x, mean, deviation, weight, 0, zero_centered)
    for one, other in zip(found, torch.autograd.grad(wanted, leaves, grad), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def _built() -> list[tuple[int, int]]:
    dist.destroy_process_group()
    kind = Kind(name="", tp=2, cp=8, inner=4)
    found = [built(kind, world) for world in (32, 64)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [(one.megatron.groups, one.ours.groups) for one in found]


def test_our_groups_are_as_many_in_a_world_of_twice_the_ranks():
    with Ranks(_built, 1, server=SERVER) as ranks:
        ((small, large),) = ranks.results(400)
    assert small[1] == large[1] == 2
    assert large[0] > small[0]


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_check", *words],
        cwd=TREE, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_a_torch_without_cuda_is_refused_with_what_installs_one(tmp_path):
    done = run("--out", str(tmp_path / "page.md"))
    assert done.returncode == 1
    assert "is a build without CUDA" in done.stderr
    assert "make gpu-check" in done.stderr
    assert not (tmp_path / "page.md").exists()


def test_an_unknown_recipe_is_named(tmp_path):
    done = run("--only", "groups", "--recipes", "llama9", "--out", str(tmp_path / "page.md"))
    assert done.returncode == 1
    assert "no shipped recipe for GPUs is called llama9" in done.stderr


@pytest.mark.parametrize(("whole", "parts"), [(10, 4), (8, 4), (3, 8)])
def test_even_experts_get_all_tokens_and_differ_by_at_most_one(whole, parts):
    counts = known_experts._even(whole, parts).tolist()
    assert (sum(counts), len(counts)) == (whole, parts)
    assert max(counts) - min(counts) <= 1


def test_turned_chunks_come_back_with_their_gradients():
    x = torch.randn(7, 3, requires_grad=True)
    sizes = known_experts._even(7, 3)
    there, of_probs = known_experts._sorted(x, sizes, None, x[:, 0])
    back, _ = known_experts._sorted(there, sizes[::-1], None)
    assert torch.equal(back, x)
    assert torch.equal(of_probs, there[:, 0])
    back.square().sum().backward()
    assert torch.equal(x.grad, 2 * x)


def test_picked_tokens_have_the_shapes_that_megatron_s_have():
    from megatron.core.transformer.moe.moe_utils import permute

    tokens, probs = torch.randn(6, 4), torch.rand(6, 3)
    mask = torch.zeros(6, 3, dtype=torch.bool).scatter(1, torch.arange(12).view(6, 2) % 3, True)
    ours = known_experts._picked(tokens, mask, probs, 12)
    theirs = permute(tokens, mask, probs=probs, num_out_tokens=12)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_a_device_mesh_beside_fake_tensors_knows_its_ranks():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh

    with rank_of(4, 2), FakeTensorMode(), real_meshes():
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert mesh["tp"].mesh.tolist() == [2, 3]
        assert mesh.get_coordinate() in ([1, 0], (1, 0))
