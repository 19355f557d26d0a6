# SPDX-License-Identifier: Apache-2.0
"""Constraints between the sizes of a model, its layout and its batch."""

from collections.abc import Iterator

from custom_modules.rope.config import MAX_POSITION
from recipes.constraints.layers import pipeline_sizes
from recipes.constraints.training_step import TrainingStep
from recipes.spec import pipeline


def violations(step: TrainingStep) -> Iterator[str]:
    """Yield one sentence for each violated constraint; a size below 1 ends them."""
    tp, cp, pp, world_size = step.tp, step.cp, step.pp, step.world_size
    seq_length, vocab, layers = step.seq_length, step.vocab, step.layers
    heads, kv_heads, head_dim = step.heads, step.kv_heads, step.head_dim
    global_batch, micro_batch = step.global_batch, step.micro_batch
    sizes = {
        "sequence length": seq_length, "heads": heads, "KV heads": kv_heads, "layers": layers,
        "head size": head_dim, "vocabulary": vocab, "TP": tp, "CP": cp, "PP": pp,
        "EP": step.ep, "ETP": 1 if step.etp is None else step.etp,
        "world size": world_size, "ranks per node": step.ranks_per_node,
        "global batch": global_batch, "micro-batch": micro_batch,
    }  # fmt: skip
    too_small = [
        f"{name} is {size}; it must be at least 1" for name, size in sizes.items() if size < 1
    ]
    if too_small:
        yield from too_small
        return
    model_ranks = step.model_ranks
    if world_size % model_ranks:
        yield (
            f"world size {world_size} does not match the layout: TP {tp} x CP {cp} x PP {pp} = "
            f"{model_ranks} ranks, so it must be a multiple of {model_ranks}"
        )
        return
    dp = step.dp
    if seq_length > MAX_POSITION:
        yield f"sequence length {seq_length:,} has positions from 2^31 on, which are not rotated"
    if cp > 1 and seq_length % (2 * cp):
        yield (
            f"sequence length {seq_length:,} is not divisible by 2 x CP = {2 * cp}, "
            f"which zigzag sharding needs; {seq_length // (2 * cp) * 2 * cp:,} would do"
        )
    elif tp > 1 and (seq_length // cp) % tp:
        yield (
            f"sequence length {seq_length:,} over CP {cp} is not divisible by TP {tp}, which "
            f"sequence parallelism needs; {seq_length // (2 * cp * tp) * 2 * cp * tp:,} would do"
        )
    if heads % tp or kv_heads % tp:
        yield (
            f"{heads} heads and {kv_heads} KV heads are not both divisible by TP {tp}; "
            f"TP may be {_divisors(heads, kv_heads)}"
        )
    else:
        try:
            _ = step.degrees
        except ValueError as error:
            yield str(error)
    if head_dim % 2:
        yield f"the head size is {head_dim}; rotation pairs dimensions, so it must be even"
    yield from _pipeline(step)
    yield from _experts(step)
    if global_batch % (micro_batch * dp):
        yield (
            f"a batch of {global_batch} sequences of {seq_length:,} tokens is not divisible by "
            f"micro-batch {micro_batch} x DP {dp}; use fewer DP ranks, or a multiple of "
            f"{micro_batch * dp * seq_length:,} tokens per batch"
        )


def _pipeline(step: TrainingStep) -> Iterator[str]:
    """Yield one sentence for each violated constraint of pipeline stages."""
    layers, pp, uneven = step.layers, step.pp, pipeline.is_uneven(step.layers, step.pp, step.vpp)
    if step.vpp > 1:
        yield from _interleaved(step)
    elif not pipeline.divides(pp, layers):
        yield (
            f"{layers} layers are not divisible by PP {pp}, nor are {layers + 2} with embedding "
            f"and LM head as a layer each; PP may be {_listed(pipeline_sizes(step))}"
        )
    if pipeline.divides(pp, layers, step.vpp) and step.ends_count not in (None, uneven):
        value = str(uneven).lower()
        chunks = f" x VPP {step.vpp}" if step.vpp > 1 else ""
        yield (
            f"{layers} layers on PP {pp}{chunks} {'are not' if uneven else 'are'} divisible by it, "
            "and embedding and LM head "
            f"{'do not count' if uneven else 'count'} as layers; set trainer.strategy.account_for_"
            f"embedding_in_pipeline_split={value} and trainer.strategy.account_for_loss_in_"
            f"pipeline_split={value}"
        )


def _interleaved(step: TrainingStep) -> Iterator[str]:
    """Yield one sentence for each violated constraint of an interleaved pipeline."""
    layers, pp, vpp = step.layers, step.pp, step.vpp
    if pp == 1:
        yield f"VPP is {vpp} and PP 1; chunks interleave in a pipeline, so take PP 2 or more"
        return
    if not pipeline.divides(pp, layers, vpp):
        may_be = [n for n in range(1, layers + 1) if pipeline.divides(pp, layers, n)]
        yield (
            f"{layers} layers are not divisible by PP {pp} x VPP {vpp}, nor are {layers + 2} with "
            f"embedding and LM head as a layer each; VPP may be {_listed(may_be) or 'none at all'}"
        )
    if step.micro_batches % pp:
        yield (
            f"{step.micro_batches} micro-batches of a data rank are not a multiple of PP {pp}, "
            "which an interleaved pipeline needs; change the batch or DP, or leave VPP out"
        )
    if step.recompute.kind in ("uniform", "block"):
        yield (
            f"recompute {step.recompute.kind} counts the layers of a stage, and an interleaved "
            "pipeline has stages of several chunks; take full or kept_attention"
        )
    if step.offload.tensors != "none":
        yield (
            f"offload {step.offload.tensors} with an interleaved pipeline: each chunk would pin up "
            "to cap_gib for itself; leave one out"
        )


def _experts(step: TrainingStep) -> Iterator[str]:
    """Yield one sentence for each violated constraint of expert parallelism."""
    ep, etp, stage = step.ep, step.expert_tp, step.tp * step.cp * step.dp
    if not step.experts:
        if ep > 1 or step.etp is not None:
            yield f"EP is {ep} and ETP {etp}, but the model has no experts; leave both out"
        return
    if step.experts % ep:
        yield f"{step.experts} experts are not divisible by EP {ep}; EP may be " + _divisors(
            step.experts
        )
    if step.ffn_hidden % etp:
        yield (
            f"the {step.ffn_hidden:,} FFN rows of an expert are not divisible by ETP {etp}; ETP "
            f"may be {_divisors(step.ffn_hidden, step.tp)}"
        )
    if stage % (ep * etp):
        yield (
            f"EP {ep} x ETP {etp} = {ep * etp} ranks do not divide the {stage} of a pipeline stage "
            f"(TP {step.tp} x CP {step.cp} x DP {step.dp}); EP may be "
            + _divisors(step.experts, max(1, stage // etp))
        )


def _divisors(*numbers: int) -> str:
    """Return the common divisors of the numbers as text for a message."""
    common = [d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers)]
    return _listed(common)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}" if numbers[1:] else "1 only"
