"""A small process that cancels the jobs of a cluster whose own process is gone, for whatever reason.

It finds the jobs by the tag in their comment, and by ids that it was told; their name is the user's.  It waits for
the end of a pipe, which the kernel closes for a killed process as well.  `sbatch` inherits the other end, so that the
pipe ends only when no submission is pending any more.  The process ignores signals that a terminal or a batch system
sends to a whole group, since that is when it is needed. If the cluster has a journal, the process may wait for a
while for another run that takes the jobs over; it recognises that by another run's tag in a file.
"""

from __future__ import annotations

import math
import os
import subprocess
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from dask_ferro import portable

# Half an hour of attempts.  If the controller is down for longer, the jobs end by themselves, as no scheduler answers
# their workers.
_SCRIPT = r"""
trap '' HUP INT QUIT TERM PIPE
name=$1 user=$2 tag=$3 keep=$4 file=$5 submitted=" " former=
while read -r word job; do
    case $word in
        closed) exit 0 ;;
        now) keep=0 ;;
        tag) former="$former $job" ;;
        job) submitted="$submitted$job " ;;
    esac
done
# A file server that hangs must not hold it back: what does not come soon is not there.
is_taken_over() {
    [ -n "$file" ] || return 1
    read -r address run <<FOUND
$(timeout -s KILL 2 head -n 1 "$file" 2>/dev/null)
FOUND
    [ -n "$run" ] && [ "$run" != "$tag" ]
}
until=$(($(date +%s) + keep))
while [ "$keep" -gt 0 ] && [ "$(date +%s)" -lt "$until" ]; do
    ! is_taken_over || exit 0
    sleep 1
done
is_tagged() {
    for one in $tag $former; do
        case $1 in *"$one."*) return 0 ;; esac
    done
    return 1
}
own() {
    while read -r job comment; do
        if is_tagged "$comment"; then echo "$job"; continue; fi
        case $submitted in *" $job "*) echo "$job" ;; esac
    done | sort -u
}
over='BOOT_FAIL|CANCELLED|COMPLET|DEADLINE|FAILED|NODE_FAIL|OUT_OF|PREEMPTED|REVOKED|TIMEOUT'
# An empty squeue may be a lie.  Jobs that are over are shown for some minutes.
alive() {
    echo "$1" | while read -r line; do
        if is_tagged "$line"; then echo "$line"; continue; fi
        for job in $submitted; do
            case "$line " in "JobId=$job "*|*" ArrayJobId=$job "*) echo "$line" ;; esac
        done
    done | grep -Ev " JobState=($over)"
}
left=$submitted
pause=1
while [ "$pause" -le 1024 ]; do
    ! is_taken_over || exit 0
    [ -z "$left" ] || echo "$left" | xargs -r -n 200 scancel
    if queue=$(squeue --noheader --user="$user" --name="$name" --format='%F %k'); then
        left=$(echo "$queue" | own)
        if [ -z "$left" ] && shown=$(scontrol --oneliner show job); then
            left=$(alive "$shown" | sed -n 's/^JobId=\([0-9]*\) .*/\1/p')
            [ -n "$left" ] || exit 0
        fi
    fi
    sleep "$pause"
    pause=$((pause * 2))
done
"""


class GuardedJobs(NamedTuple):
    """The settings of the watchdog that follow from a journal.

    Attributes
    ----------
    seconds : float
        Seconds for which the jobs of a dead cluster are kept.
    file : str
        The file whose second word is the tag of the run that looks after the jobs.
    """

    seconds: float = 0.0
    file: str = ""


class Watchdog:
    """The watchdog process, from the first submission to the end of the cluster.

    Parameters
    ----------
    job_name : str
        The name of all jobs, which others may have as well.
    tag : str
        A word in the comments of all these jobs, and no others.
    environment : mapping
        SLURM's configuration, and a PATH with its commands.
    keep : GuardedJobs, optional
        For how long, and for which run, it leaves the jobs alone after the cluster has died.
    """

    def __init__(
        self,
        job_name: str,
        tag: str,
        environment: Mapping[str, str],
        keep: GuardedJobs | None = None,
    ) -> None:
        seconds, file = keep or GuardedJobs()
        given = (job_name, str(portable.user_id()), tag, str(math.ceil(seconds)), file)
        self._process = subprocess.Popen(
            ("/bin/sh", "-c", _SCRIPT, "dask-ferro-watchdog", *given),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            cwd="/",
            start_new_session=True,
        )
        _living.add(self)

    @property
    def fd(self) -> int:
        """The end of the pipe whose closing starts the cancellation."""
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def note(self, job_id: str) -> None:
        """Tell it the id of a job, which it then cancels even if the queue does not list it."""
        self._say(f"job {job_id}")

    def inherit(self, tag: str) -> None:
        """Tell it the tag of a previous run, whose jobs it also cancels."""
        self._say(f"tag {tag}")

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # the process was killed from outside
            os.write(self.fd, f"{line}\n".encode())

    def close(self, *, jobs_left: bool = False) -> None:
        """End it, or let it cancel the remaining jobs.  Idempotent."""
        stream = self._process.stdin
        if stream is None or stream.closed:
            return
        self._say("now" if jobs_left else "closed")
        stream.close()
        if jobs_left:
            self._process.returncode = 0  # not waited for: it outlives this process
        else:
            self._process.wait()

    def _let_go(self) -> None:
        """Close a forked child's copy of the pipe, which would keep the watchdog waiting."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            os.close(self._process.stdin.fileno())


_living: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _let_go() -> None:
    for watchdog in list(_living):
        watchdog._let_go()
    _living.clear()


portable.at_fork(after_in_child=_let_go)
