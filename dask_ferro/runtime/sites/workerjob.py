"""The batch script of a worker job on a batch system other than SLURM.

dask-jobqueue's header, and a script that stays: it starts the worker, passes SIGTERM and SIGUSR1 on to it, and waits.
That a job's time is nearly over tells it a timer of its own, for not every batch system sends a signal ahead.
Durations are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dask_jobqueue.core import Job

from dask_ferro.runtime.jobs.keywords import JobKeywords
from dask_ferro.runtime.jobs.script import LISTENING, WAITING, WorkerJob
from dask_ferro.runtime.upstream_jobqueue import add_to_command, command_of, prologue_of

_PRELOAD = "dask_ferro.runtime.jobs.job_preload"
_DASK_WORKER = "distributed.cli.dask_worker"
# More than this part of a short job's life is not given to leaving.
_AHEAD_MOST = 0.25
# SLURM's default, and long enough for most; a site kills sooner or later than that.
_KILL_WAIT = 30.0

_SCRIPT = """\
{shebang}

{header}
{prologue}
FERRO_WORKER="{prefix}-{first}"
{exports}{listening}{command} &
ferro_pid=$!
{timer}{waiting}"""

# A sleep that somebody ends is no end of the job's time.
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


class ScriptedJob(Job):  # type: ignore[misc]
    """Mixed into a job of dask-jobqueue, before it: our script; it is rendered and never submits itself.

    Parameters
    ----------
    signal_ahead : float
        Seconds before the end of the walltime at which the script itself sends SIGUSR1; 0: never.
    grace : float, optional
        Seconds from SIGTERM to SIGKILL; None: what the site says.
    """

    def __init__(
        self,
        scheduler: str | None = None,
        name: str | None = None,
        *,
        signal_ahead: float = JobKeywords.signal_ahead,
        grace: float | None = None,
        **options: object,
    ) -> None:
        self._prefix, self._grace = name or "worker", grace
        super().__init__(scheduler, name='"$FERRO_WORKER"', **options)
        self.walltime = self._limit(str(self.job_header))
        self._ahead = math.floor(min(signal_ahead, self.walltime * _AHEAD_MOST))
        if _DASK_WORKER in command_of(self):
            option = "--preload" if "--no-nanny" in command_of(self).split() else "--preload-nanny"
            add_to_command(self, f"{option} {_PRELOAD}")

    def _limit(self, header: str) -> float:
        """Return the seconds of the job's walltime; infinity for none."""
        raise NotImplementedError

    def job_script(
        self, first: int = 0, graces: Mapping[str, float] | None = None, kill_wait: float | None = None
    ) -> str:
        """Return the script of the job with a number."""
        if not hasattr(self, "walltime"):
            return ""  # dask-jobqueue logs it before it is made
        return _SCRIPT.format(
            shebang=self.shebang,
            header=self.job_header,
            prologue="\n".join(prologue_of(self)),
            prefix=self._prefix,
            first=first,
            exports=self._exports(kill_wait),
            command=command_of(self),
            listening=LISTENING,
            waiting=WAITING,
            timer=_TIMER.format(seconds=int(self.walltime) - self._ahead) if self._is_timed else "",
        )

    @property
    def _is_timed(self) -> bool:
        return self._ahead >= 1 and math.isfinite(self.walltime)

    def _exports(self, kill_wait: float | None) -> str:
        wait = self._grace if self._grace is not None else kill_wait
        lines = [f"export FERRO_JOB_KILLWAIT={_KILL_WAIT if wait is None else wait:g}\n"]
        if math.isfinite(self.walltime):
            lines.append(f'export FERRO_JOB_ENDS="$(($(date +%s) + {int(self.walltime)}))"\n')
        if self._is_timed:
            lines.append(f"export FERRO_JOB_NOTICE={self._ahead}\n")
        return "".join(lines)

    @property
    def partitions(self) -> list[str]:
        """The kinds of jobs that a batch system may end: nobody says which they are."""
        return []

    lifetime = WorkerJob.lifetime
    resources = WorkerJob.resources
    _option = WorkerJob._option
