# SPDX-License-Identifier: Apache-2.0
"""Unpack the kit on the rented machine; standard library only, Python 3.12.

    settings=$(python3 benchmarks/gpu/rental/unpack.py a b weights) && eval "$settings"

prints the variables to set. Next to the archives, an environment `venv` is made that has the torch
of this interpreter, torch's requirements and nothing else: a machine may have other releases of
NumPy or transformers, which must not be imported. Its packages are links, so nothing is copied or
written where torch is installed. The first fault found ends the program with one sentence and exit
code 2, before anything is unpacked.

The archives are `a` (everything but Transformer Engine), `b` (Transformer Engine) and `weights`, in
parts over several calls: the parts that are there are stored, and once all are, they are joined.
"""

import argparse
import compileall
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

PYTHON = (3, 12)
TORCH, CUDA = "2.11", "13"
CAPABILITY = (9, 0)
WEIGHTS = "weights"
LINKED = {"cuda_nvrtc": "libnvrtc*.so.*", "curand": "libcurand.so.*"}
"""Libraries that Transformer Engine 2.9 looks for in a folder that CUDA 13's packages lack; as in
`slurm.preflight.node.gpu_software`, which imports too much for this program."""

TORCHRUN = """#!/bin/sh
'''exec' "$(dirname "$0")/python" "$0" "$@"
' '''
import sys
from torch.distributed.run import main
sys.exit(main())
"""
"""A command of torch, which `longhaul pretrain` looks for next to the interpreter: a shell script
that runs itself as Python, since the first line of a script cannot name a path with a blank."""


def main() -> int:
    """Read the command line, unpack and print variables for the shell; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archives", nargs="+", choices=("a", "b", WEIGHTS))
    parser.add_argument("--to", type=Path, default=Path(tempfile.gettempdir(), "longhaul_rental"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kit", type=Path, default=Path(__file__).parents[3] / ".kit")
    given = parser.parse_args()
    to = given.to.absolute()
    try:
        require_software(given.device)
        manifest = read_manifest(given.kit)
        files = {name: checked(given.kit, manifest, to, name) for name in given.archives}
        for name, found in files.items():
            if name == WEIGHTS:
                collect(found, manifest.get(WEIGHTS), to)
            elif found:
                unpack(found[0], manifest[name]["parts"][0]["sha256"], to / name)
        print(environment(to, given.archives))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def require_software(device: str) -> None:
    """Raise ValueError unless this Python and its torch are those that the kit is built for."""
    if sys.version_info[:2] != PYTHON:
        raise ValueError(f"the kit is for Python 3.12, and {sys.executable} is {sys.version[:6]}")
    try:
        import torch
    except (ImportError, OSError) as error:
        raise ValueError(f"{sys.executable} cannot import torch: {error}") from None
    if not torch.__version__.startswith(f"{TORCH}."):
        raise ValueError(
            f"the kit is for torch {TORCH}, and torch {torch.__version__} is installed"
        )
    cuda = torch.version.cuda or "no CUDA"
    if device == "cuda" and cuda.partition(".")[0] != CUDA:
        raise ValueError(
            f"the kit is for a torch built for CUDA {CUDA}, and torch {torch.__version__} is built "
            f"for {cuda}"
        )
    if device == "cuda":
        require_gpu(torch)


def require_gpu(torch: Any) -> None:
    """Raise ValueError unless torch finds a GPU for which archive b has device code."""
    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU on this machine; DEVICE=cpu rehearses a call")
    found = torch.cuda.get_device_capability()
    if found != CAPABILITY:
        raise ValueError(
            f"the kit has device code for compute capability 9.0 alone, and "
            f"{torch.cuda.get_device_name()} has {found[0]}.{found[1]}"
        )


def read_manifest(kit: Path) -> dict[str, Any]:
    """Return name, checksum and parts of each archive."""
    try:
        found: dict[str, Any] = json.loads((kit / "manifest.json").read_text())
    except (OSError, ValueError):
        raise ValueError(
            f"{kit / 'manifest.json'} cannot be read; carry it with each call, or make it with "
            "`python -m benchmarks.gpu.rental.prepare`"
        ) from None
    return found


def checked(kit: Path, manifest: dict[str, Any], to: Path, name: str) -> list[Path]:
    """Return the files of an archive that have to be unpacked, their checksums verified."""
    entry = manifest.get(name, {"parts": []})
    if name != WEIGHTS:
        if not entry["parts"]:
            raise ValueError(f"the manifest has no archive {name}; build it with prepare.py")
        if stamp(to / name) == entry["parts"][0]["sha256"]:
            return []
    files = []
    for part in entry["parts"]:
        file = kit / part["file"]
        if not file.exists():
            if name == WEIGHTS:
                continue
            raise ValueError(f"archive {name} is not unpacked in {to}; carry {file} with this call")
        if sha256(file) != part["sha256"]:
            raise ValueError(f"{file} has another SHA-256 than the manifest; carry both again")
        files.append(file)
    return files


def sha256(file: Path) -> str:
    """Return the checksum of a file, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def stamp(folder: Path) -> str:
    """Return the checksum of the archive that a folder was unpacked from, or nothing."""
    file = folder.with_suffix(".sha256")
    return file.read_text() if file.exists() else ""


def unpack(archive: Path, checksum: str, folder: Path) -> None:
    """Unpack an archive into a folder, in place of an older one; compile its modules.

    Raises ValueError, with nothing left there, if a member is unsafe or the file is not an archive.
    """
    part = folder.with_suffix(".part")
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    folder.with_suffix(".sha256").unlink(missing_ok=True)
    part.mkdir(parents=True)
    try:
        with tarfile.open(archive) as content:
            content.extractall(part, filter="data")
    except (tarfile.TarError, OSError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ValueError(f"{archive} cannot be unpacked into {folder}: {error}") from None
    compileall.compile_dir(part, quiet=2, workers=0, stripdir=part, prependdir=folder)
    part.rename(folder)
    folder.with_suffix(".sha256").write_text(checksum)


def collect(files: list[Path], entry: dict[str, Any] | None, to: Path) -> None:
    """Store the parts that are there; join them once all are, and verify the result."""
    if entry is None or (joined := to / entry["name"]).exists():
        return
    folder = to / WEIGHTS
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    parts = [folder / part["file"] for part in entry["parts"]]
    if not all(part.exists() for part in parts):
        return
    whole = folder / entry["name"]
    with whole.open("wb") as output:
        for part in parts:
            output.write(part.read_bytes())
    if sha256(whole) != entry["sha256"]:
        raise ValueError(f"the parts in {folder} do not join to {entry['name']}; carry them again")
    whole.rename(joined)


def environment(to: Path, archives: list[str]) -> str:
    """Make the environment `venv` if it is not there; return shell commands that select it."""
    folder = to / "venv"
    site = folder / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"
    if not (ready := folder / "ready").exists():
        venv.create(folder, clear=True, symlinks=True, with_pip=False)
        link_torch(site)
        if not (site / "torch").exists():
            raise ValueError("torch has no list of its files (RECORD), from which it is linked")
        torchrun = folder / "bin" / "torchrun"
        torchrun.write_text(TORCHRUN)
        torchrun.chmod(0o755)
        ready.touch()
    packages = [str(to / name) for name in archives if name != WEIGHTS]
    (site / "kit.pth").write_text("".join(f"{package}\n" for package in packages))
    libraries = [str(site / "nvidia" / name / "lib") for name in ("cudnn", "cu13")]
    if before := os.environ.get("LD_LIBRARY_PATH"):
        libraries.append(before)
    variables = {
        "PYTHON": str(folder / "bin" / "python"),
        "PYTHONPATH": ":".join(packages),
        # Transformer Engine would load a toolkit's cuDNN before torch's, and its library needs all
        # of cuDNN and cuBLAS, also where torch is not loaded yet.
        "CUDNN_PATH": str(site / "nvidia" / "cudnn"),
        "LD_LIBRARY_PATH": ":".join(libraries),
        "LONGHAUL_RENTAL": str(to),
    }
    if any(to.glob("*.whl")):  # the joined weights, for `benchmarks.gpu.whole_run`
        variables["LONGHAUL_SMOLLM2"] = str(to)
    return "\n".join(f"export {key}={shlex.quote(value)}" for key, value in variables.items())


def link_torch(site: Path) -> None:
    """Link torch and what it requires into the packages of an environment."""
    names, seen = ["torch"], set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another system or an extra
        names += [
            match[0].lower()
            for line in found.requires or []
            if (match := re.match(r"[\w.-]+", line)) and "extra ==" not in line
        ]
        if name == "cuda-toolkit":  # names its parts as extras; torch asks for some
            names += [m[0] for r in found.requires or [] if (m := re.match(r"nvidia-[\w-]+", r))]
        for entry in {top(file) for file in found.files or [] if file.parts[0] != ".."}:
            link, target = site / entry, Path(str(found.locate_file(str(entry))))
            if not link.exists() and target.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(target.resolve())
    for package, pattern in LINKED.items():
        libraries = site / "nvidia" / package / "lib"
        for library in (site / "nvidia" / "cu13" / "lib").glob(pattern):
            if ".alt." not in library.name:
                libraries.mkdir(parents=True, exist_ok=True)
                (libraries / library.name).symlink_to(library.resolve())


def top(file: metadata.PackagePath) -> Path:
    """Return the folder or file to link; distributions share the folder `nvidia`."""
    return Path(*file.parts[: 2 if file.parts[0] == "nvidia" else 1])


if __name__ == "__main__":
    sys.exit(main())
