"""The batch script of a worker job: dask-jobqueue's, whose worker is told of its end and is known by name.

The script stays: it starts the worker, passes SIGUSR1 and SIGTERM on to it, and waits.  Its name follows from what
SLURM tells the script (the index in an array, how often it was requeued), so that one script serves a whole array and
no name comes twice.  Durations are seconds.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping

from dask.utils import parse_timedelta
from dask_jobqueue.slurm import SLURMJob

from dask_ferro.runtime.jobs.keywords import JobKeywords
from dask_ferro.runtime.slurm.parsing import duration
from dask_ferro.runtime.upstream_jobqueue import add_to_command, command_of, prologue_of

_PRELOAD = "dask_ferro.runtime.jobs.job_preload"
_DASK_WORKER = "distributed.cli.dask_worker"
# SLURM may send the signal a minute early.  More than this part of a short job's life is not given to leaving.
_AHEAD_MOST = 0.25
# What a preempted job has where nobody says it.
_GRACE = 30.0

# What every job's script does before its worker starts, and then: pass signals on, and end as the worker does.
LISTENING = """\
ferro_pid= ferro_timer=
trap '[ -z "$ferro_pid" ] || kill -USR1 "$ferro_pid"' USR1
trap '[ -n "$ferro_pid" ] || exit 143; kill -TERM "$ferro_pid" 2>/dev/null' TERM
"""
WAITING = """\
while :; do
    wait "$ferro_pid"
    ferro_status=$?
    # A signal ends the wait, not the worker.
    kill -0 "$ferro_pid" 2>/dev/null && continue
    # It may have ended since; 127: that was its status.
    wait "$ferro_pid" 2>/dev/null
    ferro_last=$?
    [ "$ferro_last" -eq 127 ] || ferro_status=$ferro_last
    # bash loses the status (-1) of what ends while a signal is handled.
    [ "$ferro_status" -ge 0 ] || ferro_status=143
    [ -z "$ferro_timer" ] || kill "$ferro_timer" 2>/dev/null
    exit "$ferro_status"
done
"""

_SCRIPT = """\
{shebang}

{header}
{prologue}
FERRO_WORKER="{prefix}-$(({first} + ${{SLURM_ARRAY_TASK_ID:-0}}))"
[ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ] || FERRO_WORKER="$FERRO_WORKER.$SLURM_RESTART_COUNT"
{exports}{listening}{command} &
ferro_pid=$!
{waiting}"""


class WorkerJob(SLURMJob):
    """A job of dask-jobqueue with our script; it is rendered and never submits itself.

    Parameters are those of `dask_jobqueue.slurm.SLURMJob`, and

    Parameters
    ----------
    signal_ahead : float
        Seconds before the end of the walltime at which SLURM sends SIGUSR1, as it does when a job is preempted;
        0: never.
    grace : float, optional
        Seconds that a preempted job has from that signal on; None: what its partition grants.
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
        super().__init__(scheduler, name='"$FERRO_WORKER"', **options)
        self._prefix = name or "worker"
        self._grace = grace
        header = str(self.job_header)
        self.walltime = _walltime(header)
        ahead = math.floor(min(signal_ahead, self.walltime * _AHEAD_MOST))
        directive = f"#SBATCH --signal=B:USR1@{ahead}"
        is_skipped = any(skip in directive for skip in self.job_directives_skip)
        if ahead >= 1 and "--signal" not in header and not is_skipped:
            self.job_header = f"{header}\n{directive}"
        if _DASK_WORKER in command_of(self):
            arguments = command_of(self).split()
            option = "--preload" if "--no-nanny" in arguments else "--preload-nanny"
            add_to_command(self, f"{option} {_PRELOAD}")

    def job_script(
        self, first: int = 0, graces: Mapping[str, float] | None = None, kill_wait: float | None = None
    ) -> str:
        """Return the script of an array whose element 0 has the number `first`, or of one job.

        Parameters
        ----------
        graces : mapping of str to float, optional
            What the site's partitions grant to preempted jobs; "" is the partition of jobs that name none.
        kill_wait : float, optional
            Seconds from SIGTERM to SIGKILL at the site; None: it does not say.
        """
        return _SCRIPT.format(
            shebang=self.shebang,
            header=self.job_header,
            prologue="\n".join(prologue_of(self)),
            prefix=self._prefix,
            first=first,
            exports=self._exports(graces or {}, kill_wait),
            listening=LISTENING,
            command=command_of(self),
            waiting=WAITING,
        )

    def _exports(self, graces: Mapping[str, float], kill_wait: float | None) -> str:
        """What the worker is told: when its job ends (epoch), when the signal comes, and what it has from then on."""
        lines = [] if kill_wait is None else [f"export FERRO_JOB_KILLWAIT={kill_wait:g}\n"]
        if math.isfinite(self.walltime):
            end = f"$(($(date +%s) + {int(self.walltime)}))"  # SLURM tells it since 23.02
            lines.append(f'export FERRO_JOB_ENDS="${{SLURM_JOB_END_TIME:-{end}}}"\n')
        if notice := re.search(r"--signal=\S*USR1@(\d+)", str(self.job_header)):
            lines.append(f"export FERRO_JOB_NOTICE={notice[1]}\n")
            lines.append(f"export FERRO_JOB_GRACE={self._preempted(graces):g}\n")
        return "".join(lines)

    def _preempted(self, graces: Mapping[str, float]) -> float:
        if self._grace is not None:
            return self._grace
        return min((graces[name] for name in self.partitions if name in graces), default=_GRACE)

    @property
    def partitions(self) -> list[str]:
        """The partitions that it names; "" where it names none."""
        named = re.findall(r"^#SBATCH\s+(?:-p\s*|--partition[=\s])(\S+)", str(self.job_header), re.MULTILINE)
        return named[-1].split(",") if named else [""]

    @property
    def lifetime(self) -> float:
        """Seconds after which its workers leave by Dask's own ``--lifetime``; infinity without."""
        value = self._option("--lifetime")
        return math.inf if value is None else float(parse_timedelta(value, default="s"))

    @property
    def resources(self) -> dict[str, float]:
        """Abstract resources of each worker: Dask's ``--resources``."""
        pairs = (pair.partition("=") for pair in re.split(r"[\s,]+", self._option("--resources") or ""))
        return {name: float(amount) for name, _, amount in pairs if amount}

    def _option(self, option: str) -> str | None:
        """The value of the worker's last option of that name."""
        value = None
        arguments = shlex.split(command_of(self))
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
            if argument == option:
                value = following
            elif argument.startswith(option + "="):
                value = argument.partition("=")[2]
        return value


def _walltime(header: str) -> float:
    """The seconds of the last time limit in a script's head, which is the one that SLURM takes."""
    limits: Iterable[str] = re.findall(r"^#SBATCH\s+(?:-t\s*|--time[=\s])(\S+)", header, re.MULTILINE)
    return duration([*limits][-1]) if limits else math.inf
