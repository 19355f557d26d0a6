# SPDX-License-Identifier: Apache-2.0
"""Whether torch, the driver, the GPUs and Transformer Engine fit together.

    python -m slurm.preflight.node.gpu_software build      can Transformer Engine be compiled here?
    python -m slurm.preflight.node.gpu_software headers    folders for the compiler's CPATH
    python -m slurm.preflight.node.gpu_software links      put libraries where it looks for them
    python -m slurm.preflight.node.gpu_software loaded     can it be loaded?

`make gpu` calls these in this order around its installation; the commands that train on GPUs, and
the preflight of a job, ask the last of them. Transformer Engine's extension is compiled against one
torch and loads with no other, and its core library is of one release of CUDA.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.node.versions import installed
from slurm.preflight.requirements import Expected

PACKAGE = "transformer-engine"
CUDA = 13
"""Major release of CUDA that the extra `gpu` has Transformer Engine's core library for."""
CAPABILITY = (8, 0)
"""Oldest compute capability with bf16, which the recipes for GPUs train in."""
REMEDY = "`make gpu` in a clone compiles it for this torch, and the container has it"
HEADERS = ("nvidia/cu13/include", "nvidia/cudnn/include", "nvidia/nccl/include")
"""Folders of torch's own CUDA packages, below the folder that torch is installed in."""

LINKED = {"cuda_nvrtc": "libnvrtc*.so.*", "curand": "libcurand.so.*"}
"""Libraries that Transformer Engine loads by itself, by the folder that CUDA 12 had them in."""


def driver_fault(gpus: int) -> str:
    """Return why torch cannot use the first `gpus` GPUs, in a sentence; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return _without_cuda()
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        return (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPUs here: "
            f"{reason}; update the driver to one of that CUDA, and look at CUDA_VISIBLE_DEVICES"
        )
    for device in range(gpus):
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < CAPABILITY:
            return (
                f"GPU {device} ({torch.cuda.get_device_name(device)}) has compute capability "
                f"{major}.{minor}, which has no bf16; take GPUs of "
                f"{CAPABILITY[0]}.{CAPABILITY[1]} or newer"
            )
    return ""


def engine_fault() -> str:
    """Return why Transformer Engine cannot be loaded, in a sentence; empty if it can."""
    engine = installed(PACKAGE)
    if engine is None:
        return f"Transformer Engine is not installed; {REMEDY}"
    import torch

    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # of the loader, of its own assertions, of a package it imports
        text = " ".join(str(error).split())[:300]
        why = "it was compiled against another torch" if "undefined symbol" in text else "it fails"
        return (
            f"Transformer Engine {engine} cannot be loaded with torch {torch.__version__}: {why} "
            f"({text}); {REMEDY}"
        )
    return ""


def build_fault() -> str:
    """Return why Transformer Engine cannot be compiled here, in a sentence; empty if it can."""
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        return f"{_without_cuda()} in its place, and type `make gpu` again"
    if int(cuda.partition(".")[0]) != CUDA:
        return (
            f"torch {torch.__version__} is built for CUDA {cuda}, and the extra gpu brings "
            f"Transformer Engine for CUDA {CUDA}; install the torch that pyproject.toml pins"
        )
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return "there is no C++ compiler (c++ or g++), which Transformer Engine's extension needs"
    from torch.utils.cpp_extension import CUDA_HOME

    compiler = None if CUDA_HOME is None else shutil.which("nvcc", path=f"{CUDA_HOME}/bin")
    if compiler is None:
        return (
            f"there is no CUDA toolkit (nvcc); install CUDA {cuda}, or set CUDA_HOME to its folder"
        )
    output = subprocess.run([compiler, "-V"], capture_output=True, text=True, check=False).stdout
    toolkit = re.search(r"release (\d+)\.(\d+)", output)
    if toolkit is None or int(toolkit[1]) != CUDA:
        shown = "no release" if toolkit is None else f"CUDA {toolkit[1]}.{toolkit[2]}"
        return (
            f"the CUDA toolkit in {CUDA_HOME} says {shown}, and torch {torch.__version__} is built "
            f"for {cuda}; set CUDA_HOME to the folder of a toolkit of CUDA {CUDA}"
        )
    return ""


def _without_cuda() -> str:
    import torch

    return (
        f"torch {torch.__version__} is a build without CUDA; install the one of the Python "
        "Package Index"
    )


def headers() -> Iterator[Path]:
    """Yield the folders of headers that torch's own CUDA packages bring."""
    import torch

    site = Path(torch.__file__).parents[1]
    yield from (folder for name in HEADERS if (folder := site / name).is_dir())


def link_libraries(site: Path) -> list[Path]:
    """Link libraries of torch's packages to where Transformer Engine 2.9 looks for them.

    `site` is the folder that torch is installed in; returns the new links. The packages of CUDA 13
    share one folder, and Transformer Engine knows those of CUDA 12 alone: without the links it
    cannot be imported on a node that has no whole CUDA toolkit.
    """
    made = []
    for package, pattern in LINKED.items():
        there = site / "nvidia" / package / "lib"
        for old in there.glob("*"):
            if old.is_symlink() and not old.exists():
                old.unlink()  # of another release of CUDA; Transformer Engine would load it
        for library in sorted((site / "nvidia" / "cu13" / "lib").glob(pattern)):
            link = there / library.name
            if ".alt." not in library.name and not link.exists():
                there.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path("..", "..", "cu13", "lib", library.name))
                made.append(link)
    return made


def engine_checks(
    expected: Expected,
    have: Callable[[str], str | None] = installed,
    fault: Callable[[], str] = engine_fault,
) -> Iterator[PreflightCheck]:
    """Yield whether Transformer Engine loads, where GPUs are expected and it is installed."""
    if not (expected.gpus_per_node and expected.versions) or have(PACKAGE) is None:
        return
    name = f"{PACKAGE} loads"
    if sentence := fault():
        why, _, remedy = sentence.rpartition("; ")
        yield PreflightCheck.failure(Group.VERSIONS, name, why, remedy)
    else:
        yield PreflightCheck.ok(Group.VERSIONS, name, "yes")


def main(words: list[str]) -> int:
    """Answer one of the questions above; return the exit code."""
    if words == ["links"]:
        import torch

        link_libraries(Path(torch.__file__).parents[1])
        return 0
    if words == ["headers"]:
        sys.stdout.write(":".join(map(str, headers())) + "\n")
        return 0
    asked = {"build": build_fault, "loaded": engine_fault}
    if len(words) != 1 or words[0] not in asked:
        sys.stderr.write(str(__doc__))
        return 2
    if sentence := asked[words[0]]():
        sys.stderr.write(f"error: {sentence}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
