# SPDX-License-Identifier: Apache-2.0
"""The relations that card, stage, layout and machine must keep, each a sentence when broken.

Pure functions of numbers: the recipe builder calls them with nouns, `recipes.check` with what it
reads back from a resolved recipe, so that an override is held to the same laws.
"""

from collections.abc import Iterator

from custom_modules.context_parallel_kind import ContextParallelKind, degrees


def broken(
    *,
    seq_length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int,
    vocab: int,
    tp: int,
    cp: int,
    cp_kind: ContextParallelKind,
    pp: int,
    world_size: int,
    ranks_per_node: int,
    global_batch: int,
    micro_batch: int,
) -> Iterator[str]:
    """Yield one sentence for each law that these numbers break.

    `global_batch` and `micro_batch` are in sequences; `world_size` is nodes times ranks per node.
    `heads` and `kv_heads` are the model's.
    """
    sizes = {
        "sequence length": seq_length, "heads": heads, "KV heads": kv_heads, "layers": layers,
        "head size": head_dim, "vocabulary": vocab, "TP": tp, "CP": cp, "PP": pp,
        "world size": world_size, "ranks per node": ranks_per_node,
        "global batch": global_batch, "micro-batch": micro_batch,
    }  # fmt: skip
    too_small = [
        f"{name} is {size}; it must be at least 1" for name, size in sizes.items() if size < 1
    ]
    if too_small:
        yield from too_small
        return
    model_ranks = tp * cp * pp
    if world_size % model_ranks:
        yield (
            f"world size {world_size} does not match the layout: TP {tp} x CP {cp} x PP {pp} = "
            f"{model_ranks} ranks, so it must be a multiple of {model_ranks}"
        )
        return
    dp = world_size // model_ranks
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
            degrees(
                cp_kind,
                size=cp,
                heads=heads // tp,
                kv_heads=kv_heads // tp,
                head_dim=head_dim,
                seq_length=seq_length,
                ranks_per_link=max(1, ranks_per_node // tp),
            )
        except ValueError as error:
            yield str(error)
    if head_dim % 2:
        yield f"the head size is {head_dim}; rotation pairs dimensions, so it must be even"
    if vocab % tp:
        yield f"a vocabulary of {vocab:,} rows is not divisible by TP {tp}"
    if layers % pp:
        yield f"{layers} layers are not divisible by PP {pp}; PP may be {_divisors(layers)}"
    if global_batch % (micro_batch * dp):
        yield (
            f"a batch of {global_batch} sequences of {seq_length:,} tokens is not divisible by "
            f"micro-batch {micro_batch} x DP {dp}; use fewer DP ranks, or a multiple of "
            f"{micro_batch * dp * seq_length:,} tokens per batch"
        )


def broken_schedule(*, max_steps: int, lr: float) -> Iterator[str]:
    """Yield one sentence for each law of the schedule that is broken."""
    if max_steps < 1:
        yield f"max_steps is {max_steps}; a stage has at least one step"
    if not 0 < lr < 1:
        yield f"the learning rate is {lr:g}; it must lie between 0 and 1"


def _divisors(*numbers: int) -> str:
    """Return the common divisors of the numbers as words for a message."""
    common = [d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers)]
    return ", ".join(map(str, common[:-1])) + f" or {common[-1]}" if common[1:] else "1 only"
