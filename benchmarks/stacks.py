# SPDX-License-Identifier: Apache-2.0
"""Training steps of a small Llama under a stack of memory choices: ours, Megatron's, ALST's.

    with one_rank(device):
        found = step(shape, stack, seq=32_768)
    found.peak_bytes, found.seconds

A stack says what layers keep for their backward, where, and in what pieces. All of them run the
same `LongContextGPT` with the same weights and tokens, so they must find the same loss and gradient
norm. A step is one forward and backward of one sequence, without an optimizer.

Peak bytes: on CPU live tensors of the device (`custom_modules.profiling.memory_by_category`), on
CUDA what the allocator has handed out; weights and their gradients are among them, host memory is
not.

**The ALST-like stack** has ALST's four parts (arXiv 2506.13996) around Megatron's plain layer:

* each layer in a checkpoint whose input is copied to the host in the forward and back in the
  backward, both while the computation waits, as ALST's patch of `torch.utils.checkpoint` does;
* DeepSpeed's own `TiledMLP` around the MLP, the norm outside of it;
* DeepSpeed's own `TiledFusedLogitsLoss` around LM head and cross-entropy. It forms the gradient of
  the head's weight as if the loss were the end, so what the loss is divided by is inside.

Its norm, rotation and attention kernel are ours, which makes it lighter than with those of
transformers; attention takes all heads at once.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.autograd.function import once_differentiable

from benchmarks.harness.llama import llama_config
from benchmarks.harness.out_of_memory import out_of_memory
from benchmarks.harness.peers import deepspeed_tiled_loss, deepspeed_tiled_mlp
from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.cpu.backend import cpu_backend
from custom_modules.gpt.model import LongContextGPT
from custom_modules.memory.config import (
    KEEP_ALL,
    MEGATRON_KINDS,
    ON_DEVICE,
    UNTILED,
    Offload,
    Recompute,
    Tiling,
)
from custom_modules.memory.host_offload import HostOffload, Transfer
from custom_modules.patching import patched
from custom_modules.profiling.categories import Category, category, retag
from custom_modules.profiling.memory_by_category import MemoryByCategory
from custom_modules.profiling.step_memory import named_parts
from custom_modules.rope.config import RopeScaling

TOLERANCE = 1e-3
"""Of loss and gradient norm between stacks: rounding of fp32 and, for gradients, of bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A Llama, and where it runs."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: torch.dtype
    device: torch.device

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied with: the LM head's, not the embedding's."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.hidden * self.vocab

    def model_flops(self, seq: int) -> float:
        """Return the FLOPs of a step, attention causal, recompute not counted."""
        attention = self.layers * self.heads * self.head_dim * seq
        return 6.0 * seq * (self.matmul_parameters + attention)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A way to keep activations."""

    name: str
    recompute: Recompute = KEEP_ALL
    tiling: Tiling = UNTILED
    offload: Offload = ON_DEVICE
    head_chunked: bool = False
    """Whether attention takes a few heads at a time; else all at once."""
    heads_per_stage: int | None = None
    """How many then; None: the fewest."""
    alst: Tiling | None = None
    """DeepSpeed's parts with these tiles, in place of ours."""


@dataclass(slots=True)
class Found:
    """What a step took."""

    loss: float = float("nan")
    gradient_norm: float = float("nan")
    seconds: float = float("nan")
    peak_bytes: int = 0
    """Of the device."""
    host_bytes: int = 0
    at_peak: dict[Category, int] = field(default_factory=dict)
    """By category; empty on CUDA."""
    peak_in: str = ""
    inputs_away: float = 0.0
    """Share of the layer inputs whose device memory was let go when the backward began; the last
    layer's apart, which is needed at once."""
    reason: str = ""
    """Why it was not measured."""

    def agrees(self, other: "Found") -> bool:
        """Whether both trained the same model."""
        pairs = ((self.loss, other.loss), (self.gradient_norm, other.gradient_norm))
        return all(abs(mine - theirs) <= TOLERANCE * abs(theirs) for mine, theirs in pairs)


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Make this process the only rank of Megatron's groups."""
    with only_process(device):
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


@contextmanager
def only_process(device: torch.device) -> Iterator[None]:
    """Make this process the only one of torch's group; on a CPU Megatron computes there."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    here: AbstractContextManager[object] = nullcontext()
    if device.type == "cpu":
        here = cpu_backend(force=True)
    store = dist.HashStore()  # type: ignore[attr-defined]  # documented, not in __all__
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        with here:
            yield
    finally:
        dist.destroy_process_group()


def step(
    shape: Shape, stack: Stack, seq: int, *, warm_up: int = 0, keep_cache: bool = False
) -> Found:
    """Run one step of a new model, after a shorter one of `warm_up` tokens unless that is 0.

    After the shorter one, the host memory that the offload needs for `seq` tokens is locked, so
    that the step does not wait for it. `keep_cache` leaves what CUDA's allocator holds from the
    steps before, as in the rounds of a comparison.
    """
    memory = MemoryByCategory(shape.device) if shape.device.type == "cpu" else None
    found = Found()
    try:
        with ExitStack() as around:
            if memory is not None:
                around.enter_context(memory)
            model = _model(shape, stack, seq)
            if stack.alst is not None:
                around.enter_context(_alst(model, stack.alst, seq))
            if memory is not None:
                around.enter_context(named_parts([model]))
            moved = _heard(model)
            if warm_up:
                _forward_backward(model, shape, warm_up)
                _reserve(model, seq // warm_up)
                model.zero_grad()
            _settle(shape.device, memory, keep_cache)
            moved.clear()
            start = time.perf_counter()
            found.loss = _forward_backward(model, shape, seq)
            if shape.device.type == "cuda":
                torch.cuda.synchronize()
            found.seconds = time.perf_counter() - start
        if memory is None:
            found.peak_bytes = torch.cuda.max_memory_allocated()
        else:
            _by_cause(memory, found)
        found.gradient_norm = _gradient_norm(model)
        found.inputs_away = _inputs_away(moved) / max(1, shape.layers - 1)
    except torch.OutOfMemoryError as raised:
        found.reason = out_of_memory(raised)
    finally:
        model = None  # type: ignore[assignment]
        gc.collect()
    return found


def _model(shape: Shape, stack: Stack, seq: int) -> LongContextGPT:
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(1)
    ours = KEEP_ALL if stack.alst is not None else stack.recompute
    config = llama_config(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        params_dtype=shape.dtype,
        pipeline_dtype=shape.dtype,
        use_cpu_initialization=shape.device.type == "cpu",
        gradient_accumulation_fusion=False,
        **(ours.megatron_settings() if ours.kind in MEGATRON_KINDS else {}),
    )
    with category("weights"):
        model = LongContextGPT(
            config,
            rope=RopeScaling.base_change(500_000),
            vocab_size=shape.vocab,
            max_sequence_length=seq,
            cp=ContextParallelKind(
                kind="head_chunked" if stack.head_chunked else "ulysses",
                heads_per_stage=stack.heads_per_stage,
            ),
            recompute=ours,
            tiling=stack.tiling,
            offload=stack.offload,
        )
        model = model.to(shape.device)
    for parameter in model.parameters():
        retag(parameter, "weights")
    return model.train()


def _forward_backward(model: LongContextGPT, shape: Shape, seq: int) -> float:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocab, (1, seq + 1), generator=draw).to(shape.device)
    positions = torch.arange(seq, device=shape.device)[None]
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    loss = losses.sum() / seq if losses.ndim else losses
    loss.backward()
    return float(loss.detach())


def _settle(device: torch.device, memory: MemoryByCategory | None, keep_cache: bool) -> None:
    """Begin to count."""
    gc.collect()
    if memory is not None:
        memory.restart()
    if device.type == "cuda":
        if not keep_cache:
            torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _heard(model: LongContextGPT) -> list[Transfer]:
    """Return a list to which the offload of the model, if it has one, tells its steps."""
    moved: list[Transfer] = []
    if (offload := _offload_of(model)) is not None:
        offload.listener = moved.append
    return moved


def _offload_of(model: LongContextGPT) -> HostOffload | None:
    offload = getattr(model.decoder.layers[0], "offload", None)
    return offload if isinstance(offload, HostOffload) else None


def _reserve(model: LongContextGPT, times: int) -> None:
    """Lock the buffers of a step that is `times` as long as the last one, which they all follow."""
    if (offload := _offload_of(model)) is not None:
        for size, count in offload.pool.sizes().items():
            offload.pool.reserve(times * size, count)


def _by_cause(memory: MemoryByCategory, found: Found) -> None:
    name, backward = memory.peak_in
    found.peak_bytes, found.host_bytes = memory.peak_bytes, memory.most["host"]
    found.at_peak = memory.at_peak
    found.peak_in = f"{name}, {'backward' if backward else 'forward'}"


def _inputs_away(moved: list[Transfer]) -> int:
    """Return how many layer inputs have left device memory when the backward takes the first."""
    away = 0
    for one in moved:
        if one.what == "taken":
            break
        away += one.name == "input" and one.what == "let go"
    return away


def _gradient_norm(model: LongContextGPT) -> float:
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


@contextmanager
def _alst(model: LongContextGPT, tiles: Tiling, seq: int) -> Iterator[None]:
    """Put ALST's parts around a model inside the context."""
    tiled_mlp, tiled_loss = deepspeed_tiled_mlp(), deepspeed_tiled_loss()

    def mlp(module: Any, run: Callable[..., Any], x: Tensor) -> tuple[Tensor, None]:
        # DeepSpeed's tensors are [b, s, h].
        out = tiled_mlp.apply(
            lambda _, tile: run(tile)[0], module, x.transpose(0, 1), _shards(seq, tiles.mlp_tile),
            list(module.parameters()),
        )  # fmt: skip
        return out.transpose(0, 1), None

    def loss_of_tile(head: Any, x: Tensor, labels: Tensor) -> Tensor:
        logits = head(x[:, None])[0][:, 0].float()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / seq

    def loss(*, hidden_states: Tensor, labels: Tensor, **megatron: Any) -> Tensor:
        head = model.output_layer
        total: Tensor = tiled_loss.apply(
            loss_of_tile, head, hidden_states.transpose(0, 1), labels, None,
            _shards(seq, tiles.loss_tile), [head.weight], "sum",
        )  # fmt: skip
        return total

    with ExitStack() as stack:
        for layer in model.decoder.layers:
            layer_mlp = partial(mlp, layer.mlp, layer.mlp.forward)
            stack.enter_context(patched(layer.mlp, "forward", layer_mlp))
            checkpointed = partial(_checkpointed, layer.forward)
            stack.enter_context(patched(layer, "forward", checkpointed))
        stack.enter_context(patched(model, "_postprocess", loss))
        yield


def _shards(tokens: int, tile: int) -> int:
    return -(-tokens // tile)


def _checkpointed(
    layer: Callable[..., Any], hidden_states: Tensor, **megatron: Any
) -> tuple[Tensor, Any]:
    out: Tensor = _OffloadedCheckpoint.apply(
        hidden_states, lambda x: layer(hidden_states=x, **megatron)[0]
    )
    return out, megatron.get("context")


class _OffloadedCheckpoint(torch.autograd.Function):
    """Keeps x on the host; copies of it are waited for."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: Callable[[Tensor], Tensor]):  # type: ignore[no-untyped-def]
        ctx.layer, ctx.device = layer, x.device
        with category("host"):
            ctx.on_host = x.detach().to("cpu", copy=True)
        return layer(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def]
        with category("saved inputs"):
            x = ctx.on_host.to(ctx.device, copy=True).requires_grad_()
        del ctx.on_host
        with torch.enable_grad():
            out = ctx.layer(x)
        torch.autograd.backward(out, grad_out)
        return x.grad, None
