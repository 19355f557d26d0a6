# SPDX-License-Identifier: Apache-2.0
"""A process that runs commands of Longhaul in itself, one after the other, as it is asked to.

    python -m benchmarks.reliability.command_loop

Each line of its standard input is a JSON list, the words after `longhaul`. It answers with a line
of its standard output, the exit code, when the command has ended; what commands print goes to its
standard error. The server that `longhaul rehearse` forks ranks from lives as long as this process.
"""

import json
import os
import sys

from benchmarks.reliability.bad_inputs import installed


def main() -> None:
    """Run the commands until the input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        command = installed()
        for line in sys.stdin:
            sys.argv = ["longhaul", *json.loads(line)]
            try:
                command()
                code: object = 0
            except SystemExit as end:
                code = end.code or 0
            answers.write(f"{code}\n")
            answers.flush()


if __name__ == "__main__":
    main()
