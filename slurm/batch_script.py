# SPDX-License-Identifier: Apache-2.0
"""Lines that nemo-run puts into each batch script before its ranks start.

When the ranks end, an EXIT trap reads the file of `slurm.outcome`: `continue` requeues the job
under the same number, so that dependent jobs keep waiting; a failure is requeued a few times in a
row, without the nodes that were blamed, as long as the partition has enough others. A job that was
cancelled, or that reached its time limit before the ranks had saved, is not requeued: Slurm does
not tell the script, so it asks. Neither is one that cannot record its failure.
"""

from pathlib import Path

from data.cuda_extension import ARCHITECTURES, FOLDER, WITHOUT_DEVICE
from slurm.quoting import word

_TRAP = """
trap : TERM
longhaul_without() {
    local bad="$LONGHAUL_OUTCOME.bad_nodes" without left
    [ -s "$bad" ] || return
    without=$({ cat "$bad"
        [ -z "$LONGHAUL_EXCLUDED" ] || scontrol show hostnames "$LONGHAUL_EXCLUDED"
    } | sort -u)
    left=$(sinfo -hN -t idle,mix,alloc,comp -p "$SLURM_JOB_PARTITION" -o %N | sort -u \
        | grep -vcxF "$without")
    without=$(paste -sd, <<<"$without")
    if [ "$left" -lt "$SLURM_JOB_NUM_NODES" ]; then
        echo "longhaul: $left nodes are left without $without; all are tried again" >&2
        rm -f "$bad"
    else
        echo "$without"
    fi
}
longhaul_again() {
    local nodes
    trap '' TERM
    nodes=$(longhaul_without)
    scontrol requeue "$SLURM_JOB_ID" || exit 1
    [ -n "$nodes" ] && sleep 2 && scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$nodes"
    exit 0
}
longhaul_ended() {
    local code=$? state="" said="" failures=0
    set +ex
    rm -rf "$LONGHAUL_OUTCOME.extensions"
    [ -r "$LONGHAUL_OUTCOME" ] && read -r state said <"$LONGHAUL_OUTCOME"
    echo "longhaul: the ranks ended with $code; ${state:-failed} $said"
    [ "$state" = finished ] && exit 0
    case "$state" in refused | stopped) exit 1 ;; esac
    if ! scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
        echo "longhaul: the job is cancelled, or over its time limit; not queued again"
        exit 1
    fi
    if [ "$state" = continue ]; then
        rm -f "$LONGHAUL_OUTCOME.failures"
        longhaul_again
    fi
    [ -r "$LONGHAUL_OUTCOME.failures" ] && read -r failures <"$LONGHAUL_OUTCOME.failures"
    if [ "${failures:-0}" -ge "$LONGHAUL_MOST_FAILURES" ]; then
        echo "longhaul: failed $((failures + 1)) times in a row; the last output says why"
        exit "$((code > 0 ? code : 1))"
    fi
    if ! echo "$((${failures:-0} + 1))" >"$LONGHAUL_OUTCOME.failures"; then
        echo "longhaul: nothing can be written beside $LONGHAUL_OUTCOME; not queued again"
        exit 1
    fi
    longhaul_again
}
trap longhaul_ended EXIT
mkdir -p "$(dirname "$LONGHAUL_OUTCOME")"
rm -f "$LONGHAUL_OUTCOME"
rm -rf "$LONGHAUL_OUTCOME.extensions"  # what a killed attempt left: its lock would be waited for
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] && rm -f "$LONGHAUL_OUTCOME".{failures,bad_nodes,steps}
"""

_OF_ARRAY = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"


def setup_lines(
    outcome: Path,
    *,
    most_failures: int,
    python: str | None,
    excluded: str | None = None,
    array: bool = False,
) -> str:
    """Return the lines for a job whose ranks write their outcome to `outcome`.

    `excluded` are nodes that are never used, in Slurm's list notation. Of an `array` each job has
    an outcome of its own and is requeued alone: the number of one of its jobs is that of the array.
    """
    said = [
        f"export LONGHAUL_OUTCOME={word(str(outcome))}{'.$SLURM_ARRAY_TASK_ID' if array else ''}",
        f"LONGHAUL_MOST_FAILURES={most_failures}",
        f"LONGHAUL_EXCLUDED={word(excluded or '')}",
        f'export {FOLDER}="${{{FOLDER}:-$LONGHAUL_OUTCOME.extensions}}"',
        "nvidia-smi -L >/dev/null 2>&1 ||"
        f' export {ARCHITECTURES}="${{{ARCHITECTURES}:-{WITHOUT_DEVICE}}}"',
    ]
    if python is not None:
        said.append(f'export PATH={word(python + "/bin")}:"$PATH"')
    return "\n".join(said) + (_TRAP.replace("$SLURM_JOB_ID", _OF_ARRAY) if array else _TRAP)
