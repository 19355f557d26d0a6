# SPDX-License-Identifier: Apache-2.0
"""The Debian packages of the tests' Slurm, installed where that is possible."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "mariadb-server", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "sacct", "slurmdbd", "mariadbd", "munged")
# A plain user's PATH lacks the directories of daemons.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
INSTALL = ("apt-get", "install", "-y", "--no-install-recommends", *PACKAGES)


def obstacle() -> str:
    """Install what is missing; return why no Slurm can be started here, or an empty string."""
    if os.geteuid() != 0:
        return "this Slurm runs its daemons as root, and the tests do not run as root"
    with (Path(tempfile.gettempdir()) / "longhaul-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker installs, the others find it done
        if not missing():
            return ""
        if shutil.which("apt-get") is None:
            return f"{', '.join(missing())} missing, and there is no apt-get to install them"
        said = install()
    return f"{', '.join(missing())} missing after `{' '.join(INSTALL)}`:\n{said}" * bool(missing())


def missing() -> list[str]:
    """Return the programs that are not on this machine."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def install() -> str:
    """Run apt-get; return the end of what it said."""
    environment = {
        **os.environ,
        "DEBIAN_FRONTEND": "noninteractive",
        "RUNLEVEL": "1",  # the packages' own services are not wanted: invoke-rc.d then starts none
    }
    said = ""
    for command in (("apt-get", "update"), INSTALL):
        done = subprocess.run(
            command,
            check=False,  # what is missing afterwards says whether it has worked
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said += done.stdout
    return "\n".join(said.splitlines()[-20:])
