"""A small process that cancels the jobs of a cluster whose own process is gone, however it went.

It waits for the end of a pipe, which the kernel closes for a process that was killed as well.  `sbatch` inherits the
other end: the pipe ends when no submission is on its way any more.  It is deaf to what a terminal or a batch system
sends to a whole group, since that is when it is needed.
"""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Mapping

_CLOSED = b"closed\n"
# Half an hour of tries.  Under a controller that is down for longer the jobs end by themselves: no scheduler answers
# their workers.
_SCRIPT = """
trap '' HUP INT QUIT TERM PIPE
read -r word && [ "$word" = closed ] && exit 0
over='BOOT_FAIL|CANCELLED|COMPLET|DEADLINE|FAILED|NODE_FAIL|OUT_OF|PREEMPTED|REVOKED|TIMEOUT'
# An empty squeue may be a lie.  Jobs that are over are shown for some minutes.
is_gone() {
    shown=$(scontrol --oneliner show job) || return 1
    ours=$(echo "$shown" | grep -F " JobName=$1 ")
    [ -z "$ours" ] || ! echo "$ours" | grep -Eqv " JobState=($over)"
}
pause=1
while [ "$pause" -le 1024 ]; do
    scancel --user="$2" --name="$1"
    left=$(squeue --noheader --user="$2" --name="$1" --format=%i) && [ -z "$left" ] && is_gone "$1" && exit 0
    sleep "$pause"
    pause=$((pause * 2))
done
"""


class Watchdog:
    """The process; it is there from the first submission to the end of the cluster.

    Parameters
    ----------
    job_name : str
        Which all jobs have, and no others.
    environment : mapping
        With SLURM's configuration, and the commands on the PATH.
    """

    def __init__(self, job_name: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "dask-ferro-watchdog", job_name, str(os.getuid())],
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

    def close(self, *, jobs_left: bool = False) -> None:
        """End it, or leave it to cancel the jobs that are left.  Idempotent."""
        stream = self._process.stdin
        if stream is None or stream.closed:
            return
        if not jobs_left:
            try:
                os.write(stream.fileno(), _CLOSED)
            except BrokenPipeError:
                jobs_left = False  # somebody killed it: there is nothing to tell
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


os.register_at_fork(after_in_child=_let_go)
