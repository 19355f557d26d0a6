# SPDX-License-Identifier: Apache-2.0
"""Build the kit in `.kit` and prove what can be proven without a GPU.

    python -m benchmarks.gpu.rental.prepare [--python python3.12] [--only a|b|weights]

Needs a Python 3.12, binutils and a package index; archive b also a C++ compiler, a CUDA 13 toolkit
(CUDA_HOME) and, the first time, half an hour of two cores: the extension that is compiled is kept
in `.kit/kept`. `.pythons/rental_bare` gets torch 2.11 with its CUDA packages and nothing
else, which takes 6 GB.
"""

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.rental.device_code import keep_device_code
from benchmarks.gpu.rental.unpack import WEIGHTS, sha256
from examples.real_model.convert import wheel

MIB = 2**20
FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 64 * MIB},
]
"""Of the archives: machine code becomes 5 to 10% smaller by the first, and text is not changed."""
LIMIT = 60 * MIB
"""Of one call: the tree and what it carries."""
GROWTH = MIB
"""Of the tree, before the calls are made; parts of the weights leave it free."""
ARCHITECTURE = 90
ENGINE = "2.9.0"
IMPORTED_BY_ENGINE = ("onnxscript==0.7.2", "onnx-ir==1.1.0")
"""Packages that Transformer Engine imports and archive a does not have."""
TORCH = "torch==2.11.0"
BUILD = ("setuptools<81", "wheel", "ninja", "pybind11", "packaging", "py-cpuinfo")
PEERS = (
    "liger-kernel==0.8.5", "cut-cross-entropy==25.1.1", "deepspeed==0.19.8", "hjson==3.1.0",
    "py-cpuinfo==9.0.0",
)  # fmt: skip
"""Packages that the lock does not have."""
CALLS = {"first": ("a",), "keep": (), "second": ("b",), "third": ()}
"""Archives that a call carries, besides parts of the weights."""

TREE = Path(__file__).resolve().parents[3]
KIT, KEPT = TREE / ".kit", TREE / ".kit" / "kept"
BARE = TREE / ".pythons" / "rental_bare"

PRUNED = {
    "bin": "commands; `python -m` serves",
    "**/__pycache__": "compiled again while unpacking",
    "numpy/**/tests": "tests",
    "matplotlib/tests": "tests",
    "joblib/test": "tests",
    "libcst/**/tests": "tests",
    "onnx/**/test": "tests",
    "**/*.pyi": "types",
    "**/*.pyx": "sources of compiled modules",
    "**/*.c": "sources of compiled modules",
    "**/*.cc": "sources of compiled modules",
    "**/*.cpp": "sources of compiled modules",
    "**/*.h": "headers",
    "**/*.a": "libraries to link with",
    "deepspeed/ops/csrc": "kernels that its tiled functions do not use",
    "fontTools/**/*.so": "the same modules are there in Python",
    "examples": "another project's; this one has a package of that name",
    "tests": "NeMo's; this project has a package of that name",
    "scripts": "NeMo's",
    "ledoc_ui/static": "pages of an interface",
    "leptonai/**/*.png": "pictures",
    "matplotlib/mpl-data/fonts/[ap]*": "other formats of fonts",
    "matplotlib/mpl-data/fonts/ttf/[CS]*": "fonts for formulas; DejaVu stays",
    "matplotlib/mpl-data/sample_data": "examples",
    "pillow.libs/libavif*": "AVIF pictures",
    "PIL/_avif*": "AVIF pictures",
    "tensorboard/webfiles.zip": "the server's pages; event files are read without it",
    "pulp/solverdir/cbc": "programs that solve linear problems",
    "wandb/bin": "the tracker's service, which `--track wandb` alone starts",
    "botocore/data": "descriptions of web services",
}
"""Paths below the packages, as globs, and why nothing needs them. `.dist-info` stays."""


def main() -> None:
    """Build what was asked for, prove it and print the calls."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--python", default="python3.12", help="an interpreter of Python 3.12")
    parser.add_argument("--only", choices=("a", "b", WEIGHTS))
    parser.add_argument("--wheels", type=Path, default=KEPT, help="folder of the weights' wheel")
    given = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    manifest = KIT / "manifest.json"
    entries: dict[str, Any] = json.loads(manifest.read_text()) if manifest.exists() else {}
    try:
        bare = bare_python(given.python)
        for name, build in (("a", everything_else), ("b", transformer_engine)):
            if given.only in (None, name):
                entries[name] = archive(name, bare, build)
        if given.only in (None, WEIGHTS):
            entries[WEIGHTS] = weights(given.wheels, room(entries, tree_bytes() + GROWTH))
        manifest.write_text(json.dumps(entries, indent=1) + "\n")
        print(plan(carried(entries), tree_bytes()))
        prove(bare, [name for name in ("a", "b") if name in entries])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: exit code {error.returncode} of: {' '.join(map(str, error.cmd))}")


MODELS = (
    "auto", "bert", "dbrx", "encoder_decoder", "falcon", "gemma", "gemma2", "gemma3", "gpt2",
    "gpt_oss", "gptj", "llama", "llama4", "mistral", "mixtral", "nemotron", "olmo3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "siglip", "smollm3", "speecht5", "t5",
)  # fmt: skip
"""Of transformers, that NeMo, ModelOpt, its own pipelines or the tests import."""
ABSENT = ("lm_eval", "pyarrow")
"""Packages that modules of the public suites import, which no call runs."""
STAND_INS = {
    "datasets.py": "",
    "fabric.py": "",
    "paramiko/__init__.py": "",
    "paramiko/ssh_exception.py": "",
    "pandas.py": "",
    "pyarrow.py": "",
    "scipy/interpolate.py": "",
    "scipy/signal.py": "",
    "scipy/spatial.py": "",
    "scipy/stats.py": "",
    "tensorstore.py": "import ml_dtypes",
}
"""Modules that NeMo, ModelOpt or nemo_run imports and no call uses: their names are empty classes.
The line is a part of the module: tensorstore also brings NumPy's dtype bfloat16, which
Megatron-Core names."""
STAND_IN = '''"""Stands in for a package of the lock that is imported here and not used."""

{line}


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {{}})
'''


def bare_python(python: str) -> Path:
    """Return the interpreter of an environment that has torch, what builds need, nothing else."""
    interpreter = BARE / "bin" / "python"
    if not (ready := BARE / ".installed").exists():
        _run(python, "-m", "venv", "--clear", BARE)
        _pip(interpreter, "install", TORCH, *BUILD)
        ready.touch()
    return interpreter


def everything_else(bare: Path, folder: Path) -> None:
    """Install the distributions of archive a into a folder, without what nothing needs."""
    lines = (Path(__file__).parent / "carried.txt").read_text().splitlines()
    names = {line.partition("#")[0].strip().lower() for line in lines} - {""}
    lock = (TREE / "constraints-py312.txt").read_text().splitlines()
    pins = [line for line in lock if line.partition("==")[0].lower() in names]
    if unknown := names - {pin.partition("==")[0].lower() for pin in pins}:
        raise ValueError(f"constraints-py312.txt does not have {', '.join(sorted(unknown))}")
    _install(bare, folder, *pins, *PEERS)
    for pattern in PRUNED:
        for path in list(folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for model in (folder / "transformers" / "models").iterdir():
        if model.is_dir() and model.name not in MODELS:
            shutil.rmtree(model)
    for library in folder.rglob("*.so"):  # symbols for debuggers: half of all machine code
        _run("strip", "--strip-unneeded", library)
    for name, line in STAND_INS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(STAND_IN.format(line=line))


def transformer_engine(bare: Path, folder: Path) -> None:
    """Install Transformer Engine into a folder, its library cut to one architecture."""
    core, extension = f"transformer_engine_cu13=={ENGINE}", f"transformer_engine_torch=={ENGINE}"
    wheels = [kept(bare, core), kept(bare, f"transformer_engine=={ENGINE}"), kept(bare, extension)]
    _install(bare, folder, *wheels, *IMPORTED_BY_ENGINE)
    for library in folder.glob("transformer_engine/**/libtransformer_engine.so"):
        kept_bytes, zeroed = keep_device_code(library, ARCHITECTURE)
        print(f"  {library.name}: {kept_bytes / MIB:.0f} MiB kept, {zeroed / MIB:.0f} zeroed")
    for pattern in ("**/__pycache__", "transformer_engine/jax"):
        for path in list(folder.glob(pattern)):
            shutil.rmtree(path)


def kept(bare: Path, pin: str) -> Path:
    """Return a wheel from `.kit/kept`; download or compile it unless its checksum is right."""
    pattern = pin.replace("==", "-") + "-*.whl"
    for wheel_file in KEPT.glob(pattern):
        checksum = wheel_file.with_suffix(".sha256")
        if checksum.exists() and checksum.read_text() == sha256(wheel_file):
            return wheel_file
        wheel_file.unlink()
    site = BARE / "lib" / "python3.12" / "site-packages" / "nvidia"
    headers = [str(site / name / "include") for name in ("cu13", "cudnn", "nccl")]
    settings = {
        "CPATH": ":".join(headers),
        "CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda"),
        "MAX_JOBS": "2",
        "NVTE_FRAMEWORK": "pytorch",
        "PATH": f"{bare.parent}:{os.environ['PATH']}",
    }
    words = ["--no-cache-dir", "--no-build-isolation", "--no-deps", "-w", KEPT, pin]
    _pip(bare, "wheel", *words, settings=settings)
    (wheel_file,) = KEPT.glob(pattern)
    wheel_file.with_suffix(".sha256").write_text(sha256(wheel_file))
    return wheel_file


def archive(name: str, bare: Path, build: Any) -> dict[str, Any]:
    """Build a folder and compress it; return the entry of the manifest."""
    started = time.monotonic()
    file = KIT / f"{name}.tar.xz"
    with tempfile.TemporaryDirectory(dir=KIT) as scratch:
        folder = Path(scratch)
        build(bare, folder)
        # Files of one kind next to each other: they share more of the compressor's window.
        found = [path for path in folder.rglob("*") if path.is_file()]
        found.sort(key=lambda path: (path.suffix, path.name, path))
        with (
            lzma.open(file, "wb", filters=FILTERS) as stream,
            tarfile.open(fileobj=stream, mode="w") as tar,
        ):
            for path in found:
                tar.add(path, path.relative_to(folder), filter=_anonymous)
        unpacked = sum(path.stat().st_size for path in found)
    print(
        f"{file.name}: {file.stat().st_size / MIB:.1f} MiB of {unpacked / MIB:.0f} in "
        f"{len(found)} files, {time.monotonic() - started:.0f} s"
    )
    return _entry(file.name, [file])


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out what differs from one build to the next."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def weights(folder: Path, room: dict[str, int]) -> dict[str, Any]:
    """Cut the wheel of the weights into parts for the calls that have room, largest first."""
    content = wheel(folder).read_bytes()
    parts, at = [], 0
    for old in KIT.glob(f"{WEIGHTS}.*"):
        old.unlink()
    for call, size in sorted(room.items(), key=lambda item: -item[1]):
        if at < len(content):
            parts.append(KIT / f"{WEIGHTS}.{call}")
            parts[-1].write_bytes(content[at : at + size])
            at += size
    if at < len(content):
        raise ValueError(
            f"the weights do not fit: the calls have room for {at / MIB:.1f} MiB of "
            f"{len(content) / MIB:.1f}"
        )
    return _entry(wheel(folder).name, parts) | {"sha256": sha256(wheel(folder))}


def _entry(name: str, files: list[Path]) -> dict[str, Any]:
    parts = [
        {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256(file)} for file in files
    ]
    return {"name": name, "parts": parts}


def tree_bytes() -> int:
    """Return the bytes of the files that travel with each call: all but the ignored ones."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=TREE, capture_output=True, text=True, check=True).stdout
    files = {TREE / name for name in listed.split("\0") if name}
    return sum(file.lstat().st_size for file in files if file.is_file())


def carried(entries: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the files that each call carries, and their bytes."""
    calls = {}
    for call, archives in CALLS.items():
        parts = [part for name in archives for part in entries.get(name, {}).get("parts", [])]
        of_weights = entries.get(WEIGHTS, {}).get("parts", [])
        parts += [part for part in of_weights if part["file"] == f"{WEIGHTS}.{call}"]
        calls[call] = {part["file"]: part["bytes"] for part in parts}
    return calls


def room(entries: dict[str, Any], tree: int) -> dict[str, int]:
    """Return the bytes that the calls before the third have left for weights."""
    others = {name: entry for name, entry in entries.items() if name != WEIGHTS}
    left = {call: LIMIT - tree - sum(files.values()) for call, files in carried(others).items()}
    return {call: size for call, size in left.items() if size > 0 and call != "third"}


def plan(calls: dict[str, dict[str, int]], tree: int) -> str:
    """Return a table of the calls; raise ValueError if one carries more than a call may."""
    lines = [f"{'call':8}{'MiB':>6}  of {LIMIT / MIB:.0f}, the tree's {tree / MIB:.1f} included"]
    for call, files in calls.items():
        size = tree + sum(files.values())
        if size > LIMIT:
            raise ValueError(
                f"call {call} would carry {size / MIB:.1f} MiB ({', '.join(files)} and the tree), "
                f"and {LIMIT / MIB:.0f} are allowed"
            )
        names = "  ".join(f".kit/{file} ({n / MIB:.1f})" for file, n in files.items())
        lines.append(f"{call:8}{size / MIB:6.1f}  .kit/manifest.json  {names}")
    return "\n".join(lines)


PROOF = """
import importlib, pkgutil, sys
from data.cuda_extension import prepare_process
prepare_process()
import torch
if {engine}:
    import transformer_engine.pytorch
rooms = "recipes", "longhaul", "custom_modules", "data", "eval", "slurm", "benchmarks"
names = [
    module.name
    for room in rooms
    for module in pkgutil.walk_packages(importlib.import_module(room).__path__, room + ".")
    if not module.name.endswith("__main__")
]
imported = 0
for name in [*names, *{peers}]:
    try:
        importlib.import_module(name)
        imported += 1
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in {absent}:
            raise
print(f"{{imported}} modules imported with torch {{torch.__version__}}, engine: {engine}")
"""
PEERS_AND_TOOLS = [
    "deepspeed.runtime.sequence_parallel.ulysses_sp", "cut_cross_entropy", "gguf", "pytest_timeout",
    "liger_kernel.ops.fused_linear_cross_entropy", "tensorboard.backend.event_processing", "xdist",
    "transformers.pipelines", "transformers.models.llama.modeling_llama", "tests.conftest",
]  # fmt: skip


def prove(bare: Path, archives: list[str]) -> None:
    """Unpack as the other machine does, into a folder with a blank, and import everything."""
    with tempfile.TemporaryDirectory(prefix="a kit ", dir=KIT) as scratch:
        started = time.monotonic()
        program = Path(__file__).with_name("unpack.py")
        words = [bare, "-W", "ignore", program, "--device", "cpu", "--to", scratch, *archives]
        _run(*words, stdout=subprocess.DEVNULL)
        print(f"unpacked in {time.monotonic() - started:.0f} s: {' '.join(archives)}", flush=True)
        proof = PROOF.format(engine="b" in archives, peers=PEERS_AND_TOOLS, absent=ABSENT)
        python = Path(scratch, "venv", "bin", "python")
        settings = {"NVTE_DISABLE_NVRTC": "1", "DS_ACCELERATOR": "cuda"}
        _run(python, "-W", "ignore", "-c", proof, settings=settings)


def _install(bare: Path, folder: Path, *words: object) -> None:
    options = ("--no-deps", "--no-build-isolation", "--no-compile", "--target", folder)
    _pip(bare, "install", *options, *words, settings={"DS_BUILD_OPS": "0"})


def _pip(interpreter: Path, *words: object, settings: dict[str, str] | None = None) -> None:
    _run(interpreter, "-m", "pip", "-qq", "--no-input", *words, settings=settings)


def _run(*words: object, settings: dict[str, str] | None = None, stdout: int | None = None) -> None:
    environment = os.environ | (settings or {})
    command = [str(word) for word in words]
    subprocess.run(command, cwd=TREE, check=True, stdout=stdout, env=environment)


if __name__ == "__main__":
    main()
