# SPDX-License-Identifier: Apache-2.0
"""The rotation of a built model, read from what its forward uses, not from its config.

`rotation_of` reads the frequencies and the temperature that tables are made of, and the pairing
that layers rotate by, in every pipeline chunk. `TableProbe` compares the table that the first
layer's attention of each chunk gets with cos and sin of a few positions, in float64.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from custom_modules.gpt.model import LongContextGPT
from custom_modules.gpt.self_attention import LongContextSelfAttention
from custom_modules.rope.config import RopeScaling
from custom_modules.rope.in_effect import RotationInEffect
from custom_modules.rope.layers import LayerPattern
from custom_modules.rope.rotary import inverse_frequencies
from custom_modules.rope.skipped_positions import gene_frequencies

PROBED = 8
"""Positions of a sequence that are compared."""
ROUNDING = 1e-6
"""Difference of cos or sin in fp32, of about 1, that is rounding: its numbers are 6e-8 apart."""


def chunks_of(model: nn.Module) -> Iterator[LongContextGPT]:
    """Yield the models of this rank: one for each of its pipeline chunks, whatever wraps them."""
    return (module for module in model.modules() if isinstance(module, LongContextGPT))


def rotation_of(model: nn.Module, length: int) -> RotationInEffect:
    """Return what the chunks of a built model rotate sequences of `length` tokens by.

    Raises ValueError if they differ from one another.
    """
    found: RotationInEffect | None = None
    for chunk in chunks_of(model):
        _require_layers(chunk)
        device = next((parameter.device for parameter in chunk.parameters()), torch.device("cpu"))
        for interleaved in _pairings(chunk):
            own = chunk.rotation.in_effect(length, device, interleaved=interleaved)
            if chunk.pattern is not None:
                own = replace(own, layers=chunk.pattern.describe(base=False))
            if chunk.local_rotation is not None:
                local = chunk.local_rotation.in_effect(length, device, interleaved=interleaved)
                own = replace(own, local=local)
            why = "" if found is None else own.difference(found)
            if why:
                raise ValueError(f"layers of one model rotate by different frequencies: {why}")
            found = own
    if found is None:
        raise TypeError(f"{type(model).__name__} has no LongContextGPT")
    return found


def _require_layers(chunk: LongContextGPT) -> None:
    """Raise ValueError if a layer was built otherwise than the pattern of its model."""
    for layer in attentions_of(chunk):
        number, pattern = layer.layer_number, chunk.pattern
        turn = "stage" if pattern is None else pattern.turn_of(number)
        window = None if pattern is None else pattern.window_of(number)
        built = getattr(layer.core_attention, "window", None)
        if layer.turn != turn or built != window:
            raise ValueError(
                f"layer {number} rotates by {layer.turn} with a window of {built}, and by the "
                f"model's pattern it would by {turn} with {window}"
            )


def attentions_of(chunk: LongContextGPT) -> list[LongContextSelfAttention]:
    """Return the attention of each layer of a chunk, in order."""
    return [module for module in chunk.modules() if isinstance(module, LongContextSelfAttention)]


def _pairings(chunk: LongContextGPT) -> set[bool]:
    """Return how layers pair dimensions; a chunk without a layer would do as its config says."""
    own = {bool(layer.config.rotary_interleaved) for layer in attentions_of(chunk)}
    return own or {bool(chunk.config.rotary_interleaved)}


class TableProbe:
    """Compare the rotary tables of the next forward of each chunk with a stated rotation."""

    def __init__(
        self, model: nn.Module, stated: RopeScaling, pattern: LayerPattern | None = None
    ) -> None:
        """Attach to the chunks of a model, to one layer of each rotation; `remove` detaches."""
        own = None if pattern is None else pattern.local_rope
        of_turn = {"stage": stated} | ({} if own is None else {"local": own})
        self.wrong = ""
        """The first difference in words; empty if there is none so far."""
        self.compared = 0
        """Layers whose table was compared."""
        self.attached = 0
        """Layers to compare: one of each rotation in each chunk."""
        self._hooks: list[Any] = []
        for chunk in chunks_of(model):
            for turn, rope in of_turn.items():
                layers = [layer for layer in attentions_of(chunk) if layer.turn == turn]
                if layers:
                    self._attach(chunk, layers[0], rope)

    def _attach(
        self, chunk: LongContextGPT, layer: LongContextSelfAttention, stated: RopeScaling
    ) -> None:
        waiting: list[tuple[Tensor, Tensor | None]] = []

        def forward_begins(_: Any, inputs: tuple[Any, ...], given: dict[str, Any]) -> None:
            positions = given["position_ids"] if "position_ids" in given else inputs[1]
            waiting[:] = [(positions, given.get("rope_scale"))]

        def attention_begins(_: Any, inputs: tuple[Any, ...], given: dict[str, Any]) -> None:
            table = given["rotary_pos_emb"] if "rotary_pos_emb" in given else inputs[2]
            if not waiting:  # a layer that is run again for its gradient
                return
            positions, scale = waiting.pop()
            for hook in hooks:
                hook.remove()
            self.compared += 1
            own = layer.table_of(table)
            drawn = scale if layer.turn == "stage" else None
            self.wrong = self.wrong or _difference(chunk, stated, own, positions, drawn)

        hooks = (
            chunk.register_forward_pre_hook(forward_begins, with_kwargs=True),
            layer.register_forward_pre_hook(attention_begins, with_kwargs=True),
        )
        self._hooks += hooks
        self.attached += 1

    def remove(self) -> None:
        """Detach from the chunks that have not run."""
        for hook in self._hooks:
            hook.remove()


def _difference(
    chunk: LongContextGPT,
    stated: RopeScaling,
    table: Tensor | None,
    positions: Tensor,
    scale: Tensor | None,
) -> str:
    """Return how cos and sin of some positions differ from what is stated; empty if they do not."""
    if table is None:
        return "attention gets no rotary table"
    length, size = positions.shape[1] * chunk.cp_group.size(), chunk.config.kv_channels
    if scale is None:
        frequencies, _ = inverse_frequencies(stated, size, length)
    else:
        frequencies = gene_frequencies(stated, size, float(scale[0]))
    at = torch.linspace(0, positions.shape[1] - 1, min(PROBED, positions.shape[1])).long()
    probed = positions[0, at.to(positions.device)].cpu()
    cos, sin = table[:, at.to(table.device), 0, 0].double().cpu()
    if cos.shape[1] != len(frequencies):
        return f"attention rotates {cos.shape[1]} pairs instead of {len(frequencies)}"
    angles = probed.double()[:, None] * frequencies
    temperature = stated.temperature
    away = torch.stack([cos - temperature * angles.cos(), sin - temperature * angles.sin()])
    worst = away.abs().amax(0)
    if float(worst.max()) <= ROUNDING * max(1.0, temperature):
        return ""
    row, pair = divmod(int(worst.argmax()), worst.shape[1])
    return (
        f"at position {int(probed[row]):,} attention gets cos {float(cos[row, pair]):.6f} and "
        f"sin {float(sin[row, pair]):.6f} for pair {pair + 1} of {len(frequencies)} instead of "
        f"{temperature * float(angles[row, pair].cos()):.6f} and "
        f"{temperature * float(angles[row, pair].sin()):.6f}"
    )
