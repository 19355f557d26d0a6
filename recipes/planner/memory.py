# SPDX-License-Identifier: Apache-2.0
"""Peak bytes of one rank in a step, by category.

The peak occurs at one of a few moments. For each the tensors alive are summed; the largest sum is
the result. Numbers per token on one rank: h hidden / TP (sequence parallelism shards the tensors
between the blocks), A heads x D and K KV heads x D, F inner width of the MLP, V vocabulary, each
over TP; e bytes per number. Without recompute a layer holds

    input  h,   norm  h,   q k v  A + 2K,   rotated q and k  A + K,   output  A,   log-sum-exp,
    middle h,   norm  h,   MLP  5F (gate and up, activation, product; 3F if fused; `Kernels`: GELU)

A norm after attention or the MLP keeps h more, one that is not before them h less. In FP8 the
inputs of products (both norms, the MLP's product) are kept in FP8 alone (`FP8_INPUT_BYTES`); what
head-chunked attention projects stays as it is.

With an all-to-all the exchanged q, k, v and output are kept instead of those before it, and the
output after the exchange back; head-chunked attention keeps only its output. Norms of q and k keep
what they are given. The table in `custom_modules.memory.config` lists what recompute leaves of it.
The moments:

    loss        kept tensors of all layers, of the last one also its offloaded ones, logits (or a
                tile of them) and the last layer's output, 3h
    MLP         kept tensors of the other layers, the whole last layer, 2F of gradients, gradient of
                its output (that of a norm after the MLP is over); or a tile of it and the
                accumulated gradients of its weights
    attention   kept tensors of the other layers, the layer up to its middle, attention's backward
                (`custom_modules.context_parallel.cost`) with what its kernel holds itself
                (`recipes.planner.kernels`), the gradient of the residual
    rebuild     the same with attention's forward instead

Derived from the modules and compared with the bytes of real steps, category by category, by
`benchmarks/planner_memory.py`. Pipeline: the first stage holds min(PP, micro-batches) forwards, the
last one and the loss (1F1B, arXiv 2104.04473); interleaved, the first has 1 + (PP - 1) / (PP VPP)
times as many. Optimizer and gradients: Megatron-Core's distributed
optimizer, fp32 gradients and, for bf16, 12 bytes a parameter over the ranks that hold it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from custom_modules.context_parallel.cost import AttentionShape
from custom_modules.memory.config import LayerKind
from recipes.planner.kernels import FUSED, Kernels
from recipes.planner.workload import Workload
from recipes.spec.layout import Fp8
from recipes.spec.units import GiB

FP8_COPIES = 2
"""Bytes of a weight in FP8 and its transpose, which Transformer Engine keeps through a step's
micro-batches in addition to the bf16 one."""
FP8_INPUT_BYTES = {"delayed": 1, "tensorwise": 1, "blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}
"""Bytes that Transformer Engine keeps per number of a product's input, with the scales: it keeps
one of the two orientations that it makes (2.9: `update_usage` in `module/linear.py` and
`layernorm_linear.py`). The output projection keeps attention's output, which attention keeps too
(Megatron-Core sets `save_original_input`), with `delayed` a copy in FP8."""
INPUTS_BYTES = 56
"""Ids, label, mask, position and document of a token, as the data module returns them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of the rank with the highest peak."""

    categories: dict[str, float]
    """Bytes at the peak, by category."""
    peak_in: str
    """The moment: loss, mlp, attention, rebuild, or optimizer."""
    stage: int
    """Pipeline stage of that rank, from 0."""
    host: float
    """Largest number of host bytes of a rank: offloaded activations, and Adam's."""
    offloaded: float
    """Largest number of those of activations, which the cap of the offload limits."""

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return sum(self.categories.values())

    @property
    def activations(self) -> float:
        """Bytes that depend on the tokens."""
        fixed = ("weights", "gradients", "optimizer", "reserve")
        return sum(size for name, size in self.categories.items() if name not in fixed)


def memory(workload: Workload, kernels: Kernels = FUSED) -> Memory:
    """Return the bytes of the rank with the highest peak, and the most host bytes of any rank."""
    stages = workload.unlike
    layer = _Layer(workload, kernels)
    offloaded = [_offloaded(workload, layer, stage) for stage in stages]
    adam = [16 * workload.shard(one) * workload.layout.optimizer_offload for one in stages]
    on_host = {
        "host": max(map(sum, zip(offloaded, adam, strict=True))),
        "offloaded": max(offloaded),
    }
    found = [_of_stage(workload, kernels, layer, stage, on_host) for stage in stages]
    return max(found, key=lambda one: one.total)


def input_bytes(workload: Workload) -> float:
    """Return the bytes of a layer's input on a rank."""
    return _Layer(workload, FUSED).x


def _of_stage(
    workload: Workload, kernels: Kernels, layer: "_Layer", stage: int, on_host: dict[str, float]
) -> Memory:
    fixed = _fixed(workload, kernels, stage)
    moment, held = max(layer.moments(stage), key=lambda one: sum(one[1].values()))
    return Memory(categories=fixed | held, peak_in=moment, stage=stage, **on_host)


def _fixed(workload: Workload, kernels: Kernels, stage: int) -> dict[str, float]:
    """Return the bytes that do not depend on the tokens, by category."""
    layout, weights = workload.layout, workload.weights(stage)
    sharding, replicas = layout.sharding, workload.replicas
    of_weights = replicas if sharding == "parameters" else 1
    of_gradients = replicas if sharding in ("gradients", "parameters") else 1
    of_optimizer = weights if sharding == "none" else workload.shard(stage)
    state = 8 if layout.precision == "fp32" else 12
    on_device = 1 - layout.optimizer_offload
    held = workload.element_bytes * weights / of_weights
    gradients = kernels.gradient_bytes * weights / of_gradients
    two_layers = min(2 * workload.layer_weights, weights)
    held *= "weights" not in kernels.on_host
    gradients *= "gradients" not in kernels.on_host
    if sharding == "parameters":  # gathered: the current layer and the next
        held += workload.element_bytes * two_layers
    if sharding in ("gradients", "parameters"):  # not reduced yet
        gradients += kernels.gradient_bytes * two_layers
    in_fp8 = workload.layer_weights
    if workload.degrees.heads_per_stage is not None:
        in_fp8 -= workload.qkv_weights
    held += FP8_COPIES * sum(map(workload.in_fp8, workload.stages[stage])) * in_fp8
    return {
        "weights": held,
        "gradients": gradients,
        "optimizer": state * of_optimizer * on_device,
        "reserve": kernels.reserve_gib * GiB,
    }


def _offloaded(workload: Workload, layer: "_Layer", stage: int) -> float:
    """Return the pinned bytes of offloaded activations."""
    layout = workload.layout
    in_flight = workload.chunks_in_flight(stage) / layout.vpp
    numbers = workload.stages[stage]
    held = layer.over(numbers, lambda number: {"host": layer.away(number)})["host"]
    return held * in_flight


class _Layer:
    """Bytes of one layer's tensors on a rank, in FP8 if the layout is."""

    def __init__(self, workload: Workload, kernels: Kernels) -> None:
        card, layout, e = workload.card, workload.layout, workload.element_bytes
        self.workload, self.kernels, self.tokens = workload, kernels, workload.tokens
        t = self.tokens
        self.x = t / layout.tp * card.hidden * e
        """A layer's input, [s / TP, b, hidden]."""
        self.heads = t * card.heads / layout.tp * card.head_dim * e
        self.kv_heads = t * card.kv_heads / layout.tp * card.head_dim * e
        self.lse = t * card.heads / layout.tp * 4
        self.result = self.heads + self.lse
        """Bytes that kept-attention recompute keeps in addition to the input."""
        self.ffn = t * card.ffn_hidden / layout.tp * e
        self.mlp = kernels.kept_of(card.facts) * self.ffn
        self.mlp_gradients = (kernels.mlp_gradients if card.facts.gated else 1) * self.ffn
        if card.facts.experts:  # each token goes to several, permuted before and after
            k, gathered = card.experts_per_token, self.x * layout.expert_tp
            most = k * workload.fullest_experts
            self.mlp = most * (self.mlp + gathered) + k * self.x
            self.mlp_gradients = most * (self.mlp_gradients + gathered)
        pattern = card.pattern
        self.tables = 1 if pattern is None or pattern.local_rope is None else 2
        """Rotations, each with its cos and sin."""
        self.by_head = workload.degrees.heads_per_stage is not None
        self.exchanged = workload.degrees.ulysses > 1
        self.norm = kernels.norm_kept * self.x * card.facts.pre_norm
        self.after = kernels.norm_kept * self.x * card.facts.post_norm
        """Kept of a norm after attention or the MLP: what it is given."""
        copied = self.heads + 2 * self.heads / workload.attention.heads * self._inner_kv
        self.copies = kernels.exchange_copies * copied * self.exchanged * (not self.by_head)
        fp8 = layout.fp8
        share = FP8_INPUT_BYTES[fp8.recipe] / e if fp8.recipe != "none" else 1.0
        self.mlp_norm, self.less = share * self.norm, (1 - share) * self.ffn
        """Kept of the norm before the MLP; what FP8 saves of the MLP's product."""
        self.mlp -= self.less
        self.norm = self.norm if self.by_head else self.mlp_norm
        self.projected = share * self.heads if fp8.recipe == "delayed" else 0.0
        """Kept by the output projection in addition to attention's output."""
        self.in_bf16 = self
        if fp8.bf16_first or fp8.bf16_last:
            self.in_bf16 = _Layer(replace(workload, layout=replace(layout, fp8=Fp8())), kernels)
        self.unrotated = self.heads + self.kv_heads if kernels.fused_qkv else 0.0
        """q and k before rotation, in one storage with v."""
        self.unnormed = self._unnormed() if card.facts.qk_norm and not self.by_head else 0.0
        self.holds_output = kernels.holds_output and layout.recompute.kind == "full"

    def _unnormed(self) -> float:
        """Return what norms of q and k keep of what they are given, beyond `unrotated`."""
        kernels, card = self.kernels, self.workload.card
        if card.facts.wide_qk_norm:  # heads that lie apart are copied next to one another
            return self.heads + self.kv_heads
        if not kernels.fused_qkv or kernels.norm_copies:
            return max(1, kernels.norm_kept - 1) * (self.heads + self.kv_heads)
        # Megatron-Core copies q out of the product where heads are grouped; k is a part of it.
        product = self.unrotated + self.kv_heads if self.exchanged else 0.0
        return self.heads * (card.kv_heads < card.heads) + product

    @property
    def _inner_kv(self) -> int:
        """KV heads after replication."""
        return max(self.workload.attention.kv_heads, self.workload.degrees.ulysses)

    @property
    def attention(self) -> float:
        """Bytes kept of the attention block without its input: norms, q, k, v and output."""
        ends = self.norm + self.x + self.unnormed + self.after + self.projected
        if self.by_head:
            return ends + self.result
        if self.exchanged:
            of_head = self.heads / self.workload.attention.heads
            return ends + 3 * self.heads + 2 * self._inner_kv * of_head + self.lse
        return ends + self.unrotated + self.heads + 2 * self.kv_heads + self.result

    @property
    def whole(self) -> dict[str, float]:
        """All bytes of a layer, by category."""
        mlp = 0.0 if self.workload.layout.tiling.mlp else self.mlp_norm + self.mlp + self.after
        return {"saved inputs": self.x, "attention": self.attention, "mlp": mlp}

    def of(self, number: int) -> "_Layer":
        """Return the bytes of layer `number`, from 1, which may be one in bf16."""
        return self if self.workload.in_fp8(number) else self.in_bf16

    def kept(self, number: int) -> dict[str, float]:
        """Return the bytes that layer `number`, from 1, holds between forward and backward."""
        recompute = self.workload.layout.recompute
        if recompute.kind == "selective":
            return self.of(number)._selective()
        if recompute.kind == "uniform":
            return {"saved inputs": self.x / recompute.layers}
        if recompute.kind == "block":
            (of_stage,) = (layers for layers in self.workload.stages if number in layers)
            first = number - of_stage[0] < recompute.layers
            return {"saved inputs": self.x} if first else self.of(number).whole
        kind: LayerKind = recompute.of_layer(number)
        if kind == "none":
            return self.of(number).whole
        held = self.x + self.result * (kind == "kept_attention")
        return {"saved inputs": held - self.away(number)}

    def away(self, number: int) -> float:
        """Return the bytes of a layer that are offloaded to the host."""
        recompute, offload = self.workload.layout.recompute, self.workload.layout.offload
        kind = recompute.of_layer(number)
        if kind == "none" or not offload.takes(number):
            return 0.0
        with_attention = offload.attention and kind == "kept_attention"
        return self.x * offload.inputs + self.result * with_attention

    def over(
        self, numbers: Sequence[int], of_layer: Callable[[int], dict[str, float]]
    ) -> dict[str, float]:
        """Return the sum of `of_layer` over some layers; evaluate it once if they are the same."""
        recompute, offload = self.workload.layout.recompute, self.workload.layout.offload
        same = self.in_bf16 is self and recompute.every == offload.every == 1
        if same and recompute.kind != "block":
            return {name: len(numbers) * size for name, size in of_layer(numbers[0]).items()}
        found: dict[str, float] = {}
        for number in numbers:
            _add(found, of_layer(number))
        return found

    def _selective(self) -> dict[str, float]:
        whole, modules = self.whole, self.workload.layout.recompute.modules
        if "core_attn" in modules:
            whole["attention"] -= self.lse
        if "mlp" in modules:
            whole["mlp"] = self.x * self.workload.card.facts.pre_norm
        return whole

    def moments(self, stage: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the moments that may be the peak, each by category."""
        workload, layout = self.workload, self.workload.layout
        numbers = workload.stages[stage]
        chunks = workload.chunks_in_flight(stage)
        in_flight = chunks / layout.vpp
        kept = self.over(numbers, self.kept)
        every = {name: size * in_flight for name, size in kept.items()}
        always = {
            "other": INPUTS_BYTES * self.tokens * chunks,
            "attention": 4 * self.tables * workload.card.head_dim * self.tokens,  # cos, sin: fp32
            "communication": self.x * layout.tp if layout.tp > 1 else 0.0,
        }
        if self.kernels.unknown_inputs:
            always["kernels"] = self.kernels.unknown_inputs * self.x
        if 0 < stage == layout.pp - 1 and workload.micro_batches > 1:
            # 1F1B frees the gradient sent back for a micro-batch at the next one's backward.
            always["communication"] += self.x
        if layout.vpp > 1:  # tensors received ahead; outputs, cos and sin of each chunk in flight
            always["communication"] += self.x * (1 + chunks)
            always["attention"] *= chunks
        _add(every, always)
        last = numbers[-1]
        if stage == layout.pp - 1:  # the last layer's offload has not finished yet
            stays = {"saved inputs": self.away(last)}
            yield "loss", _sum(every, _sum(stays, {"loss": self._loss()}))
        if workload.card.tied_embeddings and layout.pp == 1:  # the gradient waits for both uses
            tied = (
                workload.vocabulary_weights * workload.element_bytes * self.kernels.weight_gradients
            )
            _add(every, {"loss": tied})
        # In the backward of the last layer its kept and its recomputed tensors both exist.
        chunk = layout.recompute.layers if layout.recompute.kind == "uniform" else 1
        others = _sum(every, {name: -chunk * size for name, size in self.kept(last).items()})
        layer = self.of(last)
        others = _sum(others, {name: size * (chunk - 1) for name, size in layer.whole.items()})
        others["saved inputs"] = max(0.0, others.get("saved inputs", 0.0))
        yield "mlp", _sum(others, layer._mlp_backward())
        rebuilt = layout.recompute.kind != "none"
        for shape, freed in self._kinds(numbers):
            held = _sum(others, {name: -size for name, size in freed.items()})
            held["saved inputs"] = max(0.0, held["saved inputs"])
            yield "attention", _sum(held, layer._attention_backward(shape))
            yield "rebuild", _sum(held, layer._attention_forward(rebuilt, shape))

    def _kinds(self, numbers: Sequence[int]) -> Iterator[tuple[AttentionShape, dict[str, float]]]:
        """Yield the attention of the last layer of each kind, and what layers after it held."""
        windowed, shape = self.workload.windowed, self.workload.attention
        seen: set[bool] = set()
        freed: dict[str, float] = {}
        for number in reversed(numbers):
            local = windowed([number]) > 0
            if local not in seen:
                seen.add(local)
                yield replace(shape, window=self.workload.window if local else None), dict(freed)
            if len(seen) == 1 + (self.workload.window is not None):
                return
            _add(freed, self.kept(number))

    def _loss(self) -> float:
        """Return the bytes of the loss: norm, head and cross-entropy."""
        workload, tiling, tp = self.workload, self.workload.layout.tiling, self.workload.layout.tp
        vocab, e = workload.vocabulary_rows, workload.element_bytes
        ends = 3 * self.x
        if not tiling.loss:
            a_logit = 4 if e == 4 else self.kernels.logit_bytes
            gathered = self.x * tp if tp > 1 else 0.0
            temporary = workload.vocabulary_weights * e * self.kernels.weight_gradients
            return ends + self.tokens * vocab * a_logit + gathered + temporary
        tile = min(tiling.loss_tile, self.tokens)
        sums = workload.vocabulary_weights * (4 if e == 4 else 6)
        return ends + sums + tile * (vocab + 2 * workload.card.hidden) * e

    def _mlp_backward(self) -> dict[str, float]:
        layout, recompute = self.workload.layout, self.workload.layout.recompute
        by_megatron = recompute.kind == "uniform" or "mlp" in recompute.modules
        most = max(map(len, self.workload.stages))
        by_megatron |= recompute.kind == "block" and recompute.layers >= most
        by_megatron |= self.holds_output
        found = dict(self.whole)
        # The MLP's output, which our recompute does not form.
        if layout.tiling.mlp:
            kept = recompute.of_layer(self.workload.card.layers) == "none"
            kept |= self.holds_output
            found["mlp"] = self.x * (1 + kept) + self._mlp_tile()
        else:
            # The gradient of the product is in bf16 where the product was kept in FP8.
            found["mlp"] += self.less + self.mlp_gradients + self.x * by_megatron - self.after
        return _sum(found, {"loss": self.x})

    def _mlp_tile(self) -> float:
        """Return the bytes of the tiled MLP, without its input and the gradients of both its ends.

        The peak is when the gradients of the down projection, or of all projections, exist.
        """
        layout, card, e = self.workload.layout, self.workload.card, self.workload.element_bytes
        own, most = self.tokens // layout.tp, layout.tiling.mlp_tile
        matrices = 3 if card.facts.gated else 2
        weights = card.hidden * card.ffn_hidden / layout.tp * self.kernels.weight_gradients
        sums = 4 * matrices * weights * (most < own or e < 4)  # one tile's gradients are the sums
        gradients = (self.kernels.mlp_gradients if card.facts.gated else 1) * card.ffn_hidden
        ends = (1 + card.facts.pre_norm) * card.hidden
        inner = self.kernels.kept_of(card.facts) * card.ffn_hidden
        tile = min(most, own) * e
        down = tile * (inner + gradients + ends) + e * weights
        return sums + max(down, tile * (gradients + ends) + matrices * e * weights)

    def _attention_backward(self, shape: AttentionShape) -> dict[str, float]:
        home = 2 * self.heads if self.exchanged and not self.by_head else 0.0
        dead = 0.0 if self.by_head or self.exchanged else self.unrotated
        inside = self.norm + dead + self.unnormed + shape.backward_peak - home + self.copies
        if self.by_head:
            # Gradients of the norm's output and of the projection, accumulated over head stages.
            card = self.workload.card
            rows = (card.heads + 2 * card.kv_heads) * card.head_dim / self.workload.layout.tp
            inside += self.x + rows * card.hidden * self.workload.element_bytes
        inside += self._scratch()
        ends = self.workload.layout.recompute.kind in ("uniform", "block")
        ends |= self.holds_output
        found = {
            "saved inputs": self.x, "attention": inside, "mlp": self.x, "loss": self.x * ends,
        }  # fmt: skip
        if self.workload.layout.offload.inputs:
            # The next layer's input is fetched after the kernel, or the ring, has freed its memory.
            alone = replace(shape, degrees=replace(shape.degrees, ring=1)).backward_peak
            found["attention"] += max(0.0, self.x - (shape.backward_peak - alone))
        return found

    def _scratch(self) -> float:
        """Return the bytes that the attention kernel itself holds in its backward."""
        shape = self.workload.attention
        of_heads = self.kernels.attention.bytes_of(*shape.heads_of_kernel)
        return of_heads * shape.slice_bytes / shape.element_bytes

    def _attention_forward(self, rebuilt: bool, shape: AttentionShape) -> dict[str, float]:
        dead = 0.0 if self.by_head else self.unrotated
        inside = self.norm + dead + self.unnormed
        inside += shape.forward_peak + self.copies
        return {"saved inputs": self.x, "attention": inside, "loss": self.x * rebuilt}


def _add(into: dict[str, float], what: dict[str, float]) -> None:
    for name, size in what.items():
        into[name] = into.get(name, 0.0) + size


def _sum(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    found = dict(one)
    _add(found, other)
    return found
