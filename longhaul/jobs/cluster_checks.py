# SPDX-License-Identifier: Apache-2.0
"""Checks of a cluster file: what jobs that use certain folders would still lack; light."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.sources import path_of
from longhaul.jobs.ladder_run import LadderRun
from longhaul.jobs.store_source import Documents
from recipes.spec.naming import start_folder
from recipes.spec.schema import decode
from slurm.cluster_file import PLACEHOLDER, ClusterFile, Container, Slurm, Tunnel
from slurm.nameable import BETWEEN_MOUNTS


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that jobs read, or write to."""

    what: str
    path: Path
    written: bool = False

    @property
    def paths(self) -> list[Path]:
        """The folder's path as given and with links resolved: jobs may use either."""
        return list(dict.fromkeys((Path(os.path.abspath(self.path)), self.path.resolve())))


@dataclass(frozen=True, kw_only=True)
class Mount:
    """An entry of `container.mounts`."""

    source: Path
    place: Path
    read_only: bool

    @classmethod
    def parsed(cls, word: str) -> "Mount":
        """Return the mount that an entry of a cluster file describes."""
        parts = word.split(":")
        flags = parts[2].split("+") if len(parts) == 3 else []
        return cls(source=Path(parts[0]), place=Path(parts[:2][-1]), read_only="ro" in flags)


def folders(plan: LadderRun, documents: Documents | None, export: Path | None) -> list[Folder]:
    """Return the folders that the jobs of a chain use.

    A store and an exported model are written next to their final paths and renamed, so jobs write
    to their parent folders.
    """
    found = [Folder(what="run folder", path=plan.run, written=True)]
    if documents is None:
        found.append(Folder(what="store", path=plan.store))
    else:
        found.append(Folder(what="store's folder", path=plan.store.parent, written=True))
        named = [("source", path_of(source)) for source in documents.sources]
        for what, word in (*named, ("tokenizer", documents.tokenizer)):
            if word is not None and word.startswith("/"):
                found.append(Folder(what=what, path=Path(word)))
    start = start_folder(plan.card, plan.ladder, plan.chosen[0][1], plan.run)
    if start is not None:
        found.append(Folder(what="model to start from", path=start))
    if export is not None:
        around = export.resolve().parent  # links are followed before the job is made
        found.append(Folder(what="folder of the export", path=around, written=True))
    return found


def ruler_folders(plan: LadderRun) -> list[Folder]:
    """Return the folders of the samples that gates have thresholds for."""
    stated = (stage.gate.ruler for _, stage in plan.chosen)
    places = dict.fromkeys(Path(ruler.samples) for ruler in stated if ruler is not None)
    return [Folder(what="folder of RULER's samples", path=place) for place in places]


def with_names(file: ClusterFile, account: str, partition: str) -> ClusterFile:
    """Return a cluster file with another account and partition, unless they are empty.

    Raises ValueError for a name that a cluster file could not state.
    """
    names = {"account": account, "partition": partition}
    given = {name: value for name, value in names.items() if value}
    slurm = decode(Slurm, file.slurm.model_dump() | given, "--account and --partition")
    return file.model_copy(update={"slurm": slurm})


def require_complete(file: ClusterFile, used: Sequence[Folder]) -> None:
    """Raise ValueError if a chain of jobs that use these folders would fail on the cluster."""
    if file.executor != "slurm":
        raise ValueError(
            f"cluster {file.name} has executor {file.executor}; a chain needs a scheduler with "
            "job dependencies: use slurm, or --executor local"
        )
    found = lacking(file, used)
    if found:
        raise ValueError(f"cluster {file.name}: {'; '.join(found)}")


def lacking(file: ClusterFile, used: Sequence[Folder] = ()) -> list[str]:
    """Return a sentence for each thing that jobs on a cluster, using these folders, would lack."""
    found = []
    if file.executor == "slurm" and file.slurm.account == PLACEHOLDER:
        found.append("slurm.account is CHANGE_ME; set it in the file, or by --account of run")
    if "array" in file.slurm.sbatch:
        found.append(
            "slurm.sbatch.array would run each job of the chain several times in the same folders; "
            "leave it out"
        )
    if file.container is not None:
        found += _of_container(file.container, file.tunnel, used)
    elif file.executor == "slurm":
        found += _of_python(file)
    if file.tunnel.kind == "ssh":
        found += _of_ssh(file.tunnel)
    return found


def _of_container(container: Container, tunnel: Tunnel, used: Sequence[Folder]) -> Iterator[str]:
    image, mounts = container.image, [Mount.parsed(word) for word in container.mounts]
    if PLACEHOLDER in image:
        yield (
            f"container.image is {image}; see docs/containers.md, or leave `container` out and "
            "set `python`"
        )
    elif image.startswith("/") and tunnel.kind == "local" and not Path(image).is_file():
        yield f"container.image {image} is not there; see docs/containers.md"
    for folder in used:
        for path in folder.paths:
            yield from _unmounted(folder, path, mounts)


def _unmounted(folder: Folder, path: Path, mounts: Sequence[Mount]) -> Iterator[str]:
    """Yield why a folder is missing, another one or read-only inside the container, if so."""
    around = [mount for mount in mounts if path.is_relative_to(mount.place)]
    mounted = next(one for one in (path, *path.parents) if not {*BETWEEN_MOUNTS} & {*str(one)})
    right = f"container.mounts needs {mounted}:{mounted}"
    if mounted != path and mounted == Path("/"):
        right = (
            f"pyxis cannot mount a path with {' or '.join(map(repr, BETWEEN_MOUNTS))}: rename it"
        )
    if not around:
        yield f"the {folder.what} {path} is not in the container; {right}"
        return
    inmost = max(around, key=lambda mount: len(mount.place.parts))
    if inmost.source != inmost.place:
        other = inmost.source / path.relative_to(inmost.place)
        yield f"the {folder.what} {path} would be {other} in the container; {right}"
    elif inmost.read_only and folder.written:
        yield (
            f"the {folder.what} {path} is written to, and {inmost.place} is mounted read-only; "
            f"{right}"
        )


def _of_python(file: ClusterFile) -> Iterator[str]:
    if file.python is None:
        yield "there is neither container nor python; ranks would run the python of PATH"
        return
    program = Path(file.python) / "bin" / "python"
    if file.tunnel.kind == "local" and not program.exists():
        yield f"python is {file.python}, a virtual environment, and {program} is not there"


def _of_ssh(tunnel: Tunnel) -> Iterator[str]:
    for name in ("host", "user", "folder"):
        if getattr(tunnel, name) is None:
            yield f"tunnel.{name} is missing; an SSH tunnel needs it"
    if tunnel.identity is not None and not Path(tunnel.identity).expanduser().is_file():
        yield f"tunnel.identity {tunnel.identity} is not there"
