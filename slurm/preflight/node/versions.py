# SPDX-License-Identifier: Apache-2.0
"""Checks of installed versions against the pins in the metadata of `longhaul-recipes`."""

import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from slurm.preflight.check import Group, PreflightCheck
from slurm.preflight.requirements import Expected

HELD = ("torch", "megatron-core", "nemo_toolkit", "nemo_run")
ON_GPUS = ("transformer-engine",)
PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def pins() -> dict[str, str]:
    """Return the version ranges of Longhaul's requirements, such as `{"torch": "==2.13.0"}`.

    From the metadata of the installed `longhaul-recipes`, else from pyproject.toml, as in a tree
    that nemo-run unpacked.
    """
    try:
        lines = requires("longhaul-recipes") or []
    except PackageNotFoundError:
        text = PYPROJECT.read_text() if PYPROJECT.is_file() else ""
        lines = re.findall(r'"([\w.-]+(?:\[[\w,-]+\])?[<>=!][^"]*)"', text)
    found = (re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*([^;]*)", line) for line in lines)
    return {_normal(one[1]): one[2].strip() for one in found if one and one[2].strip()}


def within(said: str, pin: str) -> bool:
    """Return whether a version is in a range such as `>=2.9,<2.10`, ignoring local labels."""
    return SpecifierSet(pin).contains(Version(said).public, prereleases=True)


def of_nvidia(said: str) -> bool:
    """Return whether a version is one of NVIDIA's builds, such as `2.9.0a0+145a3a7bda.nv25.10`."""
    return "nv" in (Version(said).local or "")


def installed(name: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def version_checks(
    expected: Expected, have: Callable[[str], str | None] = installed
) -> Iterator[PreflightCheck]:
    """Yield a check for each distribution that Longhaul pins."""
    if not expected.versions:
        return
    ranges = pins()
    for name in HELD + (ON_GPUS if expected.gpus_per_node else ()):
        pin, found = ranges.get(_normal(name)), have(name)
        if pin is None:
            yield PreflightCheck.warning(
                Group.VERSIONS, name, f"{found or 'not installed'}; its pin is unknown",
                "install longhaul-recipes (`make` in its clone), or run in its tree",
            )  # fmt: skip
        elif found is None:
            yield PreflightCheck.failure(
                Group.VERSIONS, name, f"not installed; {name}{pin} needed", _cure(name, pin)
            )
        elif name == "torch" and of_nvidia(found):
            yield PreflightCheck.ok(
                Group.VERSIONS, name, f"{found}, which the container's own check covers"
            )
        elif within(found, pin):
            yield PreflightCheck.ok(Group.VERSIONS, name, found)
        else:
            yield PreflightCheck.failure(
                Group.VERSIONS, name, f"{found}; {name}{pin} needed", _cure(name, pin)
            )


def _cure(name: str, pin: str) -> str:
    if name in ON_GPUS:
        return "build the container by slurm/container, or type `make gpu` in a clone"
    return f"build the container by slurm/container, or pip install '{name}{pin}'"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
