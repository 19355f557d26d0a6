# SPDX-License-Identifier: Apache-2.0
"""What a sample of the store says about its documents, and trains on for a longer context."""

import json
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from nemo.collections.common.tokenizers import AutoTokenizer

from custom_modules.attention.documents import Documents
from custom_modules.rope.skipped_positions import gene_scale, longrecipe, pose
from data.nemo_module import NumberedDataset, StoreDataModule
from data.store import Manifest, StoreError
from data.train_short import samples as train_short
from data.train_short.impactful_tokens import ImpactfulTokens
from data.train_short.sentences import ENDS, SentenceSelection
from tests.ranks import run_ranks

LENGTH = 512
MANY = 200
"""Samples enough for shares of a token, whichever Python's standard library is the text."""


def dataset(store, documents: str) -> NumberedDataset:
    module = StoreDataModule(str(store), LENGTH, 1, 1, documents=documents)
    builder = BlendedMegatronDatasetBuilder(
        NumberedDataset, [40, 1, 1], lambda: True, module.gpt_dataset_config
    )
    return builder.build()[0]


def samples(store, documents: str) -> list[dict[str, torch.Tensor]]:
    train = dataset(store, documents)
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


@pytest.mark.parametrize("documents", ["across", "within"])
def test_a_sample_says_what_a_window_leaves_of_its_squares(small_store, megatron_rank, documents):
    train = dataset(small_store, documents)
    for index in range(10):
        plain = train[index]["row_facts"].tolist()
        train.window = 50
        counted, squares, padding, in_window = train[index]["row_facts"].tolist()
        train.window = None
        assert [counted, squares, padding] == plain
        starts = [LENGTH]
        if documents == "within":
            starts = [*train[index]["document_starts"].nonzero().flatten().tolist()[1:], LENGTH]
        lengths = [end - start for start, end in pairwise([0, *starts])]
        pairs = sum(min(at + 1, 50) for length in lengths for at in range(length))
        assert in_window == 2 * pairs - sum(min(length, 50) for length in lengths)


def test_rows_that_are_held_out_say_the_same_facts_as_those_of_training(small_store, megatron_rank):
    for split in splits(small_store, window=50):
        assert len(split[0]["row_facts"]) == 4


@pytest.mark.parametrize("change", ["flip", "cut", "remove", "pickle"])
def test_a_damaged_order_of_samples_is_built_again_and_the_same(
    tmp_path, small_store, megatron_rank, change, caplog
):
    store = Path(shutil.copytree(small_store, tmp_path / "store"))
    shutil.rmtree(store / "index", ignore_errors=True)  # other tests have orders of their own in it
    before = [sample["tokens"] for sample in samples(store, "across")]
    (path,) = (store / "index").glob("*-train-shuffle_index.npy")
    content = path.read_bytes()
    if change == "flip":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif change == "cut":
        path.write_bytes(content[:-8])
    elif change == "remove":
        path.unlink()
    else:
        np.save(path, np.array([{"what": "runs code when it is read"}]), allow_pickle=True)
    after = [sample["tokens"] for sample in samples(store, "across")]
    assert all(map(torch.equal, before, after))
    assert path.read_bytes() == content
    assert f"{path} is " in caplog.text


def _samples_on_a_rank(*stores: str) -> list[list[list[int]]]:
    from megatron.core import parallel_state

    from custom_modules.cpu.backend import cpu_backend

    with cpu_backend(force=True):
        parallel_state.initialize_model_parallel()
        return [[one["tokens"].tolist() for one in samples(store, "across")] for store in stores]


@pytest.mark.nightly
def test_all_ranks_have_one_order_also_where_none_can_be_kept(tmp_path, small_store):
    stores = [Path(shutil.copytree(small_store, tmp_path / name)) for name in ("new", "fixed")]
    for store in stores:
        shutil.rmtree(store / "index", ignore_errors=True)
    (stores[1] / "index").write_text("a file: not even root can write below it")
    first, second = run_ranks(_samples_on_a_rank, 2, *map(str, stores))
    assert first == second
    assert first[0] == first[1]
    assert [len(list(store.glob("index/*-train-*"))) for store in stores] == [5, 0]


def test_positions_run_on_where_attention_goes_across_documents(small_store, megatron_rank):
    for sample in samples(small_store, "across"):
        assert "document_starts" not in sample
        assert torch.equal(sample["position_ids"], torch.arange(LENGTH))


def test_a_sample_names_the_documents_that_its_tokens_are_of(small_store, megatron_rank):
    train = dataset(small_store, "across")
    for number in range(40):
        part, named = train.documents_of(number)
        text = [token for one in named for token in train.dataset.get(one).tolist()]
        tokens = train[number]["tokens"].tolist()
        begins = [at for at in range(len(text)) if text[at : at + LENGTH] == tokens]
        assert part == 0
        assert begins
        assert begins[0] < len(train.dataset.get(named[0]))
    train.passed_over = ((3, 2),)
    assert train.documents_of(3) == dataset(small_store, "across").documents_of(5)


def padded_by(store, folder, token: int) -> Path:
    """Return a copy of a store whose tokenizer pads with a token of the text."""
    shutil.copytree(store, folder)
    manifest = Manifest.load(folder)
    path = folder / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    content = AutoTokenizer(str(folder / "tokenizer")).ids_to_tokens([token])[0]
    path.write_text(json.dumps(config | {"pad_token": content}))
    (folder / "tokenizer" / "special_tokens_map.json").unlink()
    manifest.write()
    return folder


@pytest.mark.parametrize("documents", ["across", "within"])
@pytest.mark.parametrize("token", ["what ends documents", 300])
def test_no_token_of_a_document_is_taken_for_padding(
    small_store, tmp_path, megatron_rank, eod, documents, token
):
    number = eod if isinstance(token, str) else token
    store = padded_by(small_store, tmp_path / "store", number)
    assert StoreDataModule(str(store), LENGTH, 1, 1).tokenizer.pad_id == number
    train, seen = dataset(store, documents), 0
    for index in range(40):
        text, _ = train._query_document_sample_shuffle_indices(index)
        sample = train[index]
        assert sample["tokens"].tolist() == text[:-1].tolist()
        assert sample["labels"].tolist() == text[1:].tolist()
        assert sample["loss_mask"].all()
        seen += int((sample["labels"] == number).sum())
    assert seen > 0


def test_a_sample_that_ends_with_the_data_is_masked_there_and_masks_no_other(
    small_store, megatron_rank
):
    train = dataset(small_store, "across")
    whole = train._query_document_sample_shuffle_indices

    def shorter(index):
        text, documents = whole(index)
        if index == 3:
            text[-100:] = train._pad_token_id
        return text, documents

    train._query_document_sample_shuffle_indices = shorter
    padded = train[3]  # the first that is read
    assert padded["loss_mask"].sum() == LENGTH - 100
    assert int(padded["tokens"].min()) >= 0
    assert train[4]["loss_mask"].all()
    assert train[3]["loss_mask"].sum() == LENGTH - 100


def test_a_policy_that_nobody_knows_is_refused(small_store):
    with pytest.raises(ValueError, match="documents is 'apart'"):
        StoreDataModule(str(small_store), LENGTH, 1, 1, documents="apart")


TARGET = 4 * LENGTH
POSE = partial(pose, target_length=TARGET)
SKIPS = partial(longrecipe, target_length=TARGET)
DIGITS = SentenceSelection(anchors="digits", source_length=TARGET)


def splits(store, **arguments) -> tuple[NumberedDataset, NumberedDataset]:
    """Return what trains and what validates, as a run builds them."""
    module = StoreDataModule(str(store), LENGTH, 1, 4, **arguments)
    module.build(5, 5, 2, 2)
    return module._train_ds, module._validation_ds


@pytest.fixture(scope="module")
def pieces(small_store) -> list[str]:
    """Return the text of each token."""
    module = StoreDataModule(str(small_store), LENGTH, 1, 1)
    return [module.tokenizer.ids_to_text([token]) for token in range(512)]


def test_training_skips_positions_and_nothing_else_and_validation_does_not(
    small_store, megatron_rank
):
    plain, plain_validation = splits(small_store)
    skipping, validation = splits(small_store, positions=POSE)
    highest = 0
    for index in range(12):
        ours, theirs = skipping[index], plain[index]
        assert (ours["position_ids"].diff() >= 1).all()
        highest = max(highest, int(ours["position_ids"][-1]))
        for key in ("tokens", "labels", "loss_mask", "sample_id"):
            assert torch.equal(ours[key], theirs[key]), key
    assert LENGTH < highest < TARGET
    for index in range(4):
        for key, value in plain_validation[index].items():
            assert torch.equal(validation[index][key], value), key
        assert torch.equal(validation[index]["position_ids"], torch.arange(LENGTH))


def test_positions_are_of_the_seed_and_the_sample_alone(small_store, megatron_rank):
    first, _ = splits(small_store, positions=POSE)
    second, _ = splits(small_store, positions=POSE)
    backwards = {index: second[index]["position_ids"] for index in reversed(range(8))}
    for index in range(8):
        assert torch.equal(first[index]["position_ids"], backwards[index])
    other, _ = splits(small_store, positions=POSE, seed=4321)
    assert any(
        not torch.equal(other[index]["position_ids"], backwards[index]) for index in range(8)
    )
    assert len({tuple(positions.tolist()) for positions in backwards.values()}) == 8


def test_longrecipe_skips_where_sentences_end(small_store, megatron_rank, pieces):
    train, _ = splits(small_store, positions=SKIPS)
    skips = 0
    for index in range(8):
        sample = train[index]
        inside = 0
        for at in (sample["position_ids"].diff() > 1).nonzero().flatten().tolist():
            last = int(sample["tokens"][at])
            inside += pieces[last] not in ENDS and pieces[last] != "<|endoftext|>"
            skips += 1
        assert inside <= 1  # where the first part ends
    assert skips > 40


def test_chosen_sentences_are_those_with_a_digit_from_a_text_of_the_target_length(
    small_store, megatron_rank, pieces
):
    train, validation = splits(small_store, positions=SKIPS, sentences=DIGITS)
    plain, plain_validation = splits(small_store)
    with_digits = {True: 0, False: 0}
    for index in range(MANY):
        sample = train[index]
        assert sample["tokens"].shape == sample["labels"].shape == sample["loss_mask"].shape
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        assert LENGTH <= int(sample["position_ids"][-1]) + 1 <= TARGET
        for chosen, tokens in ((True, sample["tokens"]), (False, plain[index]["tokens"])):
            with_digits[chosen] += sum(
                any(c.isdigit() for c in pieces[token]) for token in tokens.tolist()
            )
    assert with_digits[True] > 1.5 * with_digits[False] > 0
    assert len(train[0]["tokens"]) == LENGTH
    assert torch.equal(validation[0]["tokens"], plain_validation[0]["tokens"])


def test_impactful_sentences_have_a_token_of_the_stores_analysis(
    small_store, tmp_path, megatron_rank, pieces
):
    store = shutil.copytree(small_store, tmp_path / "store")
    chosen = SentenceSelection(anchors="impactful", source_length=TARGET)
    with pytest.raises(StoreError, match=r"has no impactful_tokens\.json; `python -m eval"):
        splits(store, sentences=chosen)
    manifest = StoreDataModule(str(store), LENGTH, 1, 1).manifest
    letter = pieces.index("z")
    found = ImpactfulTokens(
        tokens=(letter,), share=0.1, split="train", sha256=manifest.train.sha256,
        before="a step 1", after="b step 2", places=7,
    )  # fmt: skip
    found.write(store)
    assert ImpactfulTokens.load(manifest) == found
    ours, plain = splits(store, sentences=chosen)[0], splits(store)[0]
    counts = [
        sum(int((data[i]["tokens"] == letter).any()) for i in range(MANY)) for data in (ours, plain)
    ]
    assert counts[0] > 1.5 * counts[1] > 0
    assert torch.equal(ours[0]["position_ids"], torch.arange(LENGTH))
    replace(found, sha256="0" * 64).write(store)
    with pytest.raises(StoreError, match="made from other tokens than the store's train split"):
        splits(store, sentences=chosen)


def test_a_scale_is_drawn_for_each_sample_of_training_alone(small_store, megatron_rank):
    train, validation = splits(
        small_store, rope_scale=partial(gene_scale, least=2, scales=4), documents="within"
    )
    scales = [train[index]["rope_scale"] for index in range(20)]
    assert {scale.dtype for scale in scales} == {torch.float64}
    assert {float(scale) for scale in scales} == {2.0, 4.0, 6.0, 8.0}
    assert "rope_scale" not in validation[0]
    assert "document_starts" in train[0]


def test_each_split_is_built_once_and_a_failed_build_leaves_the_length(
    small_store, megatron_rank, monkeypatch
):
    built = []
    whole = NumberedDataset.__init__

    def counted(self, *args):
        whole(self, *args)
        built.append((self.index_split.name, self.config.sequence_length))

    monkeypatch.setattr(NumberedDataset, "__init__", counted)
    module = StoreDataModule(str(small_store), LENGTH, 1, 4, sentences=DIGITS)
    module.build(5, 5, 2, 2)
    assert sorted(built) == [("test", LENGTH), ("train", TARGET), ("valid", LENGTH)]
    blends = module.build_kwargs
    with pytest.raises(AssertionError, match="max_steps 0"):
        module.build(0, 5, 2, 2)
    assert module.seq_length == LENGTH
    assert module.build_kwargs is blends


def test_the_vocabulary_is_decoded_for_sentences_alone(small_store, monkeypatch):
    calls = []
    decode = train_short.token_texts
    monkeypatch.setattr(
        train_short, "token_texts", lambda tokenizer: calls.append(1) or decode(tokenizer)
    )
    scale = partial(gene_scale, least=2, scales=4)
    for arguments, count in (
        ({"positions": POSE}, 0),
        ({"rope_scale": scale}, 0),
        ({"positions": SKIPS}, 1),
        ({"positions": POSE, "sentences": DIGITS}, 1),
    ):
        calls.clear()
        StoreDataModule(str(small_store), LENGTH, 1, 1, **arguments)
        assert len(calls) == count, arguments


@pytest.mark.parametrize(
    "arguments", [{"positions": POSE}, {"sentences": DIGITS}], ids=lambda given: next(iter(given))
)
def test_positions_that_restart_do_not_skip(small_store, arguments):
    with pytest.raises(ValueError, match="'within', where positions restart"):
        StoreDataModule(str(small_store), LENGTH, 1, 1, documents="within", **arguments)
