# SPDX-License-Identifier: Apache-2.0
"""nemo-run's executors from a cluster file."""

import socket
from pathlib import Path
from typing import Any

import nemo_run as run

from recipes.spec.units import GiB
from slurm.batch_script import setup_lines
from slurm.cluster_file import PLACEHOLDER, ClusterFile
from slurm.local_executor import ALLOCATOR, OF_EVERY_RANK, allocator_settings, local_executor
from slurm.nameable import require_nameable
from slurm.quoting import QuotedJobDetails, QuotedTunnel, word

PREFIX = "longhaul."
REACHED_SECONDS = 10.0
ASKED_MEMORY = 0.97
"""Share of its part of host memory that a job asks for: Slurm offers less than is built in, since
firmware and the kernel take some, and the jobs of all GPUs of a node have to fit together."""


def executor(
    file: ClusterFile,
    *,
    nodes: int,
    ranks_per_node: int,
    folder: Path,
    outcome: Path,
    save_seconds: int | None = None,
    array: int | None = None,
    after_failure: bool = False,
) -> run.Executor:
    """Return the executor of a job with this many nodes and ranks.

    Records, scripts and code go below `folder`, the outcome of the ranks to `outcome`. Ranks are
    signalled `save_seconds` before the time limit (None: the file's; 0: never). An `array` is that
    many jobs of one number, each with an outcome of its own. `after_failure` starts the job once
    the one before it has ended in any way, else it has to succeed. Raises ValueError for missing
    values that only the user knows.
    """
    if file.executor == "local":
        return local_executor(nodes * ranks_per_node)
    if save_seconds is None:
        save_seconds = file.slurm.save_seconds
    return _slurm(
        file, nodes=nodes, ranks_per_node=ranks_per_node, folder=folder.absolute(),
        outcome=outcome.absolute(), save_seconds=save_seconds, array=array,
        after_failure=after_failure,
    )  # fmt: skip


def environment(file: ClusterFile) -> dict[str, str]:
    """Return the variables of every rank, for a shell."""
    variables = {"OMP_NUM_THREADS": "1", **_variables(file)}
    return {name: word(value) for name, value in variables.items()}


def _variables(file: ClusterFile) -> dict[str, str]:
    """Return the variables of every rank, overridden by those of the file."""
    said = {name: str(value) for name, value in file.environment.items()}
    said[ALLOCATOR] = allocator_settings(said.get(ALLOCATOR, ""))
    return {**OF_EVERY_RANK, **said}


def _slurm(
    file: ClusterFile,
    *,
    nodes: int,
    ranks_per_node: int,
    folder: Path,
    outcome: Path,
    save_seconds: int,
    array: int | None,
    after_failure: bool,
) -> run.SlurmExecutor:
    chosen, gpus = file.slurm, file.slurm.ask_for_gpus
    if chosen.account == PLACEHOLDER:
        raise ValueError(
            f"cluster {file.name} names no account; set slurm.account in the file, or --account"
        )
    container = file.container
    require_nameable(
        folder, in_container=container is not None, through_ssh=file.tunnel.kind == "ssh"
    )
    return run.SlurmExecutor(
        account=chosen.account,
        partition=chosen.partition,
        job_name_prefix=PREFIX,
        time=chosen.time,
        nodes=nodes,
        ntasks_per_node=ranks_per_node,
        gpus_per_node=ranks_per_node if gpus == "gpus_per_node" else None,
        gres=f"gpu:{ranks_per_node}" if gpus == "gres" else None,
        exclusive=chosen.exclusive or None,
        qos=chosen.qos,
        constraint=chosen.constraint,
        exclude=chosen.exclude,
        mem=_memory(file, ranks_per_node),
        cpus_per_task=chosen.cpus_per_task,
        segment=chosen.segment,
        signal=f"USR1@{save_seconds}" if save_seconds else None,
        container_image=None if container is None else word(container.image),
        container_mounts=[] if container is None else [word(mount) for mount in container.mounts],
        container_env=None if container is None else sorted(environment(file)),  # over the image's
        array=None if array is None else f"0-{array - 1}",
        dependency_type="afterany" if after_failure else "afterok",
        srun_args=[word(flag) for flag in chosen.srun],
        # A job that can never run is cancelled, and so are those after it.
        additional_parameters={"kill_on_invalid_dep": "yes", **chosen.sbatch},
        env_vars={
            **environment(file),
            "MASTER_ADDR": "$head_node_ip",  # set by nemo-run's script
            "MASTER_PORT": "$((20000 + SLURM_JOB_ID % 12000))",  # below those that Linux assigns
        },
        setup_lines=setup_lines(
            outcome,
            most_failures=chosen.most_failures,
            python=None if container else file.python,
            excluded=chosen.exclude,
            array=array is not None,
        ),
        packager=run.GitArchivePackager(include_submodules=False),
        job_details=QuotedJobDetails(),
        tunnel=_tunnel(file, folder),
        poll_estimated_start_time=False,
    )


def _memory(file: ClusterFile, ranks_per_node: int) -> str | None:
    """Return the host memory of a job on each node, for `--mem`.

    Where jobs share nodes, ranks with GPUs ask for their part instead of all of it.
    """
    chosen, machine = file.slurm, file.hardware
    shares = not chosen.exclusive and chosen.ask_for_gpus != "none"
    if chosen.mem != "0" or not shares or machine is None:
        return chosen.mem
    if ranks_per_node >= machine.gpus_per_node:
        return chosen.mem
    asked = ASKED_MEMORY * machine.host_bytes_per_rank * ranks_per_node
    return f"{int(asked / GiB * 1024)}M"


def _tunnel(file: ClusterFile, folder: Path) -> Any:
    tunnel = file.tunnel
    if tunnel.kind == "local":
        return QuotedTunnel(job_dir=str(folder / "experiments"))  # where nemo-run writes too
    missing = [name for name in ("host", "user", "folder") if getattr(tunnel, name) is None]
    if missing:
        raise ValueError(
            f"cluster {file.name}: tunnel.{' and tunnel.'.join(missing)} missing; an SSH tunnel "
            "needs host, user and a folder on the cluster"
        )
    return run.SSHTunnel(
        host=tunnel.host,
        user=tunnel.user,
        port=tunnel.port,
        identity=None if tunnel.identity is None else str(Path(tunnel.identity).expanduser()),
        job_dir=tunnel.folder,
    )


def require_reached(file: ClusterFile) -> None:
    """Raise ValueError if the login node of an SSH tunnel does not answer or refuses the key."""
    host, port = str(file.tunnel.host), file.tunnel.port or 22
    try:
        socket.create_connection((host, port), timeout=REACHED_SECONDS).close()
    except OSError as error:
        raise ValueError(
            f"cluster {file.name}: tunnel.host {host} does not answer on port {port} ({error}); "
            "nothing was submitted"
        ) from None
    if file.tunnel.identity is None:
        return  # a password is asked for when something is run
    try:
        _tunnel(file, Path()).connect()
    except (OSError, SystemExit):  # nemo-run exits after a failed login
        raise ValueError(
            f"cluster {file.name}: {host} does not let {file.tunnel.user} in with tunnel.identity "
            f"{file.tunnel.identity}; nothing was submitted"
        ) from None
