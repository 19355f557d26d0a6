# SPDX-License-Identifier: Apache-2.0
"""The command line of this process and the commit of its code, which results state."""

from longhaul.terminal.typed_command import typed_command
from longhaul.version import commit


def origin() -> dict[str, str]:
    """Return the command as typed, without known secrets, and the commit of this checkout."""
    return {"command": typed_command(), "commit": commit()}
