# SPDX-License-Identifier: Apache-2.0
"""Helper process of a rank: writes the rank's stacks with py-spy if no step ends for a long time.

It is started as a script, without any package, with the number of the rank's process, the file to
write and the path of py-spy. The rank writes a line with the seconds to wait to its standard input
at every step. If none follows in time, the stacks of the rank and of its child processes, such as
the readers of data, go to the file: those of C and C++ too, where py-spy can, which Python's own
`faulthandler` does not have. It ends with the rank.
"""

import contextlib
import os
import select
import subprocess
import sys
import time

LOOK_SECONDS = 1.0
"""Time between two looks whether the rank still exists."""
DUMP_SECONDS = 60.0
"""How long py-spy may take."""
WAYS = (("--subprocesses", "--native"), ("--subprocesses",))
REFUSED = (
    "py-spy could not read the stacks of this rank: {why}\n"
    "It needs ptrace: kernel.yama.ptrace_scope of 0 or 1, and in a container --cap-add SYS_PTRACE. "
    "The file without _pyspy has the stacks of Python.\n"
)


def stacks(process: int, program: str) -> str:
    """Return the stacks of a process, or why they cannot be read."""
    why = ""
    for way in WAYS:
        command = [program, "dump", "--pid", str(process), *way]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=DUMP_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
            continue
        if done.returncode == 0 and done.stdout:
            return done.stdout
        why = " ".join((done.stderr or done.stdout).split())
    return REFUSED.format(why=why[:500])


def main(process: int, file: str, program: str) -> None:
    """Wait for lines until one is late or the rank has ended."""
    end = float("inf")
    while True:
        left = max(0.0, min(end - time.monotonic(), LOOK_SECONDS))
        ready, _, _ = select.select([0], [], [], left)
        if ready:
            told = os.read(0, 4096)
            if not told:
                return
            with contextlib.suppress(ValueError, IndexError):
                end = time.monotonic() + float(told.split()[-1])
        elif os.getppid() != process:
            return
        elif time.monotonic() >= end:
            with open(f"{file}.tmp", "w", encoding="utf-8") as out:
                out.write(stacks(process, program))
            os.replace(f"{file}.tmp", file)
            end = float("inf")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
