"""The batch script of a worker job on a batch system other than SLURM.

It has its own timer for the warning signal, since not every batch system sends a signal ahead.  Durations are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dask_ferro.runtime.jobs.script import ScriptedJob

# SLURM's default, and long enough for most sites; the actual time varies.
_KILL_WAIT = 30.0

# A sleep that is killed does not mean the end of the job's time.
_TIMER = """\
(
    trap 'kill "$ferro_sleep" 2>/dev/null; exit' TERM
    trap - USR1
    sleep {seconds} &
    ferro_sleep=$!
    wait "$ferro_sleep" && kill -USR1 "$ferro_pid"
) >/dev/null 2>&1 </dev/null &
ferro_timer=$!
"""


class TimedJob(ScriptedJob):
    """A mixin for a job of dask-jobqueue, before its class: our script, with a timer.

    `grace` is the time from SIGTERM to SIGKILL; None: the site's.
    """

    @property
    def _is_timed(self) -> bool:
        return self._ahead >= 1 and math.isfinite(self.walltime)

    def _timer(self) -> str:
        return _TIMER.format(seconds=int(self.walltime) - self._ahead) if self._is_timed else ""

    def _told(self, graces: Mapping[str, float], kill_wait: float | None) -> dict[str, object]:
        wait = kill_wait if self._grace is None else self._grace
        told: dict[str, object] = {"KILLWAIT": f"{_KILL_WAIT if wait is None else wait:g}"}
        if math.isfinite(self.walltime):
            told["ENDS"] = f'"$(($(date +%s) + {int(self.walltime)}))"'
        if self._is_timed:
            told["NOTICE"] = self._ahead
        return told
