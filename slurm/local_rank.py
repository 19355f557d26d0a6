# SPDX-License-Identifier: Apache-2.0
"""Program of a rank of this machine: nemo-run's runner, which ends with the command.

torchrun runs this file by its path. Before Python 3.11 its folder comes first on Python's path,
where its modules would hide others of the same name.
"""

import sys
from pathlib import Path

if sys.path[:1] == [str(Path(__file__).resolve().parent)]:
    del sys.path[0]

from slurm.starter import end_with_starter

if __name__ == "__main__":
    end_with_starter()
    from nemo_run.core.runners.fdl_runner import fdl_runner_app

    fdl_runner_app()
