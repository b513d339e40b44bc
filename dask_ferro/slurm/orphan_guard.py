"""The jobs of a cluster whose process is gone, for whatever reason: a small process cancels them, or the next cluster.

    ferro-<machine>-<process>-<cluster>.<submission>        the tag in the comment of each job

The watchdog finds the jobs by the tag, and by ids that it was told; their name is the user's.  It waits for the end of
a pipe, which the kernel closes for a killed process as well.  `sbatch` inherits the other end, so that the pipe ends
only when no submission is pending any more.  The watchdog ignores signals that a terminal or a batch system sends to a
whole group, since that is when it is needed.

If the watchdog is killed too, SLURM's queue is the record: `is_orphan` judges a job by the process in its tag, and any
other cluster of the same user, machine and job name cancels orphans.  A process on another machine cannot be judged:
its jobs are left alone.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import uuid
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

import xxhash

from dask_ferro import portable

_TAG = re.compile(r"\bferro-([0-9a-f]{8})-(\d{1,9})-[0-9a-f]{8}\.")

# Half an hour of attempts.  If the controller is down for longer, the jobs end by themselves, as no scheduler answers
# their workers.
_SCRIPT = r"""
trap '' HUP INT QUIT TERM PIPE
tag=$2 submitted=" "
while read -r word job; do
    case $word in
        closed) exit 0 ;;
        job) submitted="$submitted$job " ;;
    esac
done
over='BOOT_FAIL|CANCELLED|COMPLET|DEADLINE|FAILED|NODE_FAIL|OUT_OF|PREEMPTED|REVOKED|TIMEOUT'
alive() {
    grep -Ev " JobState=($over)" | while read -r line; do
        case $line in *"$tag."*) echo "$line"; continue ;; esac
        for job in $submitted; do
            case "$line " in "JobId=$job "*|*" ArrayJobId=$job "*) echo "$line" ;; esac
        done
    done | sed -n 's/^JobId=\([0-9]*\) .*/\1/p'
}
left=$submitted
pause=1
while [ "$pause" -le 1024 ]; do
    [ -z "$left" ] || echo "$left" | xargs -r -n 200 scancel
    # An empty answer may be a lie: scontrol says so where there are no jobs.  Jobs that are over are shown for minutes.
    if shown=$(scontrol --oneliner show job) && [ -n "$shown" ]; then
        left=$(echo "$shown" | alive)
        [ -n "$left" ] || exit 0
    fi
    sleep "$pause"
    pause=$((pause * 2))
done
"""


class Watchdog:
    """The watchdog process, from the first submission to the end of the cluster.

    Parameters
    ----------
    job_name : str
        The name of all jobs, by which the process is found in the list of all processes.
    tag : str
        A word in the comments of all these jobs, and no others.
    environment : mapping
        SLURM's configuration, and a PATH with its commands.
    """

    def __init__(self, job_name: str, tag: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ("/bin/sh", "-c", _SCRIPT, "dask-ferro-watchdog", job_name, tag),
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

    def _say(self, line: str) -> None:
        with suppress(BrokenPipeError):  # the process was killed from outside
            os.write(self.fd, f"{line}\n".encode())

    def close(self, *, jobs_left: bool = False) -> None:
        """End it, or let it cancel the remaining jobs.  Idempotent."""
        stream = self._process.stdin
        if stream is None or stream.closed:
            return
        if not jobs_left:
            self._say("closed")
        stream.close()
        if jobs_left:
            self._process.returncode = 0  # not waited for: it outlives this process
        else:
            self._process.wait()

    def _let_go(self) -> None:
        """Close a forked child's copy of the pipe, which would keep the watchdog waiting."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            os.close(self._process.stdin.fileno())


def new_tag() -> str:
    """Return the tag of a cluster of this process."""
    return f"ferro-{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def is_orphan(comment: str) -> bool:
    """Return whether a job's comment has the tag of a process of this machine that is gone."""
    tag = _TAG.search(comment)
    if tag is None or tag[1] != _machine():
        return False
    try:
        # Signal 0 reaches nobody: it only fails where there is no such process.
        os.kill(int(tag[2]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # the number is another user's process now
        return False
    return False


@cache
def _machine() -> str:
    """Return a digest of this machine's name and its space of process numbers."""
    # A container has numbers of its own, often beside the name of its host.
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return xxhash.xxh32_hexdigest(f"{socket.gethostname()} {space}".encode())


_living: weakref.WeakSet[Watchdog] = weakref.WeakSet()


def _release_all() -> None:
    for watchdog in list(_living):
        watchdog._let_go()
    _living.clear()


portable.register_at_fork(after_in_child=_release_all)
