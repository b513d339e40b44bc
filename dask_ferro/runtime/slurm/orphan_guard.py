"""A small process that cancels the jobs of a cluster whose own process is gone, however it went.

Jobs are its own by the tag in their comment, and by what it was told of their ids; their name is the user's.
It waits for the end of a pipe, which the kernel closes for a process that was killed as well.  `sbatch` inherits the
other end: the pipe ends when no submission is on its way any more.  It is deaf to what a terminal or a batch system
sends to a whole group, since that is when it is needed.
Where the cluster has a journal it may wait a while, for a cluster that is started again on it and takes the jobs over;
the sign of that is another run's tag in a file.
"""

from __future__ import annotations

import math
import os
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from dask_ferro import portable

# Half an hour of tries.  Under a controller that is down for longer the jobs end by themselves: no scheduler answers
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
    """What a journal means for the watchdog.

    Attributes
    ----------
    seconds : float
        For which the jobs of a cluster that died are kept.
    file : str
        Where the tag of the run stands that looks after them, as the second word.
    """

    seconds: float = 0.0
    file: str = ""


class Watchdog:
    """The process; it is there from the first submission to the end of the cluster.

    Parameters
    ----------
    job_name : str
        Which all jobs have, and others may have as well.
    tag : str
        A word that the comments of all jobs have, and no others.
    environment : mapping
        With SLURM's configuration, and the commands on the PATH.
    keep : GuardedJobs, optional
        For how long, and for whom, it leaves the jobs alone when the cluster has died.
    command : sequence of str, optional
        What to run in place of SLURM's script.
    """

    def __init__(
        self,
        job_name: str,
        tag: str,
        environment: Mapping[str, str],
        keep: GuardedJobs | None = None,
        command: Sequence[str] = (),
    ) -> None:
        seconds, file = keep or GuardedJobs()
        given = (job_name, str(portable.user_id()), tag, str(math.ceil(seconds)), file)
        self._process = subprocess.Popen(
            command or ("/bin/sh", "-c", _SCRIPT, "dask-ferro-watchdog", *given),
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
        """The end of the pipe that holds it back."""
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def note(self, job_id: str) -> None:
        """Let it know of a job, which it then cancels whatever the queue says."""
        self._say(f"job {job_id}")

    def inherit(self, tag: str) -> None:
        """Let it know of a run before, whose jobs are its own as well."""
        self._say(f"tag {tag}")

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # somebody killed it: there is nothing to tell
            os.write(self.fd, f"{line}\n".encode())

    def close(self, *, jobs_left: bool = False) -> None:
        """End it, or leave it to cancel the jobs that are left.  Idempotent."""
        stream = self._process.stdin
        if stream is None or stream.closed:
            return
        self._say("now" if jobs_left else "closed")
        stream.close()
        if jobs_left:
            self._process.returncode = 0  # not ours to wait for: it outlives this process
        else:
            self._process.wait()

    def _let_go(self) -> None:
        """In a forked child: close the copy of the pipe, or the child would hold the watchdog back."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            os.close(self._process.stdin.fileno())


_living: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _let_go() -> None:
    for watchdog in list(_living):
        watchdog._let_go()
    _living.clear()


portable.at_fork(after_in_child=_let_go)
