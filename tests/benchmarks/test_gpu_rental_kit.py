# SPDX-License-Identifier: Apache-2.0
import hashlib
import io
import json
import re
import struct
import sys
import tarfile
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks.gpu.rental import prepare, unpack
from benchmarks.gpu.rental.device_code import CONTAINER, ENTRY, keep_device_code

PTX, MACHINE_CODE = 1, 2


def _container(*entries):
    body = b""
    for kind, architecture, payload in entries:
        body += ENTRY.pack(kind, 0x101, 64, len(payload), 0, 0, 0, 0, architecture)
        body = body.ljust(len(body) + 64 - ENTRY.size, b"\1") + payload
    return CONTAINER.pack(0xBA55ED50, 1, CONTAINER.size, len(body)) + body


def _library(path, device_code, section=b".nv_fatbin"):
    names = b"\0.names\0" + section + b"\0"
    start = 64 + len(names)
    table = start + len(device_code)
    header = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", table)
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 3, 1)

    def row(name, offset, size):
        return struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 1, 0)

    rows = row(0, 0, 0) + row(1, 64, len(names)) + row(8, start, len(device_code))
    path.write_bytes(header + names + device_code + rows)
    return path


def test_only_machine_code_of_the_architecture_is_kept_and_no_size_changes(tmp_path):
    first = _container(
        (PTX, 90, b"ptx90..."), (MACHINE_CODE, 80, b"code80.."), (MACHINE_CODE, 90, b"code90..")
    )
    second = _container((MACHINE_CODE, 90, b"more90.."), (MACHINE_CODE, 100, b"code100."))
    library = _library(tmp_path / "library.so", first + bytes(8) + second)
    before = library.read_bytes()
    assert keep_device_code(library, 90) == (16, 24)
    after = library.read_bytes()
    expected = before
    for payload in (b"ptx90...", b"code80..", b"code100."):
        expected = expected.replace(payload, bytes(8))
    assert after == expected


@pytest.mark.parametrize(
    ("device_code", "section", "words"),
    [
        (_container((MACHINE_CODE, 80, b"code80..")), b".nv_fatbin", "no machine code for sm_90"),
        (_container((PTX, 90, b"ptx90...")), b".nv_fatbin", "no machine code for sm_90"),
        (b"", b".nv_fatbin", "no machine code for sm_90"),
        (_container((MACHINE_CODE, 90, b"code90..")), b".text", "no section .nv_fatbin"),
    ],
    ids=["another architecture", "PTX alone", "empty section", "no section"],
)
def test_a_library_without_the_architecture_is_refused_and_unchanged(
    tmp_path, device_code, section, words
):
    library = _library(tmp_path / "library.so", device_code, section)
    before = library.read_bytes()
    with pytest.raises(ValueError, match=words):
        keep_device_code(library, 90)
    assert library.read_bytes() == before


def test_one_container_without_the_architecture_is_enough_to_refuse(tmp_path):
    complete = _container((MACHINE_CODE, 90, b"code90.."))
    other = _container((MACHINE_CODE, 80, b"code80.."))
    with pytest.raises(ValueError, match="1 of its 2 containers"):
        keep_device_code(_library(tmp_path / "library.so", complete + other), 90)


def test_a_file_that_is_not_a_library_is_refused(tmp_path):
    file = tmp_path / "page.txt"
    file.write_text("a page of text")
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        keep_device_code(file, 90)


@pytest.fixture
def machine(monkeypatch):
    """The interpreter and torch that the kit is for, as far as `unpack` asks."""
    torch = ModuleType("torch")
    torch.__version__, torch.version = "2.11.0+cu130", SimpleNamespace(cuda="13.0")
    torch.cuda = SimpleNamespace(
        is_available=lambda: True, get_device_capability=lambda: (9, 0),
        get_device_name=lambda: "NVIDIA A100",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(unpack, "PYTHON", sys.version_info[:2])
    monkeypatch.setattr(unpack, "environment", lambda to, archives: "export PYTHON=there")
    return torch


def _kit(folder, member="package/module.py"):
    folder.mkdir()
    content = b"answer = 42\n"
    with tarfile.open(folder / "a.tar.xz", "w:xz") as tar:
        info = tarfile.TarInfo(member)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    checksum = hashlib.sha256((folder / "a.tar.xz").read_bytes()).hexdigest()
    manifest = {"a": {"name": "a.tar.xz", "parts": [{"file": "a.tar.xz", "sha256": checksum}]}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def _unpack(monkeypatch, kit, to, *words):
    monkeypatch.setattr(sys, "argv", ["unpack.py", "--kit", str(kit), "--to", str(to), *words])
    return unpack.main()


def test_an_archive_is_unpacked_once_for_each_checksum(tmp_path, monkeypatch, machine, capsys):
    kit, to = _kit(tmp_path / "a kit"), tmp_path / "a folder"
    assert _unpack(monkeypatch, kit, to, "a") == 0
    module = to / "a" / "package" / "module.py"
    assert module.read_text() == "answer = 42\n"
    assert capsys.readouterr().out == "export PYTHON=there\n"
    (kit / "a.tar.xz").unlink()
    module.write_text("answer = 43\n")
    assert _unpack(monkeypatch, kit, to, "a") == 0
    assert module.read_text() == "answer = 43\n"


def _no_file(kit, torch, monkeypatch):
    (kit / "a.tar.xz").unlink()


def _changed(kit, torch, monkeypatch):
    (kit / "a.tar.xz").write_bytes(b"something else")


def _no_manifest(kit, torch, monkeypatch):
    (kit / "manifest.json").unlink()


def _old_torch(kit, torch, monkeypatch):
    torch.__version__ = "2.10.1+cu130"


def _cpu_torch(kit, torch, monkeypatch):
    torch.__version__, torch.version.cuda = "2.11.0+cpu", None


def _no_torch(kit, torch, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


def _no_gpu(kit, torch, monkeypatch):
    torch.cuda.is_available = lambda: False


def _other_gpu(kit, torch, monkeypatch):
    torch.cuda.get_device_capability = lambda: (8, 0)


def _other_python(kit, torch, monkeypatch):
    monkeypatch.setattr(unpack, "PYTHON", (3, 99))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (_no_file, "archive a is not unpacked in .*; carry .*a.tar.xz"),
        (_changed, "another SHA-256 than the manifest"),
        (_no_manifest, "manifest.json cannot be read; carry it"),
        (_old_torch, "for torch 2.11, and torch 2.10.1"),
        (_cpu_torch, "built for CUDA 13, and torch 2.11.0.cpu is built for no CUDA"),
        (_no_torch, "cannot import torch"),
        (_no_gpu, "torch finds no GPU on this machine; DEVICE=cpu rehearses a call"),
        (_other_gpu, "compute capability 9.0 alone, and NVIDIA A100 has 8.0"),
        (_other_python, "the kit is for Python 3.12"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_unpacked(
    tmp_path, monkeypatch, machine, capfd, mistake, words
):
    kit, to = _kit(tmp_path / "kit"), tmp_path / "folder"
    mistake(kit, machine, monkeypatch)
    assert _unpack(monkeypatch, kit, to, "a") == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.search(words, lines[0])
    assert not to.exists()


def test_a_build_for_the_cpu_serves_a_rehearsal(tmp_path, monkeypatch, machine):
    _cpu_torch(None, machine, monkeypatch)
    kit = _kit(tmp_path / "kit")
    assert _unpack(monkeypatch, kit, tmp_path / "folder", "a", "--device", "cpu") == 0


@pytest.mark.parametrize("member", ["../outside.py", "/outside.py"])
def test_a_member_outside_the_folder_is_refused(tmp_path, monkeypatch, machine, capfd, member):
    kit, to = _kit(tmp_path / "kit", member), tmp_path / "below" / "folder"
    code = _unpack(monkeypatch, kit, to, "a")
    assert not (to.parent / "outside.py").exists()
    if member.startswith(".."):
        assert code == 2
        assert "cannot be unpacked" in capfd.readouterr().err
        assert not (to / "a").exists()
    else:  # tarfile strips the slash: the member is below the folder
        assert (to / "a" / "outside.py").exists()


def test_parts_of_the_weights_are_joined_over_two_calls(tmp_path, monkeypatch, machine):
    kit, to, content = tmp_path / "kit", tmp_path / "folder", bytes(range(256))
    kit.mkdir()
    parts = {"weights.keep": content[:200], "weights.second": content[200:]}
    for name, part in parts.items():
        (kit / name).write_bytes(part)
    entry = {
        "name": "model.whl",
        "sha256": hashlib.sha256(content).hexdigest(),
        "parts": [{"file": n, "sha256": hashlib.sha256(p).hexdigest()} for n, p in parts.items()],
    }
    (kit / "manifest.json").write_text(json.dumps({"weights": entry}))
    (kit / "weights.second").rename(tmp_path / "weights.second")
    assert _unpack(monkeypatch, kit, to, "weights") == 0
    assert not (to / "model.whl").exists()
    (kit / "weights.keep").unlink()
    (tmp_path / "weights.second").rename(kit / "weights.second")
    assert _unpack(monkeypatch, kit, to, "weights") == 0
    assert (to / "model.whl").read_bytes() == content


def test_a_call_above_the_limit_is_refused_and_one_at_the_limit_is_not():
    tree = 8 * prepare.MIB
    calls = {"first": {"a.tar.xz": prepare.LIMIT - tree}, "third": {}}
    assert "first     60.0" in prepare.plan(calls, tree)
    with pytest.raises(ValueError, match=r"call first would carry 60.0 MiB \(a.tar.xz and the"):
        prepare.plan(calls, tree + 1)


def test_the_weights_fill_the_room_that_archives_and_tree_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "KIT", tmp_path)
    content = bytes(range(250))
    (tmp_path / "model.whl").write_bytes(content)
    monkeypatch.setattr(prepare, "wheel", lambda folder: folder / "model.whl")
    entry = prepare.weights(tmp_path, {"first": 10, "keep": 200, "second": 90})
    sizes = [(part["file"], part["bytes"]) for part in entry["parts"]]
    assert sizes == [("weights.keep", 200), ("weights.second", 50)]
    joined = b"".join((tmp_path / name).read_bytes() for name, _ in sizes)
    assert joined == content
    with pytest.raises(ValueError, match="the weights do not fit"):
        prepare.weights(tmp_path, {"keep": 200, "second": 49})


def test_room_is_what_the_limit_leaves_for_each_call_before_the_third():
    entries = {"a": {"parts": [{"file": "a.tar.xz", "bytes": 50 * prepare.MIB}]}}
    room = prepare.room(entries, 8 * prepare.MIB)
    assert {call: size // prepare.MIB for call, size in room.items()} == {
        "first": 2, "keep": 52, "second": 52,
    }  # fmt: skip
