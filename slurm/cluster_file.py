# SPDX-License-Identifier: Apache-2.0
"""The cluster file: the machines, and how jobs are launched on them.

`recipes.spec.cluster` reads `hardware:`, which the planner needs; the sections about launching are
read here. Each section is a mapping of the fields below. An unknown field is an error with the
nearest name. So is a value of another type or out of range, and a text that cannot be written so
that the program which receives it reads the same text: `slurm.quoting` quotes for bash, but sbatch,
pyxis and the commands of nemo-run's SSH tunnel have characters that no quoting protects.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from recipes.spec import cluster
from recipes.spec.cluster import Cluster
from recipes.spec.schema import decode
from slurm.nameable import RUN_FOLDER

ExecutorName = Literal["local", "slurm"]
LIMIT = re.compile(r"[0-9]+(:[0-9]{2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{2}){0,2}")
LONGEST_SIGNAL = 65_535
"""Seconds before the limit that sbatch's `--signal` takes."""
PLACEHOLDER = "CHANGE_ME"
"""Placeholder in the shipped files for values that only the user knows; a launch refuses it."""


def seconds_of(limit: str) -> int:
    """Return the seconds of a limit in Slurm's notation; raise ValueError for another form.

    Minutes, minutes:seconds, h:m:s, days-h, days-h:m or days-h:m:s.
    """
    if LIMIT.fullmatch(limit) is None:
        raise ValueError("write minutes, h:mm:ss or days-hours, as 04:00:00")
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    seconds = sum(unit * part for unit, part in zip(units, parts, strict=False))
    if not (seconds := seconds + 86_400 * int(days or 0)):
        raise ValueError("to Slurm 0 means no limit; write the partition's own, as 7-00")
    return seconds


def _limit(said: str) -> str:
    seconds_of(said)
    return said


def _on_one_line(said: Any) -> Any:
    if isinstance(said, str) and not said.isprintable():
        raise ValueError("it has a line break or a control character, which breaks the script")
    return said


def _stated(value: str | int | bool) -> str | int | bool:
    if value is False:
        raise ValueError("leave it out: nemo-run would write it as =False")
    return value


def _for_sbatch(said: Any) -> Any:
    if isinstance(said, str) and "\\" in said:
        raise ValueError("leave out the backslash: sbatch drops it, in quotes too")
    return said


def _matching(pattern: str, right: str) -> AfterValidator:
    def checked(said: str) -> str:
        if re.fullmatch(pattern, said) is None:
            raise ValueError(right)
        return said

    return AfterValidator(checked)


Text = Annotated[str, Field(min_length=1), AfterValidator(_on_one_line)]
OfSbatch = Annotated[Text, AfterValidator(_for_sbatch)]
Value = Annotated[
    str | int | bool,
    AfterValidator(_on_one_line),
    AfterValidator(_stated),
    AfterValidator(_for_sbatch),
]
Name = Annotated[
    str,
    _matching(
        r"[a-z][a-z0-9_-]*",
        "write the flag without its dashes, with a to z, 0 to 9, _ and -",
    ),
]
Variable = Annotated[
    str,
    _matching(
        r"[A-Z_][A-Z0-9_]*",
        "a name may have A to Z, 0 to 9 and _: nemo-run upper-cases names, and writes them "
        "unquoted into a shell script",
    ),
]
Version = Annotated[
    str,
    _matching(r"([0-9]+(\.[0-9]+){0,2})?", "write numbers with dots between them, as 535.104"),
]
Flag = Annotated[
    Text,
    _matching(
        r"(--[a-z][a-z0-9-]*(=.+)?|-[A-Za-z]\S*)",
        "write one complete flag in each entry, as --mpi=pmix; srun would run other words",
    ),
]
Image = Annotated[
    Text,
    _matching(
        r"[./][^$`]*|[\w.:/@#+-]+",
        "write a path in full, without variables or ~, or [USER@][REGISTRY#]IMAGE[:TAG]",
    ),
]
MountText = Annotated[
    Text,
    _matching(
        r"([./][^\s,:$`'\"\\]*|tmpfs|umount)(:[./][^\s,:$`'\"\\]*(:[\w+=-]+)?)?",
        "write SRC, SRC:DST or SRC:DST:FLAGS with paths in full: pyxis has no variables, ~, "
        "blanks, quotes or commas in them, and lets a shell read them on the node",
    ),
]
Unquoted = Annotated[
    Text,
    _matching(
        r"(?!-)[A-Za-z0-9_@%+=:,./~-]+",
        "use letters, digits and _@%+=:,./~-, and no - first: nemo-run writes it unquoted",
    ),
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Slurm(_Section):
    """Arguments of sbatch and srun."""

    account: OfSbatch | None = PLACEHOLDER
    """None: the site has no accounts, or a default one."""
    partition: OfSbatch | None = None
    """None: the site's default."""
    time: Annotated[str, AfterValidator(_limit)] = "04:00:00"
    """Limit of a job. A longer stage saves before the limit and resumes when requeued."""
    save_seconds: Annotated[int, Field(ge=10, le=LONGEST_SIGNAL, validate_default=True)] = 600
    """Seconds before the limit at which ranks are told to save: a step and a checkpoint fit in."""
    most_failures: Annotated[int, Field(ge=0, le=100)] = 3
    """Times that a failed job is requeued; a job that saved and stopped always is."""
    ask_for_gpus: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    """`--gpus-per-node=N`, `--gres=gpu:N`, or nothing if whole nodes are allocated."""
    exclusive: bool = True
    qos: OfSbatch | None = None
    constraint: OfSbatch | None = None
    exclude: OfSbatch | None = None
    """Nodes never to use, in Slurm's list notation: n[3,7-9]."""
    mem: OfSbatch | None = "0"
    """`0`: all of the node's memory. Unless exclusive, a job on a part of its GPUs asks for that
    part, less 3%, and one without GPUs for none."""
    cpus_per_task: Annotated[int, Field(ge=1)] | None = None
    segment: Annotated[int, Field(ge=1)] | None = None
    """Nodes in one block of the topology plugin: an NVLink domain of GB200."""
    sbatch: dict[Name, Value] = {}
    """Further flags of sbatch by name, such as `reservation: nightly`; true: without a value."""
    srun: tuple[Flag, ...] = ()
    """Further flags of srun, each complete in one entry: `--mpi=pmix`."""

    @field_validator("time", mode="before")
    @classmethod
    def _quoted(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError("put it in quotes: YAML reads 4:00:00 as a number of seconds")
        return value

    @field_validator("save_seconds")
    @classmethod
    def _before_the_limit(cls, value: int, info: ValidationInfo) -> int:
        limit = info.data.get("time")
        if limit is not None and value >= seconds_of(limit):
            raise ValueError(
                f"slurm.time is {limit}, {seconds_of(limit)} seconds: a job would be told to save "
                "as it begins; raise slurm.time, or lower it"
            )
        return value


class Container(_Section):
    """The image that ranks run in, by pyxis on Slurm."""

    image: Image
    """`/shared/longhaul.sqsh`, or `nvcr.io#nvidia/nemo:TAG` in enroot's notation of registries."""
    mounts: tuple[MountText, ...] = ()
    """Mounts for pyxis: `SRC` (the same path in the container), `SRC:DST`, or `SRC:DST:FLAGS`, such
    as `/data:/data:ro+rprivate`. Run and store folders must be among them."""


class Preflight(_Section):
    """Limits of the node checks before a stage, in addition to the hardware; 0 or empty: none."""

    least_driver: Version = ""
    """Such as `535.104`; an older driver is a failure."""
    least_sm_clock_mhz: Annotated[int, Field(ge=0)] = 0
    """Least maximum clock by nvidia-smi (clocks.max.sm); a lower one is a failure."""
    least_write_mbps: Annotated[float, Field(ge=0)] = 0
    """MB/s of one node writing and syncing to the run folder; less is a warning."""
    free_gib: Annotated[float, Field(ge=0)] = 0
    """Free space of the run folder's file system, for checkpoints; less is a failure."""
    slow_warned: Annotated[float, Field(gt=1)] = 1.3
    """Slowdown against the median rank that is a warning."""
    slow_failed: Annotated[float, Field(gt=1)] = 2.0
    """Slowdown against the median rank that is a failure."""

    @field_validator("least_driver", mode="before")
    @classmethod
    def _quoted(cls, value: Any) -> Any:
        if isinstance(value, (int, float)):
            raise ValueError("put it in quotes: YAML reads it as a number")
        return value


class Tunnel(_Section):
    """Access of commands to the login node: on it (`local`), or over SSH."""

    kind: Literal["local", "ssh"] = "local"
    host: Unquoted | None = None
    user: Unquoted | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    identity: Unquoted | None = None
    """A private key; without one nemo-run asks for a password."""
    folder: Unquoted | None = None
    """Folder on the cluster in which nemo-run keeps scripts, code and output; it must be on the
    shared file system. None: the run's own."""


class ClusterFile(_Section):
    """One file of `slurm/clusters`, or a user's own."""

    name: Text
    hardware: Cluster | None = None
    """None for the machine that the command runs on."""
    executor: ExecutorName = "slurm"
    slurm: Slurm = Slurm()
    container: Container | None = None
    environment: dict[Variable, Annotated[str | int, AfterValidator(_on_one_line)]] = {}
    """Variables of every rank: NCCL, allocator, Transformer Engine. Names in capitals, as nemo-run
    writes them; sbatch passes on the other variables of the submitting shell."""
    python: Annotated[Text, _matching(r"[^:]+", "PATH, which gets it, separates by :")] | None = (
        None
    )
    """A virtual environment that every node sees, if there is no container."""
    preflight_seconds: Annotated[float, Field(ge=0, le=600)] = 30
    """Time limit of measuring links before a stage trains; 0: not measured."""
    preflight: Preflight = Preflight()
    tunnel: Tunnel = Tunnel()

    @model_validator(mode="after")
    def _without_run_folder(self) -> "ClusterFile":
        texts = {
            **self.slurm.model_dump(),
            **self.slurm.sbatch,
            "tunnel.folder": self.tunnel.folder,
        }
        for name, text in texts.items():
            if self.container is None and isinstance(text, str) and RUN_FOLDER in text:
                raise ValueError(
                    f"{name} is {text!r}; without a container nemo-run replaces {RUN_FOLDER} by "
                    "the folder of the job: use another name"
                )
        return self

    @property
    def machines(self) -> Cluster:
        """Return the hardware; raise ValueError if the file has none."""
        if self.hardware is None:
            raise ValueError(f"cluster {self.name} states no hardware")
        return self.hardware


def load(name: str) -> ClusterFile:
    """Return the file of a shipped name or of a path.

    Raises ValueError for an unknown name, or with every mistake in the file: its place, the problem
    and the correct form.
    """
    path = cluster.path_of(name)
    found = cluster.content(path)
    _refuse_removed(found, path)
    return decode(ClusterFile, found | {"name": path.stem}, str(path), unlisted=("name",))


def _refuse_removed(found: dict[str, Any], path: Path) -> None:
    """Drop sections of earlier templates that are empty; raise ValueError if they are not."""
    slurm = found.get("slurm")
    if found.pop("options", None):
        raise ValueError(
            f"{path}: options is of executors that launch no ladders; remove it, and use slurm or "
            "local"
        )
    if isinstance(slurm, dict) and slurm.pop("array", None) is not None:
        raise ValueError(
            f"{path}: slurm.array would run each job several times in the same folders; remove it"
        )
