# SPDX-License-Identifier: Apache-2.0
"""A cluster file whole: the machines, and how jobs get to them; light, no NeMo.

`recipes.cluster` reads `hardware:`, which the planner asks for; everything else of the file is
about launching and stands here. Each section is a mapping of the fields below. A field that is not
there is an error with the nearest name, and so is a value of another type or out of range.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from recipes import cluster
from recipes.cluster import Cluster
from recipes.nearest import hint

ExecutorName = Literal["local", "slurm", "docker", "skypilot", "lepton", "kubeflow", "dgxcloud"]
Text = Annotated[str, Field(min_length=1)]
LIMIT = r"^(\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}){0,2})$"
"""Slurm's ways to say a time: minutes, minutes:seconds, h:m:s, days-h, days-h:m, days-h:m:s."""
PLACEHOLDER = "CHANGE_ME"
"""What the shipped files say where only the user knows; a launch refuses it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Slurm(_Section):
    """What sbatch and srun are told."""

    account: Text = PLACEHOLDER
    partition: Text | None = None
    """None: the site's default."""
    time: Annotated[str, Field(pattern=LIMIT)] = "04:00:00"
    """Limit of a job. A stage that takes longer saves before it and goes on in the next turn."""
    save_seconds: Annotated[int, Field(ge=10, le=3600)] = 600
    """How long before the limit ranks are told to save and stop."""
    most_failures: Annotated[int, Field(ge=0, le=100)] = 3
    """Times that a job that failed is queued again; one that saved and stopped always is."""
    ask_for_gpus: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    """`--gpus-per-node=N`, `--gres=gpu:N`, or nothing where whole nodes are given out."""
    exclusive: bool = True
    qos: Text | None = None
    constraint: Text | None = None
    exclude: Text | None = None
    """Nodes never to use, as Slurm writes lists: n[3,7-9]."""
    mem: Text | None = "0"
    """`0`: all of a node's."""
    cpus_per_task: Annotated[int, Field(ge=1)] | None = None
    segment: Annotated[int, Field(ge=1)] | None = None
    """Nodes that share a block of the topology plugin: NVLink domains of GB200."""
    sbatch: dict[str, str | int | bool] = {}
    """Further flags of sbatch by name, as `reservation: nightly`."""
    srun: tuple[Text, ...] = ()
    """Further flags of srun, whole: `--mpi=pmix`."""
    array: Text | None = None

    @field_validator("time", mode="before")
    @classmethod
    def _quoted(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError("put it in quotes: YAML reads 4:00:00 as a number of seconds")
        return value


class Container(_Section):
    """The image that ranks run in, by pyxis on Slurm."""

    image: Text
    """`/shared/longhaul.sqsh`, or `nvcr.io#nvidia/nemo:TAG` as enroot writes registries."""
    mounts: tuple[Text, ...] = ()
    """`HOST:CONTAINER`; the run and store folders have to be among them."""


class Tunnel(_Section):
    """How commands reach the login node: from it (`local`), or over SSH."""

    kind: Literal["local", "ssh"] = "local"
    host: Text | None = None
    user: Text | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    identity: Text | None = None
    """A private key; without one nemo-run asks for a password."""
    folder: Text | None = None
    """Folder on the cluster that nemo-run keeps scripts, code and output in; it has to be on the
    shared file system. None: the run's own."""


class ClusterFile(_Section):
    """One file of `slurm/clusters`, or of one's own."""

    name: Text
    hardware: Cluster | None = None
    """None where the machine is whatever one sits at."""
    executor: ExecutorName = "slurm"
    slurm: Slurm = Slurm()
    container: Container | None = None
    environment: dict[str, str | int] = {}
    """Of every rank: NCCL, allocator, Transformer Engine."""
    python: Text | None = None
    """A virtual environment that every node sees, where there is no container."""
    preflight_seconds: Annotated[float, Field(ge=0, le=600)] = 30
    """What measuring links may take before a stage trains; 0: not at all."""
    tunnel: Tunnel = Tunnel()
    options: dict[str, Any] = {}
    """Fields of nemo-run's executor of the other kinds, as it names them."""

    @property
    def machines(self) -> Cluster:
        """Return the hardware; raise ValueError where the file has none."""
        if self.hardware is None:
            raise ValueError(f"cluster {self.name} says no hardware")
        return self.hardware


def load(name: str) -> ClusterFile:
    """Return the whole file of a shipped name or of a path.

    Raises ValueError for an unknown name, and for each mistake in the file, with where it is, what
    it is and what would be right.
    """
    path = cluster.path_of(name)
    found = cluster.content(path)
    hardware = cluster.load(name) if "hardware" in found else None
    rest = {key: value for key, value in found.items() if key != "hardware"}
    try:
        return ClusterFile.model_validate(
            _with_tuples(rest) | {"name": path.stem, "hardware": hardware}
        )
    except ValidationError as error:
        raise ValueError("; ".join(_mistakes(path, error))) from None


def _with_tuples(value: Any) -> Any:
    """Return YAML's content with tuples where it has lists, which strict fields ask for."""
    if isinstance(value, Mapping):
        return {key: _with_tuples(one) for key, one in value.items()}
    return tuple(_with_tuples(one) for one in value) if isinstance(value, list) else value


def _mistakes(path: Path, error: ValidationError) -> Iterator[str]:
    """Yield a sentence for each mistake: where it is, what it is, what would be right."""
    for one in error.errors():
        place = one["loc"]
        where = ".".join(map(str, place))
        if one["type"] == "extra_forbidden":
            section, name = ".".join(map(str, place[:-1])) or "it", str(place[-1])
            yield f"{path}: {section} has no field {name!r}; {hint(name, _fields(place[:-1]))}"
        elif one["type"] == "missing":
            yield f"{path}: {where} is missing"
        else:
            said = one["msg"].removeprefix("Value error, ").replace("Input", "it")
            if one["type"] == "string_pattern_mismatch":
                said = "write minutes, h:mm:ss or days-hours, as 04:00:00"
            yield f"{path}: {where} is {one['input']!r}; {said}"


def _fields(place: Sequence[int | str]) -> Sequence[str]:
    """Return the fields of a section of the file."""
    sections: dict[str, type[_Section]] = {
        "slurm": Slurm, "container": Container, "tunnel": Tunnel,
    }  # fmt: skip
    kind = sections[str(place[0])] if place else ClusterFile
    return [name for name in kind.model_fields if name != "name"]
