# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's own modules, with products and norms in Python, against the plain spec.

    python -O -m benchmarks.gpu_check.engine     a line of JSON for each case

Two layers on the CPU in fp32, two micro-batches, weights equal under both specs. Its modules assert
that tensors are on a GPU; `python -O` leaves assertions out.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

LIMIT = 2e-6
"""Of the largest entry of a gradient, in fp32."""
SEQ, HIDDEN, HEADS, KV_HEADS, VOCAB = 40, 64, 4, 2, 96
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Prefixes of the norms: in Transformer Engine's fused layers, and in the plain spec."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One case: the largest difference of a gradient, relative to the largest entry of it."""

    name: str
    difference: float = float("inf")
    error: str = ""


def compared() -> list[Compared]:
    """Compare every case in a process without assertions."""
    done = subprocess.run(
        [sys.executable, "-O", "-W", "ignore", "-m", __name__],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        return [Compared(name="all", error=f"the process ended with {done.returncode}")]
    return [Compared(**one) for one in found]


def main() -> None:
    """Print the cases, a line each."""
    from benchmarks.gpu_check.engine_in_python import engine_in_python
    from benchmarks.stacks import one_rank

    with one_rank(torch.device("cpu")), engine_in_python(), _without_device():
        for name, settings in cases():
            print(json.dumps(asdict(_compared(name, settings))), flush=True)


@contextmanager
def _without_device() -> Iterator[None]:
    """Answer what Transformer Engine and Megatron-Core ask the driver, or an extension, for."""
    from megatron.core.tensor_parallel import layers

    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(torch.cuda.nvtx, "range", return_value=nullcontext()),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
    ):
        yield


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each kind of attention and memory, without and with fused accumulation."""
    from custom_modules.memory.config import Offload, Recompute, Tiling

    tiled = Tiling(loss=True, loss_tile=16)
    both = Tiling(loss=True, loss_tile=16, mlp=True, mlp_tile=12)
    kept = Recompute(kind="kept_attention")
    memory: dict[str, dict[str, Any]] = {
        "tiled loss": {"tiling": tiled},
        "tiled loss and MLP": {"tiling": both},
        "full recompute": {"tiling": both, "recompute": Recompute(kind="full")},
        "kept attention": {"tiling": both, "recompute": kept},
        "kept attention, offload": {
            "tiling": both,
            "recompute": kept,
            "offload": Offload(tensors="both", cap_gib=1),
        },
    }
    for cp, fused, (name, settings) in product(
        ("ulysses", "head_chunked"), (False, True), memory.items()
    ):
        fusion = ", fused accumulation" if fused else ""
        yield f"{cp}, {name}{fusion}", {"cp": cp, "fused": fused, **settings}


def _compared(name: str, settings: dict[str, Any]) -> Compared:
    try:
        plain = _gradients(**settings | {"engine": False, "fused": False, "weights": None})
        weights, wanted = plain
        _, found = _gradients(**settings | {"engine": True, "weights": weights})
        if found.keys() != wanted.keys():
            raise ValueError(f"parameters differ: {sorted(found.keys() ^ wanted.keys())[:4]}")
        worst = max(_difference(found[key], wanted[key]) for key in wanted)
    except Exception as error:  # whatever the code under test raises is the result
        text = " ".join(str(error).split())[:200]
        return Compared(name=name, error=f"{type(error).__name__}: {text}")
    return Compared(name=name, difference=worst)


def _difference(found: Tensor, wanted: Tensor) -> float:
    most = float(wanted.abs().max())
    if not (0 < most < math.inf and bool(found.isfinite().all())):
        raise ValueError("a gradient is zero, or not finite")
    return float((found - wanted).abs().max()) / most


Named = dict[str, Tensor]


def _gradients(
    *, engine: bool, fused: bool, cp: Any, weights: Named | None, **memory: Any
) -> tuple[Named, Named]:
    """Return weights and gradients under the names of the plain spec, after two micro-batches."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from benchmarks.harness.llama import llama_config
    from custom_modules.context_parallel.config import ContextParallelKind
    from custom_modules.gpt.model import LongContextGPT
    from custom_modules.rope.config import RopeScaling

    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(1)
    config = llama_config(
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=112,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        kv_channels=HIDDEN // HEADS,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=fused,
    )
    model = LongContextGPT(
        config,
        rope=RopeScaling.base_change(10_000),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        cp=ContextParallelKind(kind=cp),
        transformer_engine=engine,
        **memory,
    ).train()
    named = {_plain(name): parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in named.items():
            if weights is not None:
                parameter.copy_(weights[name])
            if fused:
                parameter.main_grad = torch.zeros_like(parameter)
                parameter.grad_added_to_main_grad = False
    draw = torch.Generator().manual_seed(3)
    for _ in range(2):
        tokens = torch.randint(0, VOCAB, (1, SEQ + 1), generator=draw)
        positions = torch.arange(SEQ)[None]
        model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).sum().backward()
        if fused:
            _add_what_was_not_fused(named)
    gradients = {name: p.main_grad if fused else p.grad for name, p in named.items()}
    return {n: p.detach().clone() for n, p in named.items()}, gradients


def _add_what_was_not_fused(named: dict[str, Any]) -> None:
    """Do what Megatron's DDP does after each parameter's gradient."""
    for parameter in named.values():
        if parameter.grad is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad, parameter.grad_added_to_main_grad = None, False


def _plain(name: str) -> str:
    for fused, plain in NORMS.items():
        name = name.replace(fused, plain)
    return name


if __name__ == "__main__":
    main()
