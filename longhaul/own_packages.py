# SPDX-License-Identifier: Apache-2.0
"""Whether Longhaul's top-level packages are its own: their names are common ones; light."""

from importlib.util import find_spec
from pathlib import Path

NAMES = ("recipes", "custom_modules", "data", "slurm", "eval")
ROOT = Path(__file__).resolve().parents[1]


class HiddenPackageError(ValueError):
    """Report another package or file that Python imports in place of one of Longhaul's."""


def require_own_packages() -> None:
    """Raise HiddenPackageError where another place on `sys.path` has a package of our names.

    Nothing is imported: what is in the way does not run.
    """
    for name in NAMES:
        place = _place(name)
        if place is not None and place.parent.parent != ROOT:
            raise HiddenPackageError(_sentence(name, place))


def require_own_files() -> None:
    """Raise HiddenPackageError where another distribution has overwritten a package of ours.

    Reads what each distribution has installed, which takes a moment: for after an ImportError.
    """
    for name in NAMES:
        place = _place(name)
        if place is not None and _owner(name, place):
            raise HiddenPackageError(_sentence(name, place))


def _place(name: str) -> Path | None:
    """Return the file that `import name` would run; None for none."""
    spec = find_spec(name)
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None


def _owner(name: str, place: Path) -> str:
    """Return name and version of the distribution, not ours, that has installed a file."""
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
