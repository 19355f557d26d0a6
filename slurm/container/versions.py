# SPDX-License-Identifier: Apache-2.0
"""Versions of a container: packages kept from NVIDIA, packages pinned by Longhaul, and checks.

    python versions.py image pyproject.toml     before: does the image suit Longhaul's pins?
    python versions.py kept                     its torch, CUDA and kernels, as pip constraints
    python -m slurm.container.versions installed kept.txt      after: pins met, NVIDIA's unchanged
    python -m slurm.container.versions health                  without importing torch
    python versions.py lock < resolved.txt      a resolved set without the packages of NVIDIA

Reads metadata of installed distributions only. As a file it needs nothing else of the tree.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, distributions, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

OF_THE_IMAGE = re.compile(
    r"(torch(vision|audio)?|(pytorch-)?triton|apex|transformer-engine.*|flash-attn.*|cuda-.*"
    r"|nvidia-(cublas|cuda|cudnn|cufft|cufile|curand|cusolver|cusparse|nccl|nvjitlink|nvshmem"
    r"|nvtx).*)"
)
"""Compiled against one another in the image: replacing one breaks the rest."""

TORCH = SpecifierSet(">=2.9,<2.10")
"""The torch of the image, in place of the release that pyproject.toml pins for CPU."""

EXTRAS = frozenset({"eval"})
"""Extras of pyproject.toml that the container has as well: jobs evaluate in it."""

IMPORTED_FROM = {"megatron-core": "megatron.core", "nemo-toolkit": "nemo"}
"""The image has checkouts of these, which a search path may put before the pinned ones."""


def stays(name: str) -> bool:
    """Return whether the image's version of a distribution is kept."""
    return OF_THE_IMAGE.fullmatch(canonicalize_name(name)) is not None


def found(name: str) -> str:
    """Return the installed version of a distribution, or nothing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    """Return whether a requirement applies on this machine with these extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def needs_of_the_image(pyproject: Path) -> Iterator[Requirement]:
    """Yield the requirements of pyproject.toml and the pins on an image."""
    if sys.version_info >= (3, 11):
        import tomllib

        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        yield Requirement(f"python{project['requires-python']}")
        yield Requirement(f"torch{TORCH}")
        yield from map(Requirement, project["optional-dependencies"]["gpu"])
    else:
        raise SystemExit(f"Reading {pyproject} needs Python 3.11 or newer")


def image_faults(pyproject: Path) -> Iterator[str]:
    """Yield the faults that make an image unsuitable for the pins."""
    python = "{}.{}.{}".format(*sys.version_info[:3])
    for requirement in needs_of_the_image(pyproject):
        name, specifier = requirement.name, requirement.specifier
        here = python if name == "python" else found(name)
        if not here:
            yield f"{name}: not in the image, which needs {specifier}"
        elif Version(here).base_version not in specifier:  # NVIDIA's are 2.9.0a0+hash.nvYY.MM
            yield f"{name} {here} in the image, which needs {specifier}"


def kept() -> list[str]:
    """Return the distributions kept from the image, as lines of a constraints file."""
    names = {
        canonicalize_name(one.metadata["Name"]) for one in distributions() if one.metadata["Name"]
    }
    return sorted(f"{name}=={version(name)}" for name in names if stays(name))


def unmet(root: str, extras: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield each unmet requirement of a distribution, at any depth."""
    waiting, seen = [(root, extras)], set()
    while waiting:
        parent, wanted = waiting.pop()
        for requirement in map(Requirement, requires(parent) or []):
            name = canonicalize_name(requirement.name)
            if not applies(requirement, wanted) or stays(name):
                continue
            here = found(name)
            if not here:
                yield f"{parent} needs {requirement}, which is not installed"
            elif not requirement.specifier.contains(here, prereleases=True):
                yield f"{parent} needs {requirement}, and {here} is installed"
            elif (below := (name, frozenset(requirement.extras))) not in seen:
                seen.add(below)
                waiting.append(below)


def shadowed() -> Iterator[str]:
    """Yield each pin that Python would import from another place than pip installed it to."""
    for name, module in IMPORTED_FROM.items():
        if not found(name):
            continue  # `unmet` reports it
        spec = find_spec(module)
        origin = Path(spec.origin).resolve() if spec and spec.origin else None
        inside = str(Path(*module.split("."), "__init__.py"))
        if origin != Path(str(distribution(name).locate_file(inside))).resolve():
            yield f"{module} comes from {origin}, not from {name} {found(name)}: see PYTHONPATH"


def installed_faults(before: list[str]) -> Iterator[str]:
    """Yield the faults of installing the pins on an image that kept these lines."""
    after = kept()
    yield from (f"{line} of the image is missing" for line in sorted({*before} - {*after}))
    yield from (f"{line} was added to those of the image" for line in sorted({*after} - {*before}))
    yield from unmet("longhaul-recipes", EXTRAS)
    yield from shadowed()


def health_faults() -> Iterator[str]:
    """Yield the faults of a container; needs no GPU and imports no torch."""
    if not found("torch"):
        yield "torch is not installed"
    yield from unmet("longhaul-recipes", EXTRAS)
    command = [sys.executable, "-c", "from longhaul.cli import main; main()", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    if done.returncode:
        yield f"longhaul --help ended with {done.returncode}: {done.stderr.strip()[-400:]}"


def without_the_images(resolved: str) -> str:
    """Return a requirements file without the distributions kept from the image."""
    pins = re.split(r"^(?=[A-Za-z0-9])", resolved, flags=re.MULTILINE)
    return "".join(pin for pin in pins if not stays(re.split(r"==", pin)[0].strip()))


def main(arguments: list[str] | None = None) -> int:
    """Run one command: print the faults, one a line; return 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("image").add_argument("pyproject", type=Path)
    commands.add_parser("kept")
    commands.add_parser("installed").add_argument("kept", type=Path)
    commands.add_parser("health")
    commands.add_parser("lock")
    asked = parser.parse_args(arguments)
    if asked.command == "kept":
        sys.stdout.writelines(f"{line}\n" for line in kept())
        return 0
    if asked.command == "lock":
        sys.stdout.write(without_the_images(sys.stdin.read()))
        return 0
    if asked.command == "image":
        faults = list(image_faults(asked.pyproject))
        remedy = "Build on the tag that docs/containers.md names, or move the pins with it."
    elif asked.command == "installed":
        faults = list(installed_faults(asked.kept.read_text(encoding="utf-8").split()))
        remedy = "Rewrite the lock (make lock) and build again."
    else:
        faults, remedy = list(health_faults()), "Build the image again."
    if faults:
        sys.stderr.write("".join(f"{fault}\n" for fault in faults) + f"{remedy}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
