# SPDX-License-Identifier: Apache-2.0
"""The command line of this process and the commit of its code, which results state."""

import shlex
import sys

from longhaul.version import commit


def origin() -> dict[str, str]:
    """Return the command as it was typed, and the commit of this checkout."""
    return {"command": shlex.join(["longhaul", *sys.argv[1:]]), "commit": commit()}
