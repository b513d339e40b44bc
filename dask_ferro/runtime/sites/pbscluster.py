"""`ff.PBSCluster`: dask-jobqueue's cluster under the controller of `ff.SLURMCluster`.

It has been tested on simulated `qsub`, `qstat`, `qselect` and `qdel` only, not on a real PBS.  Durations are seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import dask
from dask_jobqueue.pbs import PBSJob

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.jobs.script import JobWithoutFolders
from dask_ferro.runtime.sites import qstat
from dask_ferro.runtime.sites.pbs import PBSSite
from dask_ferro.runtime.sites.sitecluster import SiteCluster
from dask_ferro.runtime.sites.workerjob import TimedJob

# Names accepted by `qsub -N` and `qselect -N`.
_JOB_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]{0,229}")


class PBSWorkerJob(TimedJob, PBSJob, JobWithoutFolders):  # type: ignore[misc]
    """A job of dask-jobqueue's PBS with our script."""

    config_name = "pbs"

    def _complete(self) -> None:
        # A rerun by PBS would have workers of the same names; the controller requests another job instead.
        if not qstat.option(str(self.job_header), "r"):
            self._add_directive("#PBS -r n")

    def _limit(self, header: str) -> float:
        return qstat.walltime(header)


class PBSCluster(SiteCluster):
    """Workers in PBS jobs, which grow, shrink and are replaced without loss of results.

    It has been tested on simulated commands only, not on a real PBS.

    Parameters
    ----------
    pools : mapping of str to mapping, optional
        Further kinds of jobs by name, each with the keywords that it replaces; as for `ff.SLURMCluster`.
    signal_ahead : float
        Seconds before the end of a job's walltime at which its script tells its workers to retire; at most a quarter
        of the walltime; 0: never.
    grace : float, optional
        Seconds from SIGTERM to SIGKILL, at `qdel`.  By default the least ``kill_delay`` of the queues, or 10.
    preemptible : bool, optional
        Whether PBS may end the jobs without a warning: then results held by one job only are copied to other workers.
    queue_wait, start_up, patience, name, job_name
        As for `ff.SLURMCluster`.
    **options
        Those of `dask_jobqueue.PBSCluster`.  ``scheduler_options={"preload": []}`` omits the scheduler plugin.

    Raises
    ------
    ConfigError
        For pools that do not describe a job, or a job name that PBS does not accept.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> cluster = ff.PBSCluster(                                       # doctest: +SKIP
    ...     queue="workq", cores=8, memory="32GB", walltime="02:00:00",
    ... )
    >>> cluster.adapt(minimum=0, maximum=64)                           # doctest: +SKIP
    """

    job_cls = PBSWorkerJob  # type: ignore[assignment]

    def __init__(
        self, *args: object, pools: Mapping[str, Mapping[str, object]] | None = None, **options: object
    ) -> None:
        config = options.get("config_name") or PBSWorkerJob.config_name
        job_name = options.get("job_name") or dask.config.get(f"jobqueue.{config}.name", "dask-worker")
        if not _JOB_NAME.fullmatch(str(job_name)):
            raise ConfigError(
                f"ff.PBSCluster: job_name: got {job_name!r}, wanted letters, digits, and _ . + - after a first letter"
            )
        super().__init__(*args, pools=pools, **options)

    def _opened_site(self, job_name: str) -> PBSSite:
        return PBSSite(job_name, self._tag)
