# SPDX-License-Identifier: Apache-2.0
"""The commands of public data sets can be typed, and their names are names of sources."""

import shlex

import pytest
from huggingface_hub.cli.hf import main as hf

from data.public_datasets import DATASETS, PublicDataset, UnknownDatasetError, named
from data.splits import SOURCE_NAME
from recipes.ladders import LADDERS

IDS = [dataset.name for dataset in DATASETS]


@pytest.mark.parametrize("dataset", DATASETS, ids=IDS)
def test_a_download_is_a_command_of_the_hub_s_program(
    dataset: PublicDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.cli.download.snapshot_download", lambda **given: asked.append(given)
    )
    for command, subset in zip(dataset.commands, dataset.subsets, strict=True):
        monkeypatch.setattr("sys.argv", shlex.split(command))
        hf()
        given = asked.pop()
        assert given["repo_id"] == dataset.hub_id
        assert given["repo_type"] == "dataset"
        assert given["allow_patterns"] == [subset.include]
        assert given["local_dir"] == f"downloads/{dataset.name}"


@pytest.mark.parametrize("dataset", DATASETS, ids=IDS)
def test_a_name_is_that_of_a_source(dataset: PublicDataset) -> None:
    assert SOURCE_NAME.fullmatch(dataset.name)
    assert named(dataset.name) is named(dataset.hub_id) is dataset
    assert dataset.licence
    if dataset.prepare is not None:
        assert f"--source {dataset.name}=downloads/{dataset.name} " in dataset.prepare


def test_names_differ_and_an_unknown_one_is_answered_with_the_nearest() -> None:
    assert len(set(IDS)) == len(IDS)
    of_ladders = {
        share.source
        for ladder in LADDERS.values()
        for stage in ladder.stages
        for share in (stage.mix.shares if stage.mix else ())
    }
    assert of_ladders & set(IDS) == {"fineweb_edu", "institutional_books"}
    assert not any("-" in name for name in {*of_ladders, *IDS})
    assert named("FineWeb-Edu").name == "fineweb_edu"
    with pytest.raises(UnknownDatasetError, match="no data set is called pg-19; did you mean pg19"):
        named("pg-19")
