# SPDX-License-Identifier: Apache-2.0
"""Data of a ladder's suites in the jobs of a cluster.

Ranks do not download. The data are loaded into the caches of Hugging Face where the command is
typed, and the jobs are told those caches, which every node has to see.
"""

import os
import subprocess
import sys
from pathlib import Path

from longhaul.jobs.cluster_checks import Folder
from longhaul.jobs.ladder_run import LadderRun
from slurm.cluster_file import ClusterFile

WITHOUT = 3
"""Exit code of a Python that has no lm-evaluation-harness."""
LOOK = f"import importlib.util as u, sys; sys.exit(0 if u.find_spec('lm_eval') else {WITHOUT})"


def caches() -> dict[str, str]:
    """Return the caches of this process, by the variables that name them."""
    from datasets import config
    from huggingface_hub import constants

    places = {
        "HF_HOME": constants.HF_HOME,
        "HF_HUB_CACHE": constants.HF_HUB_CACHE,
        "HF_DATASETS_CACHE": config.HF_DATASETS_CACHE,
    }
    return {name: os.path.abspath(place) for name, place in places.items()}


def folders(plan: LadderRun) -> list[Folder]:
    """Return the folders that the suites' jobs use: caches, and task files of one's own."""
    places = {name: Path(place) for name, place in caches().items()}
    found = [
        Folder(what=f"cache of the suites' data ({name})", path=place, written=True)
        for name, place in places.items()
        if not any(place.is_relative_to(other) for other in places.values() if other != place)
    ]
    for suite in plan.ladder.suites:
        if suite.include:
            found.append(Folder(what="folder of task files", path=Path(suite.include)))
    return found


def require_same_caches(file: ClusterFile) -> None:
    """Raise ValueError if the cluster file names other caches than those that are filled here."""
    for name, here in caches().items():
        said = file.environment.get(name)
        if said is not None and os.path.abspath(str(said)) != here:
            raise ValueError(
                f"cluster {file.name}: environment sets {name} to {said}, and the data of suites "
                f"are loaded into {here} here; run the command with {name}={said}"
            )


def require_harness_of(file: ClusterFile) -> None:
    """Raise ValueError if the environment of the jobs is here and lacks lm-evaluation-harness."""
    if file.container is not None or file.python is None or file.tunnel.kind != "local":
        return
    if Path(file.python).resolve() == Path(sys.prefix).resolve():
        return
    program = Path(file.python) / "bin" / "python"
    try:
        done = subprocess.run([program, "-c", LOOK], check=False, capture_output=True)
    except OSError:  # a program for the nodes alone
        return
    if done.returncode == WITHOUT:
        raise ValueError(
            f"cluster {file.name}: python is {file.python}, which has no lm-evaluation-harness for "
            f"the suites of the ladder; install it: {program} -m pip install -e '.[eval]'"
        )
