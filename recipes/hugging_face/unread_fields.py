# SPDX-License-Identifier: Apache-2.0
"""Fields of config.json that nothing here reads.

A field that changes what a model computes must not be ignored, whichever library knows it, so no
list of such fields would be complete. The reader notices instead which fields are read (`Fields`).
Of the others, those in `WITHOUT_EFFECT` have none on the numbers of a trained model, an unset one
has none either, nor one that states what is computed anyway (`stated_again`); one whose name speaks
of attention, positions, scales or gates is refused, and the rest is told.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.hugging_face.config_fields import CONFIG
from recipes.spec.model_card import ModelCard

WITHOUT_EFFECT = frozenset({
    # identity and storage
    "architectures", "dtype", "model_type", "name_or_path", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers_version", "use_bfloat16", "pretraining_tp", "use_cache",
    # training
    "gradient_checkpointing", "initializer_range", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise",
    # tokens and generation
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "do_sample", "length_penalty", "max_length", "min_length",
    "num_beams", "num_beam_groups", "num_return_sequences", "repetition_penalty", "temperature",
    "top_k", "top_p", "typical_p", "early_stopping", "diversity_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "remove_invalid_values",
    "return_dict", "return_dict_in_generate", "output_scores",
    # other heads and tasks of transformers
    "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
    "finetuning_task", "chunk_size_feed_forward", "classifier_dropout",
    # with windows only, or with layers without experts, which are read
    "max_window_layers", "intermediate_size",
})  # fmt: skip
"""Their first underscore is left out."""

OF_POSITIONS = (
    "dual_chunk_attention_config", "use_dynamic_ntk", "use_logn_attn", "alibi", "use_alibi",
)  # fmt: skip
"""Fields by which positions are not those of the rotation; vLLM and some models compute them."""

_COMPUTED = re.compile(
    "attn|attention|rope|rotary|alibi|yarn|ntk|logn|chunk|window|stride|spars|sink|segment|memory|"
    "causal|interleav|compress|scal|multiplier|softcap|logit|clip|residual|qk_|norm_type|norm_pos|"
    "bias|gate|quant|expert|top_k|position_emb|positional|pe_type|normali|mup_|shared_layer"
)
"""Parts of names; a field that adds weights or changes their shapes is refused by these too."""
_BY_KERNEL = re.compile(
    "dropout|pdrop|flash|fuse|sdpa|impl|backend|kernel|recompute|checkpointing|dtype|"
    "memory_efficient|softmax_in_fp32"
)
"""How a computation is carried out, or what is dropped in training."""
_FACTORS = re.compile("multiplier|scal|factor|ratio")


class Fields(dict[str, Any]):
    """A config.json that records in `names` which fields are read, by name, from it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take the fields; none of them is read yet."""
        super().__init__(config)
        self.names = set[str]()

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field and record it."""
        self.names.add(key)
        return super().get(key, default)


def require_positions(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a field of `OF_POSITIONS` that is in use."""
    for key in OF_POSITIONS:
        if _in_use(key, config.get(key)):
            raise ValueError(_refused(key, config[key], "which changes positions or attention"))


def require_computed(unread: Mapping[str, Any], card: ModelCard) -> None:
    """Raise ValueError for the first field that may change what the card's model computes."""
    for key, value in unread.items():
        if _may_compute(key) and _in_use(key, value):
            why = f"and the {card.facts.architecture} trained here does not"
            raise ValueError(_refused(key, value, why))


def stated_again(fields: Mapping[str, Any], card: ModelCard) -> set[str]:
    """Return the fields, which some configs have, that say what the model computes anyway."""
    meant = _computed_anyway(card)
    return {
        key
        for key, value in fields.items()
        if (value.lower() if isinstance(value, str) else value) in meant.get(key, ())
    }


def _computed_anyway(card: ModelCard) -> dict[str, tuple[Any, ...]]:
    rope, facts = card.native_rope, card.facts
    part = (rope.partial_rotary_factor,)
    rotary = ("rope", "rotary", "rotary_embedding")
    return {
        **dict.fromkeys(("rotary_pct", "rotary_percent", "rope_pct", "rope_percent"), part),
        **dict.fromkeys(("rotary_base", "rotary_emb_base", "rope_base"), (rope.base,)),
        **dict.fromkeys(("position_embedding_type", "positional_embedding", "pe_type"), rotary),
        **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), (facts.qk_norm,)),
        **dict.fromkeys(("causal", "is_causal", "use_causal_mask"), (True,)),
        **dict.fromkeys(("attn_type", "attention_type"), ("full", "causal")),
        "rotary_dim": (round(card.head_dim * rope.partial_rotary_factor),),
        "rope_type": ("default", rope.method),
        "attention_head_dim": (card.head_dim,),
        "gated_mlp": (facts.gated,),
        "norm_type": ("rms", "rmsnorm", "rms_norm"),
    }


def unread_notes(unread: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence with the fields that are neither read nor known to be without effect."""
    names = [key for key, value in unread.items() if not _known(key) and _in_use(key, value)]
    if names:
        yield f"its config.json has {', '.join(names)}, which nothing here reads"


def _refused(key: str, value: Any, why: str) -> str:
    shown = str(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return (
        f"{CONFIG} has {key} {shown}, {why}; it is not computed here, so remove the field only if "
        "the weights are used without it, and state --native-context if their context depends on it"
    )


def _known(key: str) -> bool:
    name = key.lower().removeprefix("_")
    return name in WITHOUT_EFFECT or _BY_KERNEL.search(name) is not None


def _may_compute(key: str) -> bool:
    return not _known(key) and _COMPUTED.search(key.lower()) is not None


def _in_use(key: str, value: Any) -> bool:
    """Return whether a value is another than the one that switches a field off."""
    factor_of_one = _FACTORS.search(key) is not None and value == 1 and value is not True
    return bool(value) and not factor_of_one
