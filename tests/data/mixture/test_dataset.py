# SPDX-License-Identifier: Apache-2.0
"""What a rank reads of a mixed stage: the tokens of its documents, its chunks, the same rows."""

import hashlib

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch.utils.data import DataLoader

from data.mixture.config import Mix, OtherLength, Share
from data.mixture.dataset import MixedDataset
from data.mixture.stage_rows import PADDING, StageRows
from data.store import Manifest
from tests.data.mixture.conftest import EOD, document

S, STEPS, ROWS = 64, 12, 8
SHARES = (Share(source="web", weight=0.6, end_weight=0.2), Share(source="books", weight=0.4))
MIXES = {
    "best fit": Mix(shares=SHARES),
    "cut": Mix(shares=SHARES, packing="cut"),
    "two lengths": Mix(shares=SHARES, other_lengths=[OtherLength(seq_length=16, steps=0.25)]),
    "capped": Mix(shares=SHARES, documents_per_row=2, overlap=8),
}


def stage_rows(manifest: Manifest, mix: Mix, seed: int = 3) -> tuple[StageRows, list]:
    files = [IndexedDataset(str(prefix)) for prefix in manifest.prefixes("train")]
    lengths = [file.sequence_lengths for file in files]
    rows = StageRows.of(
        manifest, mix, seq_length=S, steps=STEPS, rows=ROWS, seed=seed, document_lengths=lengths
    )
    return rows, files


def dataset(manifest: Manifest, mix: Mix, **options) -> MixedDataset:
    rows, files = stage_rows(manifest, mix)
    given = {"within": True, "data_ranks": 1, "micro_batch": 1, "eod_id": EOD} | options
    return MixedDataset(rows, files, **given)


def hash_of(sample: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(sample["tokens"].numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_a_sample_is_its_documents_end_to_end(
    two_sources: Manifest, mix: Mix, within: bool
) -> None:
    samples = dataset(two_sources, mix, within=within)
    for number in range(len(samples)):
        sample = samples[number]
        sequence = samples.rows.sequence(samples.row_of(number))
        source = two_sources.train.parts[sequence.part].source
        tokens, labels, counted, positions = [], [], [], []
        for at, (name, offset, length) in enumerate(zip(*sequence[1:], strict=True)):
            whole = samples.files[sequence.part].sequence_lengths
            text = (
                np.full(length, EOD)
                if name == PADDING
                else document(source, name, whole[name])[offset : offset + length]
            )
            tokens += text.tolist()
            positions += range(length) if within else range(len(positions), len(tokens))
            last = len(tokens) == S or within or sequence.documents[at + 1] == PADDING
            counted += [0] * length if name == PADDING else [1] * (length - 1) + [int(not last)]
        labels = tokens[1:]
        assert sample["tokens"].tolist() == tokens
        assert sample["position_ids"].tolist() == positions
        assert sample["loss_mask"].tolist() == counted
        of_counted = [(at, label) for at, label in enumerate(labels) if counted[at]]
        assert [(at, int(sample["labels"][at])) for at, _ in of_counted] == of_counted
        if within:
            table = sample["document_lengths"]
            assert table[table > 0].tolist() == sequence.lengths.tolist()
        else:
            assert "document_lengths" not in sample
        real = [length for name, _, length in zip(*sequence[1:], strict=True) if name != PADDING]
        squares = sum(length**2 for length in real) if within else sum(real) ** 2
        assert sample["row_facts"].tolist() == [len(real), squares, S - sum(real)]
        attended = real if within else [sum(real)]
        for window in (1, 9, S):
            samples.window = window
            pairs = sum(min(at + 1, window) for length in attended for at in range(length))
            in_window = 2 * pairs - sum(min(length, window) for length in attended)
            assert samples[number]["row_facts"].tolist()[3] == in_window
        samples.window = None
        assert two_sources.train.parts[int(sample["source"])].source == source


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_context_rank_reads_its_two_chunks_of_every_row(
    two_sources: Manifest, ranks: int
) -> None:
    mix, chunk = MIXES["best fit"], S // (2 * ranks)
    whole = dataset(two_sources, mix)
    shares = [dataset(two_sources, mix, context=(rank, ranks)) for rank in range(ranks)]
    for number in range(24):
        sample = whole[number]
        for rank, share in enumerate(shares):
            part = share[number]
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                chunks = sample[name].reshape(2 * ranks, chunk)
                expected = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
                assert torch.equal(part[name], expected), name
    labels = 24 * 2 * 4  # one token of four bytes after each of two chunks
    for share in shares:
        assert share.bytes_read <= whole.bytes_read / ranks + labels + 24 * 2 * chunk * 4


def test_a_context_rank_of_eight_reads_an_eighth_of_a_long_row(two_sources: Manifest) -> None:
    mix = Mix(shares=[Share(source="books", weight=1, at_least=64)], packing="cut")
    share, whole = dataset(two_sources, mix, context=(3, 8)), dataset(two_sources, mix)
    for number in range(16):
        share[number], whole[number]
    labels = 16 * 2 * 4
    assert whole.bytes_read == 16 * S * 4
    assert share.bytes_read == whole.bytes_read // 8 + labels


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_a_step_has_the_same_rows_on_any_number_of_data_ranks(
    two_sources: Manifest, mix: Mix
) -> None:
    found = {}
    for data_ranks, micro_batch in ((1, 1), (2, 1), (4, 1), (2, 2), (8, 1)):
        samples = dataset(two_sources, mix, data_ranks=data_ranks, micro_batch=micro_batch)
        found[data_ranks, micro_batch] = [
            sorted(hash_of(samples[step * ROWS + place]) for place in range(ROWS))
            for step in range(STEPS)
        ]
    assert all(steps == found[1, 1] for steps in found.values())
    assert len({tuple(step) for step in found[1, 1]}) == STEPS


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_loader_processes_give_the_same_samples(two_sources: Manifest, workers: int) -> None:
    samples = dataset(two_sources, MIXES["best fit"])
    loader = DataLoader(samples, batch_size=2, num_workers=workers)
    read = [hash_of({"tokens": row}) for batch in loader for row in batch["tokens"]]
    assert read == [hash_of(samples[number]) for number in range(len(samples))]


def test_rows_are_all_seen_before_one_is_seen_again(two_sources: Manifest) -> None:
    rows, _ = stage_rows(two_sources, Mix(shares=[Share(source="books", weight=1)]))
    total = rows.packed[0].rows
    steps = -(-total // ROWS)
    refs = [ref for step in range(2 * steps) for ref in rows.step(step)]
    places = [int(rows._places(ref.group, np.array([ref.number]))[0]) for ref in refs]
    assert sorted(places[:total]) == list(range(total))
    assert sorted(places[total : 2 * total]) == list(range(total))
    assert places[:total] != places[total : 2 * total]


def test_steps_of_another_length_have_documents_of_their_own(two_sources: Manifest) -> None:
    mix = Mix(other_lengths=[OtherLength(seq_length=16, steps=0.4)])
    rows, _ = stage_rows(two_sources, mix)
    seen: dict[tuple[str, int], set[int]] = {}
    for group, packed_rows in zip(rows.groups, rows.packed, strict=True):
        documents = set(packed_rows._arrays["documents"].tolist())
        seen[group.source, group.seq_length] = documents
    for part in two_sources.train.parts:
        long, short = seen[part.source, S], seen[part.source, 16]
        assert not long & short
        assert len(long) + len(short) == part.documents
        assert len(short) / part.documents == pytest.approx(0.4, abs=0.12)


def test_skipped_windows_shift_later_samples(two_sources: Manifest) -> None:
    samples = dataset(two_sources, MIXES["best fit"])
    before = [hash_of(samples[number]) for number in range(5 * ROWS)]
    samples.passed_over = ((2 * ROWS, ROWS),)
    after = [hash_of(samples[number]) for number in range(4 * ROWS)]
    assert after == before[: 2 * ROWS] + before[3 * ROWS :]


def test_balance_brings_the_slowest_rank_towards_the_average(two_sources: Manifest) -> None:
    samples = dataset(two_sources, MIXES["best fit"], data_ranks=4)
    facts = [samples.facts(step) for step in range(STEPS)]
    in_order = []
    for step in range(STEPS):
        work = samples._work(samples.rows.step(step))
        by_rank = [sum(work[rank::4]) for rank in range(4)]
        in_order.append(max(by_rank) / (sum(by_rank) / 4))
    assert np.mean([fact["work_max_over_mean"] for fact in facts]) < np.mean(in_order) - 0.05
    assert sum(fact["rows_by_source"].get("books", 0) for fact in facts) > STEPS


def test_another_separator_ends_documents(two_sources: Manifest) -> None:
    plain = dataset(two_sources, MIXES["best fit"])
    other = dataset(two_sources, MIXES["best fit"], separator_id=5)
    changed = 0
    for number in range(16):
        before, after = plain[number]["tokens"], other[number]["tokens"]
        where = before != after
        assert (before[where] == EOD).all()
        assert (after[where] == 5).all()
        changed += int(where.sum())
    assert changed > 16


def test_a_separator_leaves_the_last_token_of_a_document_without_an_end(
    two_sources: Manifest,
) -> None:
    samples = dataset(two_sources, MIXES["best fit"], eod_id=7, separator_id=5)
    assert not any((samples[number]["tokens"] == 5).any() for number in range(16))


def test_chunks_that_do_not_divide_a_sequence_are_refused(two_sources: Manifest) -> None:
    with pytest.raises(ValueError, match="64 tokens do not divide into 10 chunks of 5 context"):
        dataset(two_sources, MIXES["best fit"], context=(0, 5))


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_a_sample_names_the_documents_that_its_tokens_are_of(two_sources: Manifest, mix: Mix):
    samples = dataset(two_sources, mix)
    for number in range(24):
        part, named = samples.documents_of(number)
        source = two_sources.train.parts[part].source
        whole = samples.files[part].sequence_lengths
        texts = [document(source, name, whole[name]).tolist() for name in named]
        tokens = set(samples[number]["tokens"].tolist()) - {EOD}
        assert tokens <= {token for text in texts for token in text}
        assert all(tokens & set(text) for text in texts)
