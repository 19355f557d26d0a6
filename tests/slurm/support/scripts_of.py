# SPDX-License-Identifier: Apache-2.0
"""The batch scripts of a dry run, without what differs from run to run."""

import re
from dataclasses import replace
from pathlib import Path

import yaml

from longhaul.jobs import ladder_run, local_chain
from longhaul.jobs.chain_suites import jobs_left
from longhaul.jobs.slurm_chain import jobs
from longhaul.jobs.store_source import Documents
from recipes.ladders import LADDERS
from recipes.models import CARDS
from recipes.shipped.machines import Machines
from recipes.spec import cluster
from recipes.spec.suites import SuiteRun
from slurm.cluster_file import load
from slurm.experiment import scripts

NODES = (4, 128)


def site(folder: Path, **slurm: object) -> Path:
    """Write DGX H100 with an account and a container of its own, and return the file."""
    given = yaml.safe_load((cluster.FOLDER / "dgx_h100.yaml").read_text())
    given["slurm"] = {"account": "tests", "time": "08:00:00", **slurm}
    given["container"] = {"image": "nvcr.io#acme/longhaul:1", "mounts": ["/shared:/shared"]}
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def dry_scripts(folder: Path, nodes: int) -> dict[str, str]:
    """Return the scripts of a million tokens on so many nodes, as a run in `folder` has them."""
    ladder = replace(LADDERS["ultralong_1m"], suites=(SuiteRun(tasks=("hellaswag",)),))
    plan = ladder_run.plan(ladder, CARDS["llama31_8b"], folder / "run", folder / "store")
    file = site(folder)
    machines = load(str(file)).hardware
    asked = Machines(cluster=str(file), nodes=nodes)
    rows = ladder_run.rows(plan, asked, submitted=True)
    stages = [
        stage.planned(plan.card, machines) for stage in local_chain.stages(plan, rows, [], None)
    ]
    documents = Documents(source="/shared/books", tokenizer="/shared/tokenizer", vocab_size=128_256)
    found = scripts(
        plan.name,
        jobs(
            plan,
            stages,
            load(str(file)),
            documents=documents,
            export=folder / "exported",
            scored=jobs_left(plan, stages),
            cache={"HF_DATASETS_CACHE": "/shared/me/datasets"},
        ),
        plan.run / "launch",
    )
    return {name: _settled(text, folder) for name, text in found.items()}


def _settled(script: str, folder: Path) -> str:
    return re.sub(r"_\d{19}", "_ID", script.replace(str(folder), "/shared/me")) + "\n"
