"""The batch script of a worker job: dask-jobqueue's, extended by signals, the job's end, and unique worker names.

The script stays alive: it starts the worker, forwards SIGUSR1 and SIGTERM to it, and waits.  The worker's name
follows from variables that SLURM sets (the index in an array, the number of requeues), so that one script serves a
whole array and no name is used twice.  The threads of a task's kernels (OpenMP, MKL, OpenBLAS) are the CPUs of the job
divided by the tasks at a time.  Durations are seconds.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping

import dask
from dask.utils import parse_timedelta

from dask_ferro.scheduler.upstream_jobqueue import Job, SLURMJob, add_to_command, command_of, prologue_of
from dask_ferro.slurm.keywords import JobKeywords
from dask_ferro.slurm.parsing import duration, option

_PRELOAD = "dask_ferro.slurm.job_preload"
_DASK_WORKER = "distributed.cli.dask_worker"
# SLURM may send the signal a minute early.  At most this part of a short job's life is reserved for retirement.
_AHEAD_MOST = 0.25
# The grace of a preempted job where the site has none.
_GRACE = 30.0

# The parts of every job's script before and after the start of its worker: forward signals, and exit like the worker.
# A prologue may have set -e, -u or a trap of ERR: no statement here fails outside of a condition.
_LISTENING = """\
ferro_pid=
trap '[ -z "$ferro_pid" ] || kill -USR1 "$ferro_pid" || :' USR1
trap '[ -n "$ferro_pid" ] || exit 143; kill -TERM "$ferro_pid" 2>/dev/null || :' TERM
"""
_WAITING = """\
while :; do
    ferro_status=0 ferro_last=0
    wait "$ferro_pid" || ferro_status=$?
    # A signal ends the wait, not the worker.
    kill -0 "$ferro_pid" 2>/dev/null && continue
    # It may have ended since; 127: that was its status.
    wait "$ferro_pid" 2>/dev/null || ferro_last=$?
    [ "$ferro_last" -eq 127 ] || ferro_status=$ferro_last
    # bash loses the status (-1) of what ends while a signal is handled.
    [ "$ferro_status" -ge 0 ] || ferro_status=143
    exit "$ferro_status"
done
"""

# After a requeue, workers have new names: the scheduler may still know those lost with the first run.
_NAMING = """\
FERRO_WORKER="{prefix}-$(({first} + ${{SLURM_ARRAY_TASK_ID:-0}}))"
[ "${{SLURM_RESTART_COUNT:-0}}" -eq 0 ] || FERRO_WORKER="$FERRO_WORKER.$SLURM_RESTART_COUNT"\
"""

# Dask's nanny sets these variables to 1, unless they are set; then a task would use one of the CPUs of its job.
_SHARING = """\
ferro_threads=$((${{SLURM_CPUS_PER_TASK:-{cores}}} / {tasks}))
[ "$ferro_threads" -ge 1 ] || ferro_threads=1
"""

_SCRIPT = """\
{shebang}

{header}
{prologue}
{naming}
{exports}{sharing}{listening}{command} &
ferro_pid=$!
{waiting}"""


class _JobWithoutFolders(Job):  # type: ignore[misc]
    """A base of `SLURMJob` that creates no folder: a script may only be printed."""

    def __init__(self, *, log_directory: str | None = None, **options: object) -> None:
        super().__init__(log_directory=os.curdir, **options)  # the folder exists
        if log_directory is None:
            log_directory = dask.config.get(f"jobqueue.{self.config_name}.log-directory", None)
        self.log_directory = log_directory


class WorkerJob(SLURMJob, _JobWithoutFolders):  # type: ignore[misc]
    """A job of dask-jobqueue's SLURM with our script, rendered but never submitted by the job itself.

    Parameters are those of `dask_jobqueue.slurm.SLURMJob`, and

    Parameters
    ----------
    retire_before : float
        Seconds before the end of the walltime at which SLURM sends SIGUSR1, as it does at a preemption;
        0: never.
    grace : float, optional
        Seconds that a preempted job has from that signal on; None: what its partition grants.
    """

    def __init__(
        self,
        scheduler: str | None = None,
        name: str | None = None,
        *,
        retire_before: float = JobKeywords.retire_before,
        grace: float | None = None,
        **options: object,
    ) -> None:
        self.prefix, self._grace = name or "worker", grace
        super().__init__(scheduler, name='"$FERRO_WORKER"', **options)
        self.walltime = duration(option(str(self.job_header), "t", "time"))
        self._ahead = math.floor(min(retire_before, self.walltime * _AHEAD_MOST))
        if _DASK_WORKER in command_of(self):
            preload = "--preload" if "--no-nanny" in command_of(self).split() else "--preload-nanny"
            add_to_command(self, f"{preload} {_PRELOAD}")
        signal = f"#SBATCH --signal=B:USR1@{self._ahead}"
        is_skipped = any(skip in signal for skip in self.job_directives_skip)
        if self._ahead >= 1 and "--signal" not in str(self.job_header) and not is_skipped:
            self.job_header = f"{self.job_header}\n{signal}"

    def _settings(self, graces: Mapping[str, float], kill_wait: float | None) -> dict[str, object]:
        """Return the settings for the worker: the job's end (epoch), when the signal comes, and the time after it."""
        settings: dict[str, object] = {} if kill_wait is None else {"KILLWAIT": f"{kill_wait:g}"}
        if math.isfinite(self.walltime):
            end = f"$(($(date +%s) + {int(self.walltime)}))"  # SLURM sets the variable since 23.02
            settings["ENDS"] = f'"${{SLURM_JOB_END_TIME:-{end}}}"'
        if notice := re.search(r"--signal=\S*USR1@(\d+)", str(self.job_header)):
            grants = (graces[name] for name in self.partitions if name in graces)
            grace = min(grants, default=_GRACE) if self._grace is None else self._grace
            settings |= {"NOTICE": notice[1], "GRACE": f"{grace:g}"}
        return settings

    def _sharing(self) -> str:
        """Return shell code that divides the job's CPUs among the tasks that run at a time."""
        tasks = self.worker_process_threads * self.worker_processes
        preset = dask.config.get("distributed.nanny.pre-spawn-environ")
        names = [name for name, value in preset.items() if name.endswith("_NUM_THREADS") and value == 1]
        lines = [f'export {name}="${{{name}:-$ferro_threads}}"\n' for name in names]
        return "".join([_SHARING.format(cores=self.worker_cores, tasks=tasks), *lines])

    def job_script(
        self, first: int = 0, graces: Mapping[str, float] | None = None, kill_wait: float | None = None
    ) -> str:
        """Return the script of an array whose element 0 has the number `first`, or of one job.

        Parameters
        ----------
        graces : mapping of str to float, optional
            Grace times of preempted jobs by partition; "" is the default partition.
        kill_wait : float, optional
            Seconds from SIGTERM to SIGKILL at the site; None: unknown.
        """
        if not hasattr(self, "walltime"):
            return ""  # dask-jobqueue logs the script before this object is complete
        settings = self._settings(graces or {}, kill_wait).items()
        return _SCRIPT.format(
            shebang=self.shebang,
            header=self.job_header,
            prologue="\n".join(prologue_of(self)),
            naming=_NAMING.format(prefix=self.prefix, first=first),
            exports="".join(f"export FERRO_JOB_{name}={value}\n" for name, value in settings),
            sharing=self._sharing(),
            listening=_LISTENING,
            command=command_of(self),
            waiting=_WAITING,
        )

    @property
    def partitions(self) -> list[str]:
        """The partitions that the script names; "" if it names none."""
        return option(str(self.job_header), "p", "partition").split(",")

    @property
    def network(self) -> str:
        """The network of the workers, as text."""
        interface = worker_option(self, "--interface")
        return f"interface {interface}" if interface else "the interface of the default route"


def lifetime_of(job: Job) -> float:
    """Return the seconds after their start when a job's workers retire at the earliest: Dask's ``--lifetime`` less
    ``--lifetime-stagger``; infinite without.
    """
    if (value := worker_option(job, "--lifetime")) is None:
        return math.inf
    stagger = worker_option(job, "--lifetime-stagger") or "0s"
    return max(float(parse_timedelta(value, "s")) - float(parse_timedelta(stagger, "s")), 0.0)


def resources_of(job: Job) -> dict[str, float]:
    """Return the abstract resources of each of a job's workers: Dask's ``--resources``."""
    pairs = (pair.partition("=") for pair in re.split(r"[\s,]+", worker_option(job, "--resources") or ""))
    return {name: float(amount) for name, _, amount in pairs if amount}


def worker_option(job: Job, name: str) -> str | None:
    """Return the value of the last option of this name in the command of a job's worker; None: it has none."""
    value = None
    arguments = shlex.split(command_of(job))
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == name:
            value = following
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value
