# SPDX-License-Identifier: Apache-2.0
"""The mean of two checkpoints is that of their weights, also where they are cut differently."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from custom_modules.checkpoints.index import CheckpointError
from custom_modules.gpt.model import LongContextGPT
from recipes.checkpoints.average import _Source, average
from recipes.checkpoints.files import described, for_marker
from recipes.checkpoints.marker import start_checkpoint
from tests.custom_modules.support import llamas

MARKER = {"max_steps": 3, "seq_length": 16, "rope": {}, "temperature": 1.0}


def model(seed: float, dtype: torch.dtype = torch.float32):
    """Return a model whose weights are those of the small Llama times a number."""
    weights = {
        name: weight * seed
        for name, weight in llamas.megatron_weights(llamas.made_up_weights()).items()
    }
    return llamas.ours(llamas.RopeScaling.base_change(10_000), weights, dtype)


def save(folder: Path, one, *, step: int, tokenizer: str = "same", optimizer: bool = False) -> Path:
    """Write a complete checkpoint of a model, as NeMo names things."""
    state = one.sharded_state_dict(prefix="module.")
    if optimizer:
        extra = one.sharded_state_dict(prefix="optimizer.")
        state |= {name: extra[name] for name in extra if "word_embeddings" in name}
    (folder / "weights").mkdir(parents=True)
    dist_checkpointing.save(state, str(folder / "weights"))
    facts = {**MARKER, "step": step, "tokenizer": tokenizer}
    (folder / "longhaul.json").write_text(json.dumps(facts))
    return folder


def of_stage(stage: Path, *, step: int) -> Path:
    """Return where a stage has its checkpoint, and write what it has beside it."""
    stage.mkdir()
    (stage / "config.yaml").write_text("resume: {start: where it began}\n")
    (stage / "stage.json").write_text('{"name": "tiny_16", "seq_length": 16, "start": "elsewhere"}')
    return stage / "checkpoints" / f"step={step}"


def load(folder: Path, like) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by Megatron's own loading."""
    state = like.sharded_state_dict(prefix="module.")
    found = dist_checkpointing.load(state, str(folder / "weights"))
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


@pytest.fixture
def pair(tmp_path, megatron_rank) -> tuple[Path, Path]:
    first = save(tmp_path / "first", model(1.0), step=3)
    where = of_stage(tmp_path / "second", step=2)
    return first, save(where, model(-0.5), step=2, optimizer=True)


@pytest.mark.parametrize(("share", "factor"), [(0.5, 0.25), (0.0, 1.0), (1.0, -0.5), (0.1, 0.85)])
def test_the_mean_is_that_of_every_weight_and_loads_by_megatron(pair, tmp_path, share, factor):
    average(pair, tmp_path / "mean", share=share)
    expected = model(factor).state_dict()
    found = load(tmp_path / "mean/checkpoints/step=2", model(7.0))
    tensors = {name for name, value in expected.items() if isinstance(value, Tensor)}
    assert {name.removeprefix("module.") for name in found} == tensors
    for name, value in found.items():
        reference = expected[name.removeprefix("module.")]
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-7)


def test_the_second_may_be_cut_otherwise(pair, tmp_path):
    first, second = pair
    whole = of_stage(tmp_path / "whole", step=2)
    (whole / "weights").mkdir(parents=True)
    shutil.copy(second / "longhaul.json", whole)
    entries = FileSystemReader(second / "weights").read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith("module.") and isinstance(entry, TensorStorageMetadata)
    }
    load_tensors(tensors, checkpoint_id=second / "weights", no_dist=True)
    save_tensors(tensors, checkpoint_id=whole / "weights", no_dist=True)
    shutil.copy(second / "weights" / "common.pt", whole / "weights")
    cuts = [
        {name: len(source.tensors[name].chunks) for name in tensors}
        for source in (_Source(first / "weights"), _Source(whole / "weights"))
    ]
    assert cuts[0] != cuts[1]
    average((first, second), tmp_path / "mean")
    average((first, whole), tmp_path / "mean of other cuts")
    like = model(7.0)
    expected = load(tmp_path / "mean/checkpoints/step=2", like)
    for name, value in load(tmp_path / "mean of other cuts/checkpoints/step=2", like).items():
        assert torch.equal(value, expected[name]), name


def test_the_mean_is_finished_and_has_the_length_and_rotation_of_the_second(pair, tmp_path):
    average(pair, tmp_path / "mean")
    mean = tmp_path / "mean"
    assert start_checkpoint(mean / "checkpoints") == mean / "checkpoints/step=2"
    facts = json.loads((mean / "checkpoints/step=2/longhaul.json").read_text())
    assert (facts["step"], facts["max_steps"], facts["seq_length"]) == (2, 2, 16)
    assert not (tmp_path / "mean.part").exists()


def test_the_mean_has_the_recipe_of_the_second_and_its_facts_under_a_name_of_its_own(
    pair, tmp_path
):
    first, second = pair
    average((first, second), tmp_path / "mean", share=0.25)
    of_second, of_mean = second.parents[1], tmp_path / "mean"
    recipes = [(folder / "config.yaml").read_text() for folder in (of_second, of_mean)]
    assert recipes[0] == recipes[1]
    assert json.loads((of_mean / "stage.json").read_text()) == {
        "name": "mean", "seq_length": 16, "start": f"0.75 of {first} and 0.25 of {second}",
    }  # fmt: skip


def test_each_checkpoints_metadata_is_read_once(pair, tmp_path, monkeypatch):
    read = []
    whole = FileSystemReader.read_metadata
    monkeypatch.setattr(
        FileSystemReader, "read_metadata", lambda self: read.append(self.path) or whole(self)
    )
    average(pair, tmp_path / "mean")
    assert read == [folder / "weights" for folder in pair]


def test_the_dtype_stays_and_the_mean_is_rounded_once(tmp_path, megatron_rank):
    first = save(tmp_path / "first", model(1.0, torch.bfloat16), step=1)
    where = of_stage(tmp_path / "second", step=1)
    second = save(where, model(1.03, torch.bfloat16), step=1)
    average((first, second), tmp_path / "mean")
    found = load(tmp_path / "mean/checkpoints/step=1", model(0.0, torch.bfloat16))
    ours, theirs = model(1.0, torch.bfloat16), model(1.03, torch.bfloat16)
    for name, value in ours.state_dict().items():
        if isinstance(value, Tensor):
            mean = (value.double() + theirs.state_dict()[name].double()) / 2
            assert found[f"module.{name}"].dtype == torch.bfloat16
            assert torch.equal(found[f"module.{name}"], mean.bfloat16()), name


def test_rows_that_pad_the_vocabulary_are_left_out(pair, tmp_path):
    padded, second = pair
    tokens, rows = llamas.VOCAB - 3, ("embedding.word_embeddings.weight", "output_layer.weight")
    with_tokens(padded, tokens)
    cut = {name: weight[:tokens] if name in rows else weight
           for name, weight in model(-0.5).state_dict().items()}  # fmt: skip
    without = LongContextGPT(
        llamas.configuration(torch.float32),
        rope=llamas.RopeScaling.base_change(10_000),
        vocab_size=tokens,
        max_sequence_length=64,
        share_embeddings_and_output_weights=False,
    )
    without.load_state_dict(cut)
    shutil.rmtree(second)
    with_tokens(save(second, without, step=2), tokens)
    for number, (one, other) in enumerate(((padded, second), (second, padded))):
        stage = of_stage(tmp_path / f"stage {number}", step=2)
        mean = tmp_path / f"mean {number}"
        average((one, shutil.copytree(other, stage)), mean)
        step = json.loads((other / "longhaul.json").read_text())["step"]
        found = load(mean / f"checkpoints/step={step}", without)
        expected = model(0.25).state_dict()
        for name in rows:
            assert torch.equal(found[f"module.{name}"], expected[name][:tokens])
    with_tokens(padded, tokens + 1)
    with pytest.raises(ValueError, match=r"is \(62, 32\) in one and \(61, 32\) in the other"):
        average((padded, second), tmp_path / "mean")


def with_tokens(folder: Path, tokens: int) -> None:
    """Write the number of tokens into a checkpoint's marker."""
    marker = folder / "longhaul.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"vocabulary": tokens}))


def test_what_cannot_be_averaged_is_refused(pair, tmp_path):
    first, second = pair
    with pytest.raises(ValueError, match="share is 2; the share of the second"):
        average((first, second), tmp_path / "mean", share=2)
    with pytest.raises(ValueError, match="first exists already"):
        average((first, second), first)
    with pytest.raises(ValueError, match=r"first has neither hugging_face/ nor its stage's"):
        average((second, first), tmp_path / "mean")
    other = shutil.copytree(second, tmp_path / "other")
    facts = {**MARKER, "step": 2, "tokenizer": "another"}
    (other / "longhaul.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="different tokenizers"):
        average((first, other), tmp_path / "mean")
    (other / "longhaul.json").unlink()
    with pytest.raises(ValueError, match="other is not a complete checkpoint"):
        average((first, other), tmp_path / "mean")
    tied = llamas.megatron_weights(llamas.made_up_weights())
    del tied["output_layer.weight"]
    rope = llamas.RopeScaling.base_change(10_000)
    where = of_stage(tmp_path / "tied", step=1)
    without = save(where, llamas.ours(rope, tied, torch.float32, tied=True), step=1)
    with pytest.raises(ValueError, match=r"not of one model: module\.output_layer\.weight is"):
        average((first, without), tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def with_sums(folder: Path) -> Path:
    """Write the sums of a checkpoint's files into its marker."""
    marker = folder / "longhaul.json"
    facts = json.loads(marker.read_text()) | {"files": for_marker(described(folder))}
    marker.write_text(json.dumps(facts))
    return folder


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("of", "seed"), [(0, 1.0), (1, -0.5)])
def test_nothing_is_published_of_weights_that_read_well_and_are_not_what_was_saved(
    pair, tmp_path, of, seed
):
    weight = seed * llamas.megatron_weights(llamas.made_up_weights())["output_layer.weight"]
    beginning = weight.float().numpy().tobytes()[:64]
    files = (with_sums(pair[of]) / "weights").glob("*.distcp")
    data = next(path for path in files if beginning in path.read_bytes())
    flip(data, data.read_bytes().index(beginning))
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(data))} is damaged: its SHA-256"):
        average(pair, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_the_side_files_of_an_import_are_compared_before_they_are_copied(pair, tmp_path):
    first, second = pair
    config = second / "hugging_face" / "config.json"
    config.parent.mkdir()
    config.write_text("{}")
    with_sums(second)
    average((first, second), tmp_path / "sound")
    assert (tmp_path / "sound" / "hugging_face" / "config.json").is_file()
    flip(config, 0)
    with pytest.raises(CheckpointError, match=r"config\.json is damaged: its SHA-256 differs"):
        average((first, second), tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
