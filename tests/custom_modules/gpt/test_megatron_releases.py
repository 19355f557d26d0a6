# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch

from custom_modules.attention.documents import Documents
from custom_modules.context_parallel.config import ContextParallelKind
from custom_modules.gpt.core_attention import degrees_for, ignored_settings
from custom_modules.gpt.megatron_releases import parameters_of, preprocessed, require_unset
from custom_modules.gpt.moe_router import refuse_experts
from custom_modules.memory.config import UNTILED

TABLE = torch.zeros(2, 4, 1, 1, 2)


def group(size: int) -> SimpleNamespace:
    return SimpleNamespace(size=lambda: size)


def test_a_padding_mask_is_refused_if_it_is_set_and_handed_back_if_it_is_not():
    require_unset({"padding_mask": None})
    require_unset({"packed_seq_params": 1, "padding_mask": None}, but="packed_seq_params")
    with pytest.raises(ValueError, match="do not take padding_mask"):
        require_unset({"padding_mask": torch.zeros(1, 4)})
    assert len(preprocessed(None, TABLE, {})) == 5
    six = preprocessed(None, TABLE, {"padding_mask": None})
    assert six[1] is TABLE
    assert six[5:] == (None,)


def test_releases_are_told_apart_by_parameters():
    assert "but" in parameters_of(require_unset)
    assert "valid_token_count" not in parameters_of(require_unset)


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention_output_gate", True), ("qk_clip", True), ("experimental_attention_variant", "dsa")],
)
def test_a_field_of_a_later_release_that_attention_would_ignore_is_named(name, value):
    assert [*ignored_settings({name: None if value == "dsa" else False})] == []
    (sentence,) = ignored_settings({name: value})
    assert sentence.startswith(f"{name} is {value!r}; long-context attention supports only")


def test_a_field_of_a_later_release_that_changes_routing_is_refused():
    config = SimpleNamespace(num_moe_experts=4, moe_latent_size=64, fp8=None)
    with pytest.raises(ValueError, match="moe_latent_size is 64; layers with experts train with"):
        refuse_experts(config, UNTILED, transformer_engine=False)


def test_kv_heads_that_tensor_ranks_do_not_divide_are_refused():
    config = SimpleNamespace(num_attention_heads=8, num_query_groups=2, kv_channels=4)
    groups = SimpleNamespace(cp=group(1), tp=group(4))
    with pytest.raises(ValueError, match="num_query_groups is 2, which 4 tensor parallel ranks"):
        degrees_for(
            config, ContextParallelKind(kind="ring"), groups, seq_length=8, ranks_per_node=8
        )


def test_documents_have_what_megatron_reads_of_packed_sequences():
    documents = Documents.of([[3, 5]])
    assert (documents.qkv_format, documents.cp_group) == ("sbhd", None)
