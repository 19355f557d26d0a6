# SPDX-License-Identifier: Apache-2.0
"""What a cluster file lacks for the folders that jobs use."""

from pathlib import Path

import pytest

from longhaul.jobs import ladder_run
from longhaul.jobs.cluster_checks import Folder, folders, lacking, require_complete, with_names
from longhaul.jobs.store_source import Documents
from recipes.ladders import LADDERS
from recipes.models import CARDS
from slurm.cluster_file import ClusterFile, Container, Slurm, Tunnel

RUN = Folder(what="run folder", path=Path("/shared/me/run"), written=True)
STORE = Folder(what="store", path=Path("/shared/stores/llama"))


def site(*mounts: str, **sections) -> ClusterFile:
    """Return a file that lacks nothing but what is said."""
    container = Container(image="registry.example.org#longhaul:1", mounts=mounts)
    given = {"slurm": Slurm(account="me"), "container": container}
    return ClusterFile(name="site", **given | sections)


@pytest.mark.parametrize(
    "mounts",
    [
        ("/shared",),
        ("/shared:/shared",),
        ("/shared:/shared:rw", "/shared/stores:/shared/stores:ro+rprivate"),
        ("/shared/me/run:/shared/me/run", "/shared/stores:/shared/stores:ro"),
    ],
    ids=str,
)
def test_folders_under_a_mount_of_the_same_path_lack_nothing(mounts):
    assert lacking(site(*mounts), [RUN, STORE]) == []


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        ((), "the run folder /shared/me/run is not in the container; container.mounts needs "
             "/shared/me/run:/shared/me/run"),
        (("/shared/m:/shared/m",), "the run folder /shared/me/run is not in the container"),
        (("/lustre:/shared",), "the run folder /shared/me/run would be /lustre/me/run in"),
        (("/shared:/data",), "the run folder /shared/me/run is not in the container"),
        (("/shared:/shared:ro",), "the run folder /shared/me/run is written to, and /shared is "
                                  "mounted read-only; container.mounts needs"),
        (("/shared", "/shared/me:/shared/me:ro"), "and /shared/me is mounted read-only"),
    ],
    ids=str,
)  # fmt: skip
def test_a_folder_that_the_container_would_not_have_is_named_with_its_mount(mounts, said):
    found = lacking(site(*mounts), [RUN])
    assert len(found) == 1
    assert said in found[0]


def test_a_mount_is_proposed_that_pyxis_can_be_told():
    found = lacking(site(), [Folder(what="store", path=Path("/shared/my books/store"))])
    assert found == [
        "the store /shared/my books/store is not in the container; container.mounts needs "
        "/shared:/shared"
    ]
    (said,) = lacking(site(), [Folder(what="store", path=Path("/my books"))])
    assert "pyxis cannot mount a path with ' '" in said
    assert lacking(site("/shared"), [Folder(what="store", path=Path("/shared/my books"))]) == []


def test_a_linked_folder_has_to_be_there_by_both_its_names(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    found = lacking(site(f"{link}:{link}"), [Folder(what="store", path=link)])
    assert found == [
        f"the store {real} is not in the container; container.mounts needs {real}:{real}"
    ]


def test_an_environment_has_to_be_one_where_the_file_system_is_this_machine_s(tmp_path):
    assert "neither container nor python" in lacking(site(container=None))[0]
    file = site(container=None, python=str(tmp_path))
    assert lacking(file) == [
        f"python is {tmp_path}, a virtual environment, and {tmp_path}/bin/python is not there"
    ]
    tunnel = Tunnel(kind="ssh", host="h", user="me", folder="/shared/me")
    assert lacking(file.model_copy(update={"tunnel": tunnel})) == []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert lacking(file) == []


def test_a_chain_uses_what_it_reads_and_the_folders_around_what_it_renames():
    plan = ladder_run.plan(
        LADDERS["ultralong_1m"], CARDS["llama31_8b"], Path("/s/run"), Path("/s/stores/llama")
    )
    documents = Documents(source="/s/books", tokenizer="/s/tokenizer", vocab_size=8)
    found = folders(plan, documents, Path("/s/models/out"))
    assert {(str(one.path), one.written) for one in found} == {
        ("/s/run", True), ("/s/stores", True), ("/s/books", False), ("/s/tokenizer", False),
        ("models/llama31_8b", False), ("/s/models", True),
    }  # fmt: skip
    there = folders(plan, None, None)
    assert ("/s/stores/llama", False) in {(str(one.path), one.written) for one in there}
    hub = Documents(source="hf:books", tokenizer="meta-llama/Llama-3.1-8B", vocab_size=8)
    assert not {"source", "tokenizer"} & {one.what for one in folders(plan, hub, None)}
    sources = {
        "code": "repositories:/s/code",
        "files": "synthetic:copy,filler=/s/text.jsonl",
        "more": "synthetic:copy,filler=repositories:/s/more",
        "hub": "synthetic:copy,filler=hf:books",
        "none": "synthetic:copy",
    }
    schemes = Documents(source=sources, tokenizer="/s/tokenizer", vocab_size=8)
    read = [str(one.path) for one in folders(plan, schemes, None) if one.what == "source"]
    assert read == ["/s/code", "/s/text.jsonl", "/s/more"]


def test_an_array_is_refused_for_a_chain():
    file = site("/shared", slurm=Slurm(account="me", sbatch={"array": "0-3"}))
    with pytest.raises(ValueError, match=r"site: .*slurm\.sbatch\.array would run each job"):
        require_complete(file, [])


def test_an_account_that_no_cluster_file_could_state_is_refused():
    assert with_names(site(), "", "batch").slurm.partition == "batch"
    with pytest.raises(ValueError, match=r"--account and --partition: account is 'x\\ntouch y'"):
        with_names(site(), "x\ntouch y", "")
