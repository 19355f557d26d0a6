# SPDX-License-Identifier: Apache-2.0
"""Safetensors files by their headers: read with the library, written as it reads them."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from recipes.hugging_face.convert import WORDS, content
from recipes.hugging_face.safetensors_files import INDEX, WHOLE, Shards, stored_tensors
from recipes.spec.units import GiB

TENSORS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "c": torch.tensor([[1.5, float("nan"), -0.0]], dtype=torch.float16),
}


def written(folder, max_gib: float) -> None:
    planned = {name: (WORDS[t.dtype], tuple(t.shape)) for name, t in TENSORS.items()}
    shards = Shards(folder, planned, max_gib)
    for name, tensor in TENSORS.items():
        shards.write(name, content(tensor))
    shards.finish()


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("max_bytes", "files"),
    [(1000, [["a", "b", "c"]]), (58, [["a", "b"], ["c"]]), (1, [["a"], ["b"], ["c"]])],
)
def test_what_is_written_is_what_the_library_reads(tmp_path, max_bytes, files):
    written(tmp_path, max_bytes / GiB)
    found = sorted(tmp_path.glob("*.safetensors"))
    assert len(found) == len(files)
    for file, names in zip(found, files, strict=True):
        with safe_open(file, framework="pt") as opened:
            assert sorted(opened.keys()) == names
            assert opened.metadata() == {"format": "pt"}
            for name in names:
                tensor = opened.get_tensor(name)
                assert tensor.dtype == TENSORS[name].dtype
                assert tensor.shape == TENSORS[name].shape
                assert bits(tensor) == bits(TENSORS[name])
    assert (tmp_path / INDEX).exists() == (len(files) > 1)
    if len(files) > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == 48 + 10 + 6
        assert index["weight_map"] == {
            name: file.name for file, names in zip(found, files, strict=True) for name in names
        }
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize("max_bytes", [1000, 1])
def test_headers_say_what_the_tensors_are(tmp_path, max_bytes):
    written(tmp_path, max_bytes / GiB)
    stored = stored_tensors(tmp_path)
    assert {name: one.shape for name, one in stored.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    assert [one.dtype for one in stored.values()] == ["F32", "BF16", "F16"]


def test_a_tensor_out_of_turn_is_refused(tmp_path):
    shards = Shards(tmp_path, {"a": ("F32", (2,)), "b": ("F32", (2,))}, 1.0)
    with pytest.raises(ValueError, match="a was planned"):
        shards.write("b", content(torch.zeros(2)))


def test_a_tensor_left_out_is_refused(tmp_path):
    shards = Shards(tmp_path, {"a": ("F32", (2,)), "b": ("F32", (2,))}, 1.0)
    shards.write("a", content(torch.zeros(2)))
    with pytest.raises(ValueError, match="1 tensors were not written"):
        shards.finish()


def pickled(folder):
    (folder / "pytorch_model.bin").write_bytes(b"")


def empty(folder):
    pass


def one_shard_missing(folder):
    written(folder, 1 / GiB)
    sorted(folder.glob("*.safetensors"))[1].unlink()


def cut_off(folder):
    save_file(TENSORS, folder / WHOLE)
    (folder / WHOLE).write_bytes((folder / WHOLE).read_bytes()[:-3])


def no_safetensors(folder):
    (folder / WHOLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def of_another_folder(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))


def broken_index(folder):
    (folder / INDEX).write_text("{}")


def whole_beside_shards(folder):
    written(folder, 1 / GiB)
    save_file(TENSORS, folder / WHOLE)


def tensor_in_another_shard(folder):
    written(folder, 1 / GiB)
    index = json.loads((folder / INDEX).read_text())
    where = index["weight_map"]
    where["a"], where["b"] = where["b"], where["a"]
    (folder / INDEX).write_text(json.dumps(index))


def tensor_in_no_shard(folder):
    written(folder, 1 / GiB)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["d"] = index["weight_map"]["b"]
    (folder / INDEX).write_text(json.dumps(index))


def tensor_in_two_shards(folder):
    written(folder, 1 / GiB)
    index = json.loads((folder / INDEX).read_text())
    for name in ("a", "b"):
        save_file({"d": torch.zeros(2), name: TENSORS[name]}, folder / index["weight_map"][name])


def quantized(folder):
    save_file({"a": torch.zeros(2, dtype=torch.float8_e4m3fn)}, folder / WHOLE)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (pickled, r"pickle \(pytorch_model.bin\).*save_pretrained"),
        (empty, "neither model.safetensors nor"),
        (one_shard_missing, r"lacks 1 of the 3 shards .*model-00002-of-00003"),
        (cut_off, r"bytes\) is truncated, damaged or .*incomplete metadata"),
        (no_safetensors, "not a safetensors file"),
        (of_another_folder, "outside its folder"),
        (broken_index, "not an index of shards"),
        (quantized, "a of .* is F8_E4M3"),
        (whole_beside_shards, "both model.safetensors and model.safetensors.index.json"),
        (tensor_in_another_shard, "a is in .*model-00001-of-00003.* but model-00002.* has it too"),
        (tensor_in_no_shard, "model-00002-of-00003.safetensors has no d"),
        (tensor_in_two_shards, "d is in .*model-00002.* but .*model-00001.* has it too"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, make, said):
    make(tmp_path)
    with pytest.raises(ValueError, match=said):
        stored_tensors(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[" * 200_000, "invalid JSON"),
        (b"[1]", "invalid type: sequence"),
        (b'{"a": 5}', "invalid type: integer `5`"),
        ({"a": {**ENTRY, "dtype": None}}, "invalid type: null"),
        ({"a": {**ENTRY, "shape": None}}, "invalid type: null"),
        ({"a": {**ENTRY, "shape": [2.0]}}, "floating point `2.0`"),
        ({"a": {**ENTRY, "data_offsets": [0, "8"]}}, "invalid type: string"),
        ({"a": {**ENTRY, "data_offsets": [8]}}, "invalid length 1"),
        ({"a": {**ENTRY, "data_offsets": [4, 8]}}, "invalid offset for tensor `a`"),
        ({"a": ENTRY, "b": ENTRY}, "invalid offset for tensor `[ab]`"),
        ({"a": ENTRY, "__metadata__": {"format": 1}}, "expected a string"),
        ({"a": {**ENTRY, "dtype": "X9"}}, "convert a quantized checkpoint to bfloat16"),
        ({"a": {**ENTRY, "shape": [3]}}, "invalid shape, data type, or offset"),
    ],
)
def test_a_header_that_is_not_to_be_trusted_is_refused_by_its_file(tmp_path, header, said):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / WHOLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=said) as refused:
        stored_tensors(tmp_path)
    assert str(tmp_path / WHOLE) in str(refused.value)


@pytest.mark.parametrize("most", [0.0, float("nan"), float("inf"), 1e300])
def test_a_file_has_a_size_at_most(tmp_path, most):
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        Shards(tmp_path, {"a": ("F32", (2,))}, most)
