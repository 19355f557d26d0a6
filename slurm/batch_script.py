# SPDX-License-Identifier: Apache-2.0
"""Lines that nemo-run puts into each batch script before its ranks start.

The ranks' end runs an EXIT trap, which reads `slurm.outcome`'s file: `continue` queues the job
again under its own number, so that jobs that wait for it go on waiting; a failure does so a few
times, without the nodes that were blamed. A script that is itself told to end (scancel, or a time
limit that came before the ranks had saved) stays ended.
"""

import shlex
from pathlib import Path

_TRAP = """
longhaul_told=0
trap 'longhaul_told=1' TERM
longhaul_again() {
    local nodes="" bad="$LONGHAUL_OUTCOME.bad_nodes"
    trap '' TERM
    [ -s "$bad" ] && nodes=$(sort -u "$bad" | paste -sd,)
    scontrol requeue "$SLURM_JOB_ID" || exit 1
    [ -n "$nodes" ] && sleep 2 && scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$nodes"
    exit 0
}
longhaul_ended() {
    local code=$? state="" said="" failures=0
    set +ex
    [ -r "$LONGHAUL_OUTCOME" ] && read -r state said <"$LONGHAUL_OUTCOME"
    echo "longhaul: the ranks ended with $code; ${state:-failed} $said"
    [ "$state" = finished ] && rm -f "$LONGHAUL_OUTCOME.failures" && exit 0
    [ "$state" = refused ] && exit 1
    [ "$longhaul_told" = 1 ] && echo "longhaul: told to end" && exit 1
    if [ "$state" = continue ]; then
        rm -f "$LONGHAUL_OUTCOME.failures"
        longhaul_again
    fi
    [ -r "$LONGHAUL_OUTCOME.failures" ] && read -r failures <"$LONGHAUL_OUTCOME.failures"
    if [ "$failures" -ge "$LONGHAUL_MOST_FAILURES" ]; then
        echo "longhaul: failed $((failures + 1)) times; the last output says why"
        exit "$((code > 0 ? code : 1))"
    fi
    echo "$((failures + 1))" >"$LONGHAUL_OUTCOME.failures"
    longhaul_again
}
trap longhaul_ended EXIT
mkdir -p "$(dirname "$LONGHAUL_OUTCOME")"
rm -f "$LONGHAUL_OUTCOME"
"""


def setup_lines(outcome: Path, *, most_failures: int, python: str | None) -> str:
    """Return the lines for a job whose ranks leave their word at `outcome`."""
    said = [
        f"export LONGHAUL_OUTCOME={shlex.quote(str(outcome))}",
        f"LONGHAUL_MOST_FAILURES={most_failures}",
    ]
    if python is not None:
        said.append(f'export PATH={shlex.quote(python + "/bin")}:"$PATH"')
    return "\n".join(said) + _TRAP
