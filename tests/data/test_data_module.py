# SPDX-License-Identifier: Apache-2.0
"""What a sample of the store says about its documents."""

import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from custom_modules.documents import Documents
from data.module import NumberedDataset, StoreDataModule

LENGTH = 512


def samples(store, documents: str) -> list[dict[str, torch.Tensor]]:
    module = StoreDataModule(str(store), LENGTH, 1, 1, documents=documents)
    builder = BlendedMegatronDatasetBuilder(
        NumberedDataset, [40, 1, 1], lambda: True, module.gpt_dataset_config
    )
    train = builder.build()[0]
    return [train[index] for index in range(40)]


@pytest.fixture
def eod(small_store) -> int:
    return StoreDataModule(str(small_store), LENGTH, 1, 1).manifest.tokenizer.eod_id


def test_documents_start_at_the_first_token_and_after_each_end(small_store, megatron_rank, eod):
    found = samples(small_store, "within")
    for sample in found:
        ends = (sample["tokens"] == eod).nonzero().flatten() + 1
        starts = sorted({0, *ends.tolist()} - {LENGTH})
        assert sample["document_starts"].nonzero().flatten().tolist() == starts
    assert any(sample["document_starts"].sum() > 1 for sample in found)


def test_positions_restart_with_each_document(small_store, megatron_rank):
    for sample in samples(small_store, "within"):
        table = Documents.from_starts(sample["document_starts"][None])
        assert torch.equal(sample["position_ids"], table.position_ids()[0])


def test_positions_run_on_where_attention_goes_across_documents(small_store, megatron_rank):
    for sample in samples(small_store, "across"):
        assert "document_starts" not in sample
        assert torch.equal(sample["position_ids"], torch.arange(LENGTH))


def test_a_policy_that_nobody_knows_is_refused(small_store):
    with pytest.raises(ValueError, match="documents is 'apart'"):
        StoreDataModule(str(small_store), LENGTH, 1, 1, documents="apart")
