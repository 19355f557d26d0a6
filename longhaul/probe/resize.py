# SPDX-License-Identifier: Apache-2.0
"""A recipe for one step on this machine, at its own or smaller sizes, and the memory it takes.

`recipes.resolved.single_step` has the step itself.
"""

import os
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run
import torch
import torch.distributed as dist

from custom_modules.gpt.vocabulary import padded_vocabulary
from recipes.nemo2.settings import as_config_node
from recipes.notation.describe import non_default_text
from recipes.rehearsal.shrink import rotation
from recipes.resolved.check import check
from recipes.resolved.read import tokens_per_batch, world_size
from recipes.resolved.single_step import micro_batches
from recipes.spec import pipeline

SHRUNK_HIDDEN, SHRUNK_LAYERS, SHRUNK_SEQ = 192, 4, 2048
SETTINGS = ("recompute", "tiling", "offload", "cp")


def shrink(recipe: nemo_run.Partial) -> None:
    """Reduce width, layers and length to fit a laptop; keep the ratios of the widths."""
    config, strategy = recipe.model.config, recipe.trainer.strategy
    pp = strategy.pipeline_model_parallel_size
    factor = 1
    while (
        config.hidden_size % (2 * factor) == 0
        and config.hidden_size // (2 * factor) >= SHRUNK_HIDDEN
        and config.kv_channels % (4 * factor) == 0
    ):
        factor *= 2
    set_hidden(recipe, config.hidden_size // factor)
    ends = 2 * pipeline.is_uneven(config.num_layers, pp)
    each = max(2 if ends else 1, SHRUNK_LAYERS // pp)
    set_layers(recipe, min(config.num_layers, each * pp - ends))
    unit = 2 * strategy.context_parallel_size * strategy.tensor_model_parallel_size
    set_seq(recipe, min(recipe.data.seq_length, max(SHRUNK_SEQ // unit, 1) * unit))


def set_hidden(recipe: nemo_run.Partial, hidden: int) -> None:
    """Divide all widths by the same number: hidden, FFN, size of a head, vocabulary."""
    config = recipe.model.config
    factor, rest = divmod(config.hidden_size, hidden)
    if rest or config.kv_channels % (2 * factor) or config.ffn_hidden_size % factor:
        raise ValueError(
            f"--hidden {hidden} does not divide the widths of {recipe.log.name} evenly: hidden "
            f"{config.hidden_size}, FFN {config.ffn_hidden_size}, heads of {config.kv_channels}, "
            "which must stay even"
        )
    config.hidden_size = hidden
    config.ffn_hidden_size //= factor
    whole = config.kv_channels
    config.kv_channels //= factor
    config.rope = as_config_node(
        rotation(fdl.build(config.rope), 1, head_dim=config.kv_channels, whole_head_dim=whole)
    )
    tp = recipe.trainer.strategy.tensor_model_parallel_size
    config.vocab_size = max(1, config.vocab_size // factor // tp) * tp


def set_layers(recipe: nemo_run.Partial, layers: int) -> None:
    """Set the number of layers."""
    recipe.model.config.num_layers = layers


def set_seq(recipe: nemo_run.Partial, seq: int) -> None:
    """Set the length wherever the recipe states it; a batch keeps its number of sequences."""
    recipe.data.seq_length = recipe.model.config.seq_length = seq
    for callback in recipe.trainer.callbacks:
        if hasattr(callback, "tokens_per_batch"):
            callback.seq_length, callback.tokens_per_batch = seq, tokens_per_batch(recipe)


def resized(
    recipe: nemo_run.Partial, *, shrunk: bool, seq: int, layers: int, hidden: int
) -> nemo_run.Partial:
    """Return the recipe at the given sizes, 0 for its own; its constraints are checked again."""
    if shrunk:
        shrink(recipe)
    if hidden:
        set_hidden(recipe, hidden)
    if layers:
        set_layers(recipe, layers)
    if seq:
        set_seq(recipe, seq)
    check(recipe)
    return recipe


def about_bytes(recipe: nemo_run.Partial) -> int:
    """Return an estimate of the bytes the step takes on a rank, before anything is built.

    Counts weights, gradients and optimizer; the activations that plain kernels keep of a layer,
    once if layers are recomputed and for each layer if not; and the logits.
    """
    config, strategy, fp32 = recipe.model.config, recipe.trainer.strategy, _is_fp32(recipe)
    tp, cp = strategy.tensor_model_parallel_size, strategy.context_parallel_size
    pp = strategy.pipeline_model_parallel_size
    replicas = world_size(recipe) // (tp * pp)  # DP and CP ranks each have a part of the optimizer
    heads = config.num_attention_heads * config.kv_channels
    kv_heads = config.num_query_groups * config.kv_channels
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    vocab = padded_vocabulary(config.vocab_size, tp)
    layers = max(map(len, pipeline.stages(config.num_layers, pp)))
    mlp, experts, shares = 3 * hidden * ffn, config.num_moe_experts, 1
    if experts:
        etp = strategy.expert_tensor_parallel_size or tp
        shares = strategy.expert_model_parallel_size * etp
    of_layer = hidden * (2 * heads + 2 * kv_heads) + (0 if experts else mlp)
    ends = hidden * vocab * (1 if pp > 1 or config.share_embeddings_and_output_weights else 2)
    parts = [((layers * of_layer + ends) // tp, replicas)]
    if experts:
        parts.append((layers * experts * mlp // shares, world_size(recipe) // (pp * shares)))
    distributed = strategy.ddp.use_distributed_optimizer
    state = sum(
        int(held * ((8 if fp32 else 6) + (8 if fp32 else 12) / (ranks if distributed else 1)))
        for held, ranks in parts
    )

    size = 4 if fp32 else 2
    tokens = recipe.data.seq_length // cp * recipe.data.micro_batch_size
    tiling, recompute = fdl.build(config.tiling), fdl.build(config.recompute)
    in_mlp = min(tokens, tiling.mlp_tile) if tiling.mlp else tokens
    in_mlp *= config.moe_router_topk if experts else 1
    inside = (tokens * (3 * hidden + 2 * heads + 4 * kv_heads) + in_mlp * 5 * ffn) // tp * size
    attention = heads if "kept_attention" in (recompute.kind, recompute.others) else 0
    kept = tokens * (hidden + attention) // tp * size
    logits = 0 if tiling.loss else tokens * vocab // tp * (size + 4)
    under_way = micro_batches(recipe)[0]
    one_more = inside if _recomputes(config) else 0
    activations = layers * (kept if _recomputes(config) else inside) * under_way + one_more
    return state + activations + logits


def _is_fp32(recipe: nemo_run.Partial) -> bool:
    return bool(recipe.trainer.plugins.precision == "32")


def _recomputes(config: Any) -> bool:
    ours = getattr(getattr(config, "recompute", None), "kind", "none")
    return ours not in ("none", "selective") or _argument(config, "recompute_granularity") == "full"


def _argument(config: Any, name: str) -> Any:
    return fdl.ordered_arguments(config, include_defaults=True).get(name)


def settings(recipe: nemo_run.Partial) -> str:
    """Return the recipe's settings of recompute, tiling, offload and CP in words."""
    config = recipe.model.config
    given = fdl.ordered_arguments(config)
    said = [
        f"{name} {non_default_text(fdl.build(given[name]))}" for name in SETTINGS if name in given
    ]
    if _argument(config, "recompute_granularity") is not None and "recompute" not in given:
        said.append(f"recompute {config.recompute_granularity}")
    return ", ".join(said)


def join(rank: int, ranks: int, store: Path, *, on_cpu: bool) -> None:
    """Make this process a rank of the job, all of it on one node."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    if not on_cpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if on_cpu else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
    )
