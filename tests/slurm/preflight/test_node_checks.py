# SPDX-License-Identifier: Apache-2.0
"""Host, folders, versions, ports and the place of a rank; the page and its exit code."""

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from data.store import Manifest
from longhaul.commands.preflight import preflight
from recipes.notation.layout import layout_from
from recipes.spec import cluster as clusters
from recipes.spec.units import GiB
from slurm.cluster_file import ClusterFile, Preflight
from slurm.preflight.check import Group, PreflightCheck, as_json, blamed, exit_code, joined, page
from slurm.preflight.machine import Machine, first_node, rank_of
from slurm.preflight.node.filesystem import awaited, content_checks, folder_checks
from slurm.preflight.node.host import host_checks
from slurm.preflight.node.network import unreachable
from slurm.preflight.node.versions import pins, version_checks, within
from slurm.preflight.ranks.checks import _content
from slurm.preflight.ranks.placement import Place, place_checks
from slurm.preflight.requirements import Expected, thresholds

GOOD = PreflightCheck.ok(Group.HOST, "host memory", "512.0 GiB left")
BAD = PreflightCheck.failure(Group.HOST, "host memory", "3.0 GiB left", "keep less")


def place(host: str, local: int, **other: object) -> Place:
    facts = {
        "world_size": 4, "device": str(local), "versions": {"torch": "2.13.0"}, "commit": "abc",
        "nccl": {},
    }  # fmt: skip
    return Place(host=host, local_rank=local, **(facts | other))


def failed(checks) -> dict[str, str]:
    return {check.name: check.said for check in checks if check.state == "failure"}


def test_exit_codes_are_a_group_s_and_none_means_something_else():
    assert exit_code([GOOD]) == 0
    slow = PreflightCheck.failure(Group.SPEED, "ring", "slow", "look")
    assert exit_code([slow, GOOD, BAD]) == 24
    taken = {0, 1, 2, *range(85, 90), *range(124, 160)}
    assert not taken & set(Group)


def test_nodes_that_agree_are_one_line_and_one_that_does_not_is_named():
    assert joined({"n1": [GOOD], "n2": [GOOD]}) == [GOOD]
    (check,) = joined({"n1": [GOOD], "n2": [BAD], "n3": [BAD]})
    assert check.nodes == ("n2", "n3")
    lines = list(page([check]))
    assert lines == [
        "FAIL host memory on n2, n3: 3.0 GiB left; keep less",
        "1 checks: 1 failed, 0 warned",
    ]
    assert json.loads(as_json([check]))["checks"][0]["group"] == "host"


def failure(name: str, *nodes: str, said: str = "wrong") -> PreflightCheck:
    return PreflightCheck.failure(Group.HOST, name, said, "mend it", nodes)


@pytest.mark.parametrize(
    ("checks", "found"),
    [
        ([failure("memory", "n2")], ("n2",)),
        ([failure("memory", "n3", "n1"), failure("clocks", "n3")], ("n1", "n3")),
        ([failure("memory", "n1", "n2", "n3")], ()),
        ([failure("memory", "n1", "n2", "n3"), failure("clocks", "n2")], ("n2",)),
        ([failure("memory", *ours, said=ours[0]) for ours in (["n1", "n3"], ["n2"])], ()),
        ([failure("memory", "n1", "n2"), failure("clocks", "n3")], ()),
        ([failure("memory", "login")], ()),
        ([failure("ranks")], ()),
        ([PreflightCheck.warning(Group.HOST, "memory", "little", "keep less", ["n2"])], ()),
    ],
    ids=["one", "two", "all", "all and one", "all, each in its words", "each by another", "a "
         "stranger", "nobody", "a warning"],
)  # fmt: skip
def test_nodes_that_fail_by_themselves_are_blamed(checks, found):
    assert blamed(checks, ("n3", "n1", "n2")) == found
    assert blamed(checks, ()) == ()


def test_thresholds_are_what_the_cluster_file_says():
    stated = {
        "least_driver": "580.65", "least_sm_clock_mhz": 1700, "least_write_mbps": 500.0,
        "free_gib": 2000.0, "slow_warned": 1.5, "slow_failed": 3.0,
    }  # fmt: skip
    environment = {"NCCL_IB_HCA": "mlx5"}
    file = ClusterFile(name="mine", preflight=Preflight(**stated), environment=environment)
    assert thresholds(file) == stated | {"hca": "mlx5"}
    assert Expected(**thresholds(ClusterFile(name="mine"))) == Expected()


def test_what_a_layout_needs_of_a_cluster():
    words = "tp2 ulysses4 dp2 offload-inputs:64"
    expected = Expected.of(clusters.load("dgx_h100"), layout_from(words))
    assert (expected.world_size, expected.nodes, expected.ranks_per_node) == (16, 2, 8)
    assert (expected.tp, expected.cp, expected.ulysses) == (2, 4, 4)
    assert expected.host_bytes_per_rank == 64 * GiB
    assert not expected.adam_unknown
    rack = Expected.of(clusters.load("gb200_nvl72"), layout_from("tp4 dp8"))
    assert (rack.nodes, rack.gpus_per_node, rack.linked_gpus) == (8, 4, 64)
    with pytest.raises(ValueError, match="do not divide evenly over 3 nodes"):
        Expected.of(clusters.load("dgx_h100"), layout_from(words), nodes=3)


@pytest.mark.parametrize(("left", "name"), [(519, "host memory"), (521, None)])
def test_offload_of_all_ranks_and_a_reserve_must_fit_the_host(left, name):
    expected = Expected(ranks_per_node=8, host_bytes_per_rank=64 * GiB)
    checks = host_checks(expected, Machine(memory_left=lambda: left * GiB))
    assert list(failed(checks)) == ([name] if name else [])


def test_a_share_of_adam_on_the_host_that_is_not_known_is_a_warning():
    dgx, layout = clusters.load("dgx_h100"), layout_from("tp8 adam-on-host:0.5")
    of_words, of_plan = Expected.of(dgx, layout), Expected.of(dgx, layout, host_bytes_per_rank=GiB)
    for expected, states in ((of_words, ["warning"]), (of_plan, [])):
        checks = host_checks(expected, Machine())
        assert [each.state for each in checks if each.name == "Adam on the host"] == states


def test_a_small_shared_memory_fails(tmp_path):
    huge = Expected(shared_memory_gib=2**30)
    checks = failed(host_checks(huge, Machine(shared_memory=tmp_path)))
    assert "1,073,741,824.0 GiB needed" in checks["shared memory"]
    assert "no such file" in failed(
        host_checks(huge, Machine(shared_memory=tmp_path / "none"))
    )["shared memory"].lower()  # fmt: skip


def test_folders_are_tried_and_left_as_they_were(tmp_path):
    run, store = tmp_path / "runs" / "new", tmp_path / "store"
    store.mkdir()
    (store / "manifest.json").write_text("{}")
    expected = Expected(run_folder=run, store=store, least_write_mbps=1e9, free_gib=2**40)
    checks = list(folder_checks(expected, "n1", written=1000))
    assert [(check.name, check.state) for check in checks] == [
        ("run folder", "warning"),
        ("free space", "failure"),
        ("store", "ok"),
    ]
    assert list(run.iterdir()) == []


def test_a_checkpoint_folder_apart_from_the_run_s_is_tried_as_well(tmp_path):
    (tmp_path / "file").touch()
    apart, free = tmp_path / "file" / "checkpoints", 2**40
    checks = failed(folder_checks(Expected(checkpoint_folder=apart), "n1"))
    assert f"log.ckpt.dirpath {apart} cannot be written" in checks["checkpoint folder"]
    made = Expected(checkpoint_folder=tmp_path / "new" / "checkpoints", free_gib=free)
    assert "GiB needed" in failed(folder_checks(made, "n1"))["free space"]
    within = Expected(run_folder=tmp_path, checkpoint_folder=tmp_path / "new")
    assert failed(folder_checks(within, "n1", written=1000)) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("made", "said"), [(True, "is empty"), (False, "no such file")])
def test_a_store_that_cannot_be_trained_on_fails(tmp_path, made, said):
    store = tmp_path / "store"
    if made:
        store.mkdir()
    assert said in failed(folder_checks(Expected(store=store), "n1"))["store"]


def test_a_store_that_goes_away_while_it_is_read_is_a_failure_and_not_the_end_of_the_rank(
    tmp_path, small_store, monkeypatch
):
    def gone(*_, **__):
        raise FileNotFoundError(2, "No such file or directory", str(small_store / "train.bin"))

    monkeypatch.setattr(Manifest, "load", gone)
    said = failed(content_checks(Expected(store=Path(small_store))))["store's content"]
    assert said == f"{small_store / 'train.bin'}: no such file or directory"


@pytest.mark.parametrize(("verify", "seconds"), [("whole", 24 * 3600), ("sampled", 3600)])
def test_ranks_wait_a_day_only_where_the_first_one_reads_all_of_a_store(verify, seconds):
    waited = []

    @dataclass(frozen=True)
    class Waiting:
        rank: SimpleNamespace
        seconds: float

        def decided(self, key: str, value: object) -> None:
            waited.append((key, self.seconds))

    assert _content(Expected(verify=verify), Waiting(SimpleNamespace(rank=1), 5.0)) == []
    assert waited == [("store", seconds)]


def test_a_file_that_never_comes_is_waited_for_and_named(tmp_path):
    assert awaited(tmp_path / "none", "token", 0.0) == "no such file or directory"
    (tmp_path / "other").write_text("old")
    assert awaited(tmp_path / "other", "token", 0.0) == "its content differs"


@pytest.mark.parametrize(
    ("said", "pin", "held"),
    [
        ("2.13.0+cu130", "==2.13.0", True),
        ("2.13", "==2.13.0", True),
        ("2.9.0a0+nv25.09", "==2.13.0", False),
        ("2.9.1", ">=2.9,<2.10", True),
        ("2.10.0", ">=2.9,<2.10", False),
    ],
)
def test_versions_compare_by_their_numbers(said, pin, held):
    assert within(said, pin) is held


def test_our_pins_are_read_and_a_missing_distribution_fails():
    ranges = pins()
    assert ranges["torch"].startswith("==")
    assert "," in ranges["transformer-engine"]
    expected = Expected(gpus_per_node=8)
    assert set(failed(version_checks(expected, lambda name: None))) == {
        "torch", "megatron-core", "nemo_toolkit", "nemo_run", "transformer-engine",
    }  # fmt: skip
    built = {"torch": "2.9.0a0+145a3a7bda.nv25.10"}
    found = version_checks(Expected(), built.get)
    assert "torch" not in set(failed(found))  # the container's own check is for NVIDIA's build


def test_a_port_that_listens_is_reached_and_a_name_that_is_none_is_not():
    with socket.create_server(("localhost", 0)) as server:
        assert unreachable("localhost", server.getsockname()[1], 5) is None
    assert unreachable("no-such-host.invalid", 1, 0.1) is not None


@pytest.mark.parametrize(
    ("listed", "first"),
    [("n[03-07,9],m1", "n03"), ("n1,n2", "n1"), ("login", "login"), ("a-b[1]", "a-b1")],
)
def test_the_first_node_of_slurm_s_list(listed, first):
    assert first_node(listed) == first


def test_a_rank_of_srun_meets_where_lightning_will():
    rank = rank_of(
        Machine(
            environ={
                "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1",
                "SLURM_STEP_NODELIST": "n[1-8]", "SLURM_JOB_ID": "12345", "SLURMD_NODENAME": "n2",
            }
        )
    )  # fmt: skip
    assert (rank.rank, rank.world_size, rank.local_rank, rank.host) == (3, 16, 1, "n2")
    assert (rank.address, rank.port, rank.agent) == ("n1", 17345, False)


def test_a_batch_script_is_no_rank():
    assert rank_of(Machine(environ={"SLURM_PROCID": "0", "SLURM_NTASKS": "16"})) is None


def test_numbers_that_are_none_are_an_error():
    with pytest.raises(ValueError, match="the variables of this rank are unreadable"):
        rank_of(Machine(environ={"RANK": "first", "WORLD_SIZE": "2"}))


@pytest.mark.parametrize(
    ("places", "name", "said"),
    [
        ([place("a", 0), place("a", 1), place("b", 0), place("b", 1)], None, ""),
        ([place("a", 0), place("b", 0), place("a", 1), place("b", 1)], "order of ranks", "a, b"),
        (
            [place("a", 0), place("a", 1), place("b", 0, device="1"), place("b", 1)],
            "one GPU a rank", "ranks 2, 3 are all on GPU 1 of b",
        ),
        (
            [place("a", 0), place("a", 1), place("b", 0), place("b", 1, device="")],
            "one GPU a rank", "ranks 3 see no GPU",
        ),
        (
            [place("a", 0), place("a", 1), place("a", 2), place("b", 0)],
            "ranks a node", "a has 3, b has 1; 2 expected on each",
        ),
        (
            [place("a", 0), place("a", 1), place("b", 0), place("b", 1, commit="def")],
            "ranks alike", "commit is abc, but def on b (rank 3)",
        ),
        (
            [place("a", 0, nccl={"NCCL_ALGO": "Ring"}), *(place(*p) for p in
             (("a", 1), ("b", 0), ("b", 1)))],
            "ranks alike", "NCCL_ALGO is not set, but Ring on a (rank 0)",
        ),
    ],
)  # fmt: skip
def test_places_of_ranks_add_up_to_a_job_or_say_where_not(places, name, said):
    found = failed(place_checks(Expected(nodes=2, ranks_per_node=2), places, on_gpus=True))
    assert list(found) == ([name] if name else [])
    assert said in "".join(found.values())


def test_the_command_answers_with_the_page_and_the_exit_code(tmp_path, monkeypatch):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    app = typer.Typer()
    app.command()(preflight)
    well = CliRunner().invoke(app, ["--run", str(tmp_path), "--json"])
    assert well.exit_code == 0, well.output
    assert {row["name"] for row in json.loads(well.output)["checks"]} >= {"torch", "run folder"}
    assert json.loads((tmp_path / "preflight.json").read_text()) == json.loads(well.output)
    missing = CliRunner().invoke(app, ["--store", str(tmp_path / "none")])
    assert missing.exit_code == 25
    assert "FAIL store: " in missing.output
