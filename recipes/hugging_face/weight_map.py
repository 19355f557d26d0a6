# SPDX-License-Identifier: Apache-2.0
"""Map between the weights of Hugging Face and Megatron-Core, for every family.

Megatron's distributed checkpoint has one global tensor for each weight of a layer; its first axes
are the layers (and the experts of a layer). A `WeightShard` is one layer's part of it and the
tensors of a Hugging Face checkpoint that it consists of. They differ in three places:

* query, key and value are one tensor in Megatron, with the query heads, the key and the value of
  each KV head in turn;
* the MLP's gate and up projections are one tensor in Megatron, the gate first;
* only Megatron has rows that pad the vocabulary.

All names of a model follow from its card, so a tensor that only one side has is detected before
anything is converted. `recipes.spec.families` states how families differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from recipes.spec.model_card import ModelCard

PREFIX = "module."
"""Prefix of a model's weights in NeMo's checkpoints; other names belong to the optimizer."""

Kind = Literal["same", "rows", "qkv", "gate_up"]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightShard:
    """One part of a global Megatron tensor, and the Hugging Face tensors it consists of."""

    megatron: str
    at: Shape
    """Layer and expert: indices of the part in the first axes."""
    of: Shape
    """Sizes of these axes."""
    kind: Kind
    hugging_face: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Shapes of the Hugging Face tensors."""

    @property
    def shape(self) -> Shape:
        """Shape of the part in Megatron, without padding."""
        rows = sum(shape[0] for shape in self.shapes)
        return (rows, *self.shapes[0][1:])


def weight_map(card: ModelCard) -> Iterator[WeightShard]:
    """Yield every weight of the model: embedding, layers in order, last norm, LM head if untied."""
    table = (card.vocab, card.hidden)
    yield _whole("embedding.word_embeddings.weight", "model.embed_tokens.weight", table, "rows")
    for layer in range(card.layers):
        yield from _layer(card, layer)
    for name in _norm(card):
        at = f"decoder.final_layernorm.{name}"
        yield _whole(at, f"model.norm.{name}", (card.hidden,))
    if not card.tied_embeddings:
        yield _whole("output_layer.weight", "lm_head.weight", table, "rows")


def _whole(megatron: str, hugging_face: str, shape: Shape, kind: Kind = "same") -> WeightShard:
    return WeightShard(
        megatron=PREFIX + megatron,
        at=(),
        of=(),
        kind=kind,
        hugging_face=(hugging_face,),
        shapes=(shape,),
    )


def _norm(card: ModelCard) -> tuple[str, ...]:
    return ("weight", "bias") if card.facts.normalization == "LayerNorm" else ("weight",)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """Names and indices of the weights of one layer, or of one of its experts, on both sides."""

    layer: int
    layers: int
    expert: tuple[int, int] | None = None
    """Number of the expert, and number of experts."""

    def piece(self, megatron: str, shapes: Mapping[str, Shape], kind: Kind = "same") -> WeightShard:
        """Return the piece of tensors with these shapes by name."""
        of_expert = () if self.expert is None else (self.expert,)
        at, of = zip((self.layer, self.layers), *of_expert, strict=True)
        return WeightShard(
            megatron=f"{PREFIX}decoder.layers.{megatron}",
            at=at,
            of=of,
            kind=kind,
            hugging_face=tuple(f"model.layers.{self.layer}.{name}" for name in shapes),
            shapes=tuple(shapes.values()),
        )


def _layer(card: ModelCard, number: int) -> Iterator[WeightShard]:
    """Yield the weights of one layer, expert by expert."""
    layer = _Layer(layer=number, layers=card.layers)
    hidden, queries, keys = card.hidden, card.heads * card.head_dim, card.kv_heads * card.head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for name in _norm(card) if card.facts.pre_norm else ():
        yield layer.piece(
            f"self_attention.linear_qkv.layer_norm_{name}", {f"input_layernorm.{name}": (hidden,)}
        )
    weights = {f"self_attn.{name}.weight": (count, hidden) for name, count in rows.items()}
    yield layer.piece("self_attention.linear_qkv.weight", weights, "qkv")
    if card.facts.qkv_bias:
        biases = {f"self_attn.{name}.bias": (count,) for name, count in rows.items()}
        yield layer.piece("self_attention.linear_qkv.bias", biases, "qkv")
    if card.facts.qk_norm:
        for one, width in (("q", queries), ("k", keys)):
            size = width if card.facts.wide_qk_norm else card.head_dim
            shapes = {f"self_attn.{one}_norm.weight": (size,)}
            yield layer.piece(f"self_attention.{one}_layernorm.weight", shapes)
    yield layer.piece(
        "self_attention.linear_proj.weight", {"self_attn.o_proj.weight": (hidden, queries)}
    )
    # Before experts the norm is a separate module; before a single MLP it is part of linear_fc1.
    norm = "pre_mlp_layernorm." if card.experts else "mlp.linear_fc1.layer_norm_"
    before_mlp = "post_attention_layernorm"
    if card.facts.post_norm:  # then Hugging Face's name is that of the norm after attention
        after = {"self_attention.linear_proj": before_mlp,
                 "mlp.linear_fc2": "post_feedforward_layernorm"}  # fmt: skip
        for module, theirs in after.items():
            yield layer.piece(f"{module}.post_layernorm.weight", {f"{theirs}.weight": (hidden,)})
        before_mlp = "pre_feedforward_layernorm"
    for name in _norm(card) if card.facts.pre_norm else ():
        yield layer.piece(f"{norm}{name}", {f"{before_mlp}.{name}": (hidden,)})
    if card.experts:
        yield from _experts(card, layer)
    else:
        yield from _mlp(card, layer)


def _mlp(card: ModelCard, layer: _Layer) -> Iterator[WeightShard]:
    wide = (card.ffn_hidden, card.hidden)
    if card.facts.gated:
        shapes = {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide}
        yield layer.piece("mlp.linear_fc1.weight", shapes, "gate_up")
    else:
        yield layer.piece("mlp.linear_fc1.weight", {"mlp.up_proj.weight": wide})
    yield layer.piece("mlp.linear_fc2.weight", {"mlp.down_proj.weight": wide[::-1]})


_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""Hugging Face's names of a layer's experts and of their gate, up and down, by family."""


def _experts(card: ModelCard, layer: _Layer) -> Iterator[WeightShard]:
    """Yield router and experts."""
    wide = (card.ffn_hidden, card.hidden)
    module, (gate, up, down) = _EXPERTS[card.family]
    yield layer.piece("mlp.router.weight", {f"{module}.gate.weight": (card.experts, card.hidden)})
    for number in range(card.experts):
        one = replace(layer, expert=(number, card.experts))
        at = f"{module}.experts.{number}"
        gate_up = {f"{at}.{gate}.weight": wide, f"{at}.{up}.weight": wide}
        yield one.piece("mlp.experts.experts.linear_fc1.weight", gate_up, "gate_up")
        downs = {f"{at}.{down}.weight": wide[::-1]}
        yield one.piece("mlp.experts.experts.linear_fc2.weight", downs)


def states(card: ModelCard) -> Iterator[str]:
    """Yield the keys of the extra states of modules, empty in a model not trained in FP8.

    They include those of Transformer Engine's modules and of Megatron's own; a model reads the keys
    of its modules and ignores the others.
    """
    yield f"{PREFIX}decoder.final_layernorm._extra_state/shard_0_1"
    of_layer = [
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "self_attention.core_attention",
        "self_attention.q_layernorm",
        "self_attention.k_layernorm",
    ]
    projections = ("linear_fc1", "linear_fc2")
    if card.experts:
        of_layer.append("pre_mlp_layernorm")
    else:
        of_layer += [f"mlp.{name}" for name in projections]
    layers = f"{PREFIX}decoder.layers"
    for layer in range(card.layers):
        for module in of_layer:
            yield f"{layers}.{module}._extra_state/shard_{layer}_{card.layers}"
        for expert in range(card.experts):
            for name in projections:
                place = f"shard_{layer}.{expert}_{card.layers}.{card.experts}"
                yield f"{layers}.mlp.experts.experts.{name}._extra_state/{place}"
