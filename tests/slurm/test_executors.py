# SPDX-License-Identifier: Apache-2.0
"""nemo-run's executors from cluster files, and what is refused before anything is submitted."""

import socket
import threading
from pathlib import Path

import nemo_run as run
import pytest

from longhaul.jobs.cluster_checks import lacking
from slurm.cluster_file import ClusterFile, Container, Slurm, Tunnel, load
from slurm.executors import environment, executor, require_reached

PLACES = {"folder": Path("/shared/run/launch"), "outcome": Path("/shared/run/outcome")}


def file(**fields) -> ClusterFile:
    """Return a cluster of nothing but what is said."""
    return ClusterFile(**({"name": "mine"} | fields))


def made(cluster: ClusterFile, nodes: int = 2, ranks_per_node: int = 8):
    return executor(cluster, nodes=nodes, ranks_per_node=ranks_per_node, **PLACES)


def test_a_slurm_executor_has_what_the_file_says():
    slurm = Slurm(account="me", partition="batch", time="01:00:00", save_seconds=120,
                  sbatch={"reservation": "nightly"}, srun=("--mpi=pmix",))  # fmt: skip
    found = made(file(slurm=slurm, container=Container(image="/x.sqsh", mounts=("/a:/b",))))
    assert isinstance(found, run.SlurmExecutor)
    assert (found.nodes, found.ntasks_per_node, found.gpus_per_node) == (2, 8, 8)
    assert (found.account, found.partition, found.time) == ("me", "batch", "01:00:00")
    assert found.signal == "USR1@120"
    assert found.container_image == "/x.sqsh"
    assert found.container_mounts == ["/a:/b"]
    assert {"OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"} <= set(found.container_env)
    assert found.additional_parameters == {"kill_on_invalid_dep": "yes", "reservation": "nightly"}
    assert found.srun_args == ["--mpi=pmix"]
    assert "LONGHAUL_OUTCOME=/shared/run/outcome" in found.setup_lines
    assert found.launcher is None  # ranks start one by one, so that signals reach them


@pytest.mark.parametrize(("given", "signal"), [(None, "USR1@600"), (1500, "USR1@1500"), (0, None)])
def test_ranks_are_told_as_long_before_the_limit_as_a_job_needs(given, signal):
    site = file(slurm=Slurm(account="me"))
    found = executor(site, nodes=1, ranks_per_node=1, save_seconds=given, **PLACES)
    assert found.signal == signal


def test_a_site_without_accounts_has_none(tmp_path):
    (tmp_path / "site.yaml").write_text("slurm: {account: null}\nexecutor: slurm\n")
    site = load(str(tmp_path / "site.yaml"))
    assert not [each for each in lacking(site) if "account" in each]
    assert made(site).account is None


def test_nodes_that_the_file_excludes_stay_excluded_when_others_are_blamed():
    found = made(file(slurm=Slurm(account="me", exclude="n[3,7-9]")))
    assert found.exclude == "n[3,7-9]"
    assert "LONGHAUL_EXCLUDED='n[3,7-9]'" in found.setup_lines


def test_a_key_in_the_home_folder_is_found():
    tunnel = Tunnel(kind="ssh", host="h", user="me", folder="/x", identity="~/.ssh/key")
    found = made(file(slurm=Slurm(account="me"), tunnel=tunnel))
    assert found.tunnel.identity == str(Path.home() / ".ssh/key")


@pytest.mark.parametrize(
    ("asked", "gpus_per_node", "gres"),
    [("gpus_per_node", 8, None), ("gres", None, "gpu:8"), ("none", None, None)],
)
def test_gpus_are_asked_for_as_the_site_wants(asked, gpus_per_node, gres):
    found = made(file(slurm=Slurm(account="me", ask_for_gpus=asked)))
    assert (found.gpus_per_node, found.gres) == (gpus_per_node, gres)


@pytest.mark.parametrize(
    ("stated", "ranks", "mem"),
    [
        ({"exclusive": False}, 1, "254279M"),  # 97% of an eighth of 2 TiB
        ({"exclusive": False}, 4, "1017118M"),
        ({"exclusive": False}, 8, "0"),
        ({"exclusive": False, "mem": "100G"}, 1, "100G"),
        ({"exclusive": False, "ask_for_gpus": "none"}, 1, "0"),
        ({}, 1, "0"),
    ],
    ids=str,
)
def test_a_part_of_a_shared_node_asks_for_that_part_of_its_memory(stated, ranks, mem):
    site = file(slurm=Slurm(account="me", **stated), hardware=load("dgx_h100").hardware)
    assert made(site, nodes=1, ranks_per_node=ranks).mem == mem
    without_hardware = site.model_copy(update={"hardware": None})
    assert made(without_hardware, ranks_per_node=ranks).mem == site.slurm.mem


def test_variables_are_quoted_for_a_shell_and_the_allocator_grows_its_segments():
    found = environment(file(environment={"A": "x y", "CUDA_DEVICE_MAX_CONNECTIONS": 1}))
    assert found["A"] == "'x y'"
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "names no account; set slurm.account in the file, or --account"),
        ({"slurm": Slurm(account="me"), "tunnel": Tunnel(kind="ssh", host="h")},
         "tunnel.user and tunnel.folder missing"),
    ],
    ids=str,
)  # fmt: skip
def test_what_only_the_user_knows_is_asked_for(fields, said):
    with pytest.raises(ValueError, match="mine") as told:
        made(file(**fields))
    assert said in str(told.value)


def test_a_tunnel_that_does_not_answer_is_told_before_anything_is_submitted():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        require_reached(file(tunnel=Tunnel(kind="ssh", host="127.0.0.1", port=port)))
    with pytest.raises(ValueError, match=f"does not answer on port {port}"):
        require_reached(file(tunnel=Tunnel(kind="ssh", host="127.0.0.1", port=port)))


def test_a_key_that_is_not_let_in_is_told_before_anything_is_submitted(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_hang_up_on_all, args=(server,), daemon=True).start()
        tunnel = Tunnel(kind="ssh", host="127.0.0.1", port=server.getsockname()[1], user="me",
                        folder="/x", identity=str(tmp_path / "key"))  # fmt: skip
        with pytest.raises(ValueError, match="does not let me in with"):
            require_reached(file(tunnel=tunnel))


def _hang_up_on_all(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def test_the_local_file_starts_ranks_here():
    assert isinstance(made(load("local"), nodes=1, ranks_per_node=2), run.LocalExecutor)
