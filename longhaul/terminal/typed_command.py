# SPDX-License-Identifier: Apache-2.0
"""The command line of this process as files of a run state it; light."""

import shlex
import sys

from recipes.spec.passwords import without_passwords

ALERT = "--alert"
MASKED = "..."


def typed_command() -> str:
    """Return the command as it was typed, without that of `--alert` and passwords of URLs.

    The address of a webhook lets everyone who knows it write there.
    """
    given = sys.argv[1:]
    words = [
        MASKED if before == ALERT
        else f"{ALERT}={MASKED}" if word.startswith(f"{ALERT}=")
        else word
        for before, word in zip(["", *given], given, strict=False)
    ]  # fmt: skip
    return without_passwords(shlex.join(["longhaul", *words]))
