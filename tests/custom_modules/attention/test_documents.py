# SPDX-License-Identifier: Apache-2.0
import itertools
import random

import pytest
import torch

from custom_modules.attention.documents import Documents, chunks_of

# The documents of each rank's two chunks joined, by hand.
SHARDS = {
    # 0 0 0 | 1 1 1 1 1: chunks of two are 00 01 11 11
    "8 tokens, 2 ranks": ([3, 5], [[2, 2], [1, 3]]),
    "8 tokens, 1 rank": ([3, 5], [[3, 5]]),
    # chunks of one: rank 0 has tokens 0 and 7, rank 3 tokens 3 and 4
    "8 tokens, 4 ranks": ([3, 5], [[1, 1], [1, 1], [1, 1], [2]]),
    "12 tokens, one document, 3 ranks": ([12], [[4], [4], [4]]),
    # chunks of three: 011 111 112 233
    "12 tokens, 2 ranks": ([1, 7, 2, 2], [[1, 2, 1, 2], [5, 1]]),
    "12 tokens, 3 ranks": ([1, 7, 2, 2], [[1, 1, 2], [2, 2], [4]]),
    "12 tokens, each a document, 2 ranks": ([1] * 12, [[1] * 6, [1] * 6]),
    # chunks of four: 0011 1111 1111 1222, so document 1 has tokens of both chunks of rank 0
    "16 tokens, 2 ranks": ([2, 11, 3], [[2, 3, 3], [8]]),
    # chunks of two: 00 11 11 11 11 11 12 22
    "16 tokens, 4 ranks": ([2, 11, 3], [[2, 2], [3, 1], [4], [4]]),
}


@pytest.mark.parametrize(("lengths", "shards"), SHARDS.values(), ids=SHARDS)
def test_a_shard_has_the_documents_of_its_two_chunks(lengths, shards):
    documents = Documents.of([lengths])
    for rank, expected in enumerate(shards):
        assert documents.shard(rank, len(shards)) == Documents.of([expected])


def test_each_sequence_of_a_shard_has_its_own_documents():
    documents = Documents.of([[3, 5], [8], [1, 1, 6]])
    assert documents.shard(0, 2) == Documents.of([[2, 2], [4], [1, 1, 2]])
    assert documents.shard(1, 2) == Documents.of([[1, 3], [4], [4]])


# Of 12 tokens in chunks of three: 011 111 112 233.
SHARED = {
    "the end of the first and all of the second": (0, 1, ((1, 3), (0, 3))),
    "the same seen from the second": (1, 0, ((0, 3), (1, 3))),
    "the end of the first and the beginning of the third": (0, 2, ((1, 3), (0, 2))),
    "all of the second and the beginning of the third": (1, 2, ((0, 3), (0, 2))),
    "the same seen from the third": (2, 1, ((0, 2), (0, 3))),
    "the last token of the third and the first of the fourth": (2, 3, ((2, 3), (0, 1))),
    "nothing of the first and the fourth": (0, 3, None),
    "nothing of the fourth and the second": (3, 1, None),
}


@pytest.mark.parametrize(("q_chunk", "k_chunk", "spans"), SHARED.values(), ids=SHARED)
def test_two_chunks_share(q_chunk, k_chunk, spans):
    documents = Documents.of([[12], [1, 7, 2, 2]])
    assert documents.shared(1, q_chunk, k_chunk, 2) == spans
    assert documents.shared(0, q_chunk, k_chunk, 2) == ((0, 3), (0, 3))


def test_a_document_that_ends_with_a_chunk_is_not_shared_with_the_next():
    assert Documents.of([[3, 9]]).shared(0, 0, 1, 2) is None


@pytest.mark.parametrize(("rank", "chunks"), [(0, (0, 5)), (1, (1, 4)), (2, (2, 3))])
def test_zigzag_gives_a_rank_chunks_from_both_ends(rank, chunks):
    assert chunks_of(rank, 3) == chunks


def drawn(seed: int, size: int) -> Documents:
    """Return two sequences of 24 tokens; short documents are as likely as long ones."""
    draw = random.Random(seed)
    length = 24
    rows = []
    for _ in range(2):
        cuts = sorted(draw.sample(range(1, length), draw.choice([0, 1, 2, 5, length - 1])))
        rows.append([b - a for a, b in itertools.pairwise([0, *cuts, length])])
    assert length % (2 * size) == 0
    return Documents.of(rows)


def same_document(documents: Documents, row: int) -> torch.Tensor:
    """Return the mask [S, S] from the lengths alone."""
    ids = [i for i, length in enumerate(documents.lengths[row]) for _ in range(length)]
    return torch.tensor([[a == b for b in ids] for a in ids])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_and_shared_spans_are_the_mask_for_random_documents(size):
    chunk = 24 // (2 * size)
    for seed in range(60):
        documents = drawn(seed, size)
        for row in range(2):
            mask = same_document(documents, row)
            for rank in range(size):
                tokens = [c * chunk + i for c in (rank, 2 * size - 1 - rank) for i in range(chunk)]
                shard = documents.shard(rank, size)
                assert torch.equal(same_document(shard, row), mask[tokens][:, tokens])
            for q_chunk, k_chunk in itertools.permutations(range(2 * size), 2):
                block = torch.zeros(chunk, chunk, dtype=torch.bool)
                spans = documents.shared(row, q_chunk, k_chunk, size)
                if spans is not None:
                    queries, keys = spans
                    block[slice(*queries), slice(*keys)] = True
                    assert block.any()
                q_tokens, k_tokens = (slice(c * chunk, (c + 1) * chunk) for c in (q_chunk, k_chunk))
                assert torch.equal(block, mask[q_tokens, k_tokens]), (seed, row, q_chunk, k_chunk)


def test_starts_become_lengths_and_the_first_token_always_begins_one():
    starts = torch.tensor(
        [[1, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1], [0] * 8, [1] * 8], dtype=torch.bool
    )
    assert Documents.from_starts(starts) == Documents.of([[3, 5], [7, 1], [8], [1] * 8])


def test_starts_may_be_integers():
    assert Documents.from_starts(torch.tensor([[0, 1, 0, 0]])) == Documents.of([[1, 3]])


def test_starts_without_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"shape \[8\]; \[b, S\]"):
        Documents.from_starts(torch.zeros(8))


def test_cumulative_lengths_are_cut_into_sequences():
    cu_seqlens = torch.tensor([0, 3, 8, 15, 16], dtype=torch.int32)
    expected = Documents.of([[3, 5], [7, 1]])
    assert Documents.from_cu_seqlens(cu_seqlens, batch=2, seq_length=8) == expected


def test_cumulative_lengths_and_back_are_the_same():
    documents = Documents.of([[3, 5], [7, 1]])
    cu_seqlens = documents.cu_seqlens(torch.device("cpu"))
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 3, 8, 15, 16]
    assert Documents.from_cu_seqlens(cu_seqlens, batch=2, seq_length=8) == documents


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([], "of 0 entries; integers from 0"),
        ([1, 8], "from 1 to 8; it must run from 0 to 16, 2 sequences of 8"),
        ([0, 8], "from 0 to 8; it must run from 0 to 16"),
        ([0, 8, 24], "from 0 to 24"),
        ([0, 3, 3, 8, 16], "does not rise: 3 follows 3"),
        ([0, 5, 3, 8, 16], "does not rise: 3 follows 5"),
        ([0, 3, 9, 16], "tokens 3 to 9 crosses the end of a sequence of 8"),
        ([0, 16], "tokens 0 to 16 crosses"),
    ],
    ids=str,
)
def test_cumulative_lengths_that_are_not_the_sequences_are_refused(bounds, words):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    with pytest.raises(ValueError, match=words):
        Documents.from_cu_seqlens(cu_seqlens, batch=2, seq_length=8)


def test_position_ids_restart_at_each_document():
    documents = Documents.of([[3, 5], [8], [1, 1, 6]])
    assert documents.position_ids().tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 0, 1, 2, 3, 4, 5],
    ]


def test_a_table_says_its_sizes():
    documents = Documents.of([[3, 5], [8], [1, 1, 6]])
    assert (documents.batch, documents.seq_length, documents.longest) == (3, 8, 8)
    assert Documents.of([[3, 5], [1, 7]]).longest == 7
    assert list(documents.spans(0)) == [(0, 3), (3, 8)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has no sequence"),
        ([[8], []], r"sequence 1 has the document lengths \[\]; each is at least 1"),
        ([[3, 0, 5]], r"sequence 0 has the document lengths \[3, 0, 5\]"),
        ([[9, -1]], r"\[9, -1\]"),
        ([[8], [3, 4]], "sequence 1 add up to 7 tokens, those of sequence 0 to 8"),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_is_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        Documents.of(rows)


@pytest.mark.parametrize(("batch", "seq_length"), [(1, 8), (2, 16), (2, 4)])
def test_a_table_of_other_sequences_is_refused(batch, seq_length):
    documents = Documents.of([[3, 5], [8]])
    documents.require(batch=2, seq_length=8)
    with pytest.raises(ValueError, match=f"covers 2 sequences of 8.*{batch} of {seq_length}"):
        documents.require(batch=batch, seq_length=seq_length)
