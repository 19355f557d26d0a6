# SPDX-License-Identifier: Apache-2.0
"""Checks that Longhaul's top-level packages, whose names are common, are its own; light."""

from importlib.util import find_spec
from pathlib import Path

NAMES = ("recipes", "custom_modules", "data", "slurm", "eval")
ROOT = Path(__file__).resolve().parents[1]


class HiddenPackageError(ValueError):
    """Python imports another package or file in place of one of Longhaul's."""


def require_own_packages() -> None:
    """Raise HiddenPackageError if another folder on `sys.path` has a package of the same name.

    Nothing is imported, so the other package does not run.
    """
    for name in NAMES:
        place = _place(name)
        if place is not None and place.parent.parent != ROOT:
            raise HiddenPackageError(_sentence(name, place))


def require_own_files() -> None:
    """Raise HiddenPackageError if another distribution has overwritten a package of Longhaul.

    Reads the file lists of all distributions, which takes a moment: call it after an ImportError.
    """
    for name in NAMES:
        place = _place(name)
        if place is not None and _owner(name, place):
            raise HiddenPackageError(_sentence(name, place))


def _place(name: str) -> Path | None:
    """Return the file that `import name` would run; None if there is none."""
    spec = find_spec(name)
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None


def _owner(name: str, place: Path) -> str:
    """Return name and version of the distribution, other than Longhaul, that installed a file."""
    from importlib.metadata import distributions

    for one in distributions():
        if (one.metadata["Name"] or "").startswith("longhaul"):
            continue
        for file in one.files or ():
            if (
                file.parts[0] in (name, f"{name}.py")
                and Path(str(file.locate())).resolve() == place
            ):
                return f"{one.metadata['Name']} {one.version}"
    return ""


def _sentence(name: str, place: Path) -> str:
    owner = _owner(name, place)
    if owner:
        return (
            f"{owner} installs a package named {name!r} ({place}), which Python imports in place "
            "of Longhaul's; install Longhaul into an environment of its own, as `make` in its "
            "clone does"
        )
    return (
        f"{place} is imported as {name!r} in place of Longhaul's package of that name; rename it, "
        "or take its folder off Python's path: PYTHONPATH, or the working folder with `python -m`"
    )
