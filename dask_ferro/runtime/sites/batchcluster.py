"""`ff.BatchCluster`: the controller of `ff.SLURMCluster` for a batch system described by three commands.

It has been tested on simulated commands only, not on a real batch system.  Durations are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import inf
from typing import Any

import dask
import yaml
from dask_jobqueue.core import Job

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.jobs.script import JobWithoutFolders
from dask_ferro.runtime.sites import qstat
from dask_ferro.runtime.sites.commands import CommandSite
from dask_ferro.runtime.sites.sitecluster import SiteCluster
from dask_ferro.runtime.sites.workerjob import TimedJob

_NAME = "batch"
# Keys of a job in dask-jobqueue that are specific to PBS.
_PBS_ONLY = ("queue", "account", "resource-spec")
_PLACE = re.compile(r"\{(\w+)\}")


def _defaults() -> dict[str, object]:
    """Return the default options of a job, as in dask-jobqueue's own configuration."""
    text = files("dask_jobqueue").joinpath("jobqueue.yaml").read_text(encoding="utf-8")
    section = yaml.safe_load(text)["jobqueue"]["pbs"]
    return {key: value for key, value in section.items() if key not in _PBS_ONLY}


dask.config.update_defaults({"jobqueue": {_NAME: _defaults()}})


class _PlainJob(Job):  # type: ignore[misc]
    """A job of dask-jobqueue whose directives the user writes.

    Parameters
    ----------
    directives : sequence of str
        Complete lines of the script's head.  {name}, {cores}, {megabytes}, {walltime}, {seconds}, {minutes} and
        {log_directory} are replaced.
    walltime : str, optional
        Hours:minutes:seconds.
    """

    config_name = _NAME

    def __init__(
        self,
        scheduler: str | None = None,
        name: str | None = None,
        directives: Sequence[str] = (),
        walltime: str | None = None,
        config_name: str | None = None,
        **options: object,
    ) -> None:
        super().__init__(scheduler=scheduler, name=name, config_name=config_name, **options)
        given = walltime or dask.config.get(f"jobqueue.{self.config_name}.walltime", None) or ""
        self.seconds = qstat.duration(str(given))
        if given and self.seconds == inf:
            raise ValueError(f"got walltime={given!r}, wanted hours:minutes:seconds")
        if isinstance(directives, str):
            raise ValueError(f"got directives={directives!r}, wanted a list of lines")
        limit = 0 if self.seconds == inf else int(self.seconds)
        values = {
            "name": self.job_name, "cores": self.worker_cores, "megabytes": -(-(self.worker_memory or 0) // 10**6),
            "walltime": given, "seconds": limit, "minutes": -(-limit // 60), "log_directory": self.log_directory or ".",
        }  # fmt: skip
        lines = [
            _PLACE.sub(lambda place: str(values.get(place[1], place[0])), line)
            for line in [*directives, *self.job_extra_directives]
        ]
        self.job_header = "\n".join(lines)


class BatchWorkerJob(TimedJob, _PlainJob, JobWithoutFolders):  # type: ignore[misc]
    """The same job with our script."""

    config_name = _NAME

    def _limit(self, header: str) -> float:
        return self.seconds


class BatchCluster(SiteCluster):
    r"""Workers in jobs of any batch system, which grow, shrink and are replaced without loss of results.

    It has been tested on simulated commands only, not on a real batch system.

    Parameters
    ----------
    submit : str
        The command that submits a job; the script is its standard input, or the file ``{script}``.  ``{name}`` is the
        jobs' name, and ``{tag}`` an identifier of the submission, which the listing has to show.
    list : str
        The command that lists the user's jobs, ``{user}``, or those of ``{name}``.
    cancel : str
        The command that ends jobs: ``{ids}``, or ``{id}`` to be called for each.
    listed : str or mapping
        The output format of `list`: a regular expression with groups job_id, state, tag, reason and node, of which
        the first two are required; or columns, ``{"job_id": 0, "state": 4}``; or JSON, ``{"json": "Jobs", "state":
        "job_state"}``.
    submitted : str
        A regular expression with a group job_id for the output of `submit`; default: the first number.
    nothing : str
        A regular expression for the output of `list` without any job.  Without it an empty listing proves nothing: a
        job that is not listed counts as gone after minutes.
    states : mapping of str to list of str, optional
        The batch system's words for "pending", "started", "held", "ending" and "over", in addition to the common
        ones.
    directives : list of str
        The lines of the script's head.  {name}, {cores}, {megabytes}, {walltime}, {seconds}, {minutes} and
        {log_directory} are replaced.
    walltime : str
        Hours:minutes:seconds, matching the directives.
    grace : float, optional
        Seconds from SIGTERM to SIGKILL when a job is cancelled; 30 by default.
    pools, signal_ahead, preemptible, queue_wait, start_up, patience, name, job_name
        As for `ff.SLURMCluster`; a pool may have its own ``directives``.
    **options
        Those of dask-jobqueue common to all batch systems; defaults are in ``jobqueue.batch`` of Dask's
        configuration.

    Raises
    ------
    ConfigError
        For commands that cannot be run as described.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> cluster = ff.BatchCluster(                                     # doctest: +SKIP
    ...     submit="bsub -J {name} -Jd {tag}",
    ...     list="bjobs -J {name} -noheader -o 'jobid stat job_description'",
    ...     listed=r"^(?P<job_id>\d+) +(?P<state>\w+) +(?P<tag>\S+)",
    ...     nothing="is not found|No unfinished job found",
    ...     cancel="bkill {ids}",
    ...     directives=["#BSUB -n {cores}", "#BSUB -W {minutes}", "#BSUB -o {log_directory}/"],
    ...     cores=8, memory="32GB", walltime="02:00:00",
    ... )
    """

    job_cls = BatchWorkerJob  # type: ignore[assignment]

    def __init__(
        self,
        *args: object,
        submit: str | None = None,
        list: str | None = None,
        cancel: str | None = None,
        listed: object = None,
        submitted: str = r"(?P<job_id>\d+)",
        nothing: str = "",
        states: Mapping[str, Sequence[str]] | None = None,
        pools: Mapping[str, Mapping[str, object]] | None = None,
        **options: object,
    ) -> None:
        given = {"submit": submit, "list": list, "cancel": cancel, "listed": listed}
        if missing := [name for name, value in given.items() if value is None]:
            raise ConfigError(
                f"ff.BatchCluster: {', '.join(missing)} must be given: how jobs are submitted and listed"
            )
        self._commands: dict[str, Any] = {
            **given, "submitted": submitted, "nothing": nothing, "states": states,
        }  # fmt: skip
        CommandSite("checked", "checked", **self._commands)
        super().__init__(*args, pools=pools, **options)

    def _opened_site(self, job_name: str) -> CommandSite:
        return CommandSite(job_name, self._tag, **self._commands)
