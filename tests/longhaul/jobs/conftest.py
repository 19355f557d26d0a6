# SPDX-License-Identifier: Apache-2.0
"""A ladder of one stage on DGX H100, as a Slurm chain plans it."""

import pytest

from longhaul.jobs import ladder_run, local_chain
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped.machines import Machines
from slurm import cluster_file

NODES = 4


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    ladder, card = LADDERS["ultralong_1m"], CARDS["llama31_8b"]
    return ladder_run.plan(ladder, card, folder / "run", folder / "store")


@pytest.fixture(scope="module")
def made(plan):
    rows = ladder_run.rows(plan, Machines(cluster="dgx_h100", nodes=NODES), submitted=True)
    return [
        stage.planned(plan.card, cluster_file.load("dgx_h100").hardware)
        for stage in local_chain.stages(plan, rows, [], None)
    ]
