"""A kind of job on a batch system: its script, its measurements, and whether it is open.

A pool closes when its jobs are refused, or when too many end before all their workers connected: a job that works
makes up for one that failed, so that one node on which all fail closes the pool as well.  It reopens by itself, after
longer and longer times.  Its user may pause it, and resume it, whatever closed it.  Durations are seconds, points in
time epoch seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from time import localtime, strftime
from typing import Any

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.options import options_of
from dask_ferro.policy.estimates import Mean
from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.slurm.job_lifecycle import BatchJob, JobState
from dask_ferro.slurm.keywords import NAME, PoolKeywords, read
from dask_ferro.slurm.script import WorkerJob, lifetime_of

# Seconds for which a pool is closed at first, and at most.
_CLOSED_SECONDS, _MAX_CLOSED_SECONDS = 30.0, 1800.0

# Seconds that a job waits in the queue, and takes until its workers are connected, until these are measured.
_QUEUE_WAIT, _START_UP = 1.0, 3.0
# The placeholder in scripts that are rendered before there is a scheduler.
ADDRESS = "tcp://<insert-scheduler-address-here>:8786"

# Keywords of a pool beside the options of its jobs.
_POOL_OPTIONS = frozenset(options_of(PoolKeywords))


@dataclass
class JobPool:
    """A kind of job.

    Attributes
    ----------
    job : WorkerJob
        Renders the batch script.
    offer : PoolKeywords
        Its keywords beside the shape of its jobs.
    queue_wait, start_up : Mean
        Running estimates.
    output : str
        The last lines of the job that closed it.
    failures : int
        Failed jobs, less those that had all their workers.
    paused_at : float or None
        Since when it is paused.
    """

    name: str
    job: WorkerJob
    offer: PoolKeywords
    queue_wait: Mean = field(default_factory=lambda: Mean(_QUEUE_WAIT))
    start_up: Mean = field(default_factory=lambda: Mean(_START_UP))
    failures: int = 0
    times_closed: int = 0
    closed_until: float = 0.0
    closed: str = ""
    output: str = ""
    paused_at: float | None = None

    @classmethod
    def build(
        cls,
        name: str,
        job_cls: type[WorkerJob],
        options: Mapping[str, Any],
        overrides: Mapping[str, Any],
        prefix: str,
    ) -> JobPool:
        """Return a pool whose jobs have the cluster's options with some replaced.

        Parameters
        ----------
        prefix : str
            The beginning of its workers' names.

        Raises
        ------
        ConfigError
            For an unknown or invalid option.
        """
        own = {key: value for key, value in overrides.items() if key in _POOL_OPTIONS}
        offer = read(PoolKeywords, f"{NAME}: pool {name!r}", own)
        replaced = {key: value for key, value in overrides.items() if key not in own}
        # These go into the job's script; the cluster's values hold unless the pool sets its own.
        replaced |= {key: getattr(offer, key) for key in ("retire_before", "grace") if key in own}
        try:
            job = job_cls(ADDRESS, name=prefix, **(dict(options) | replaced))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{NAME}: pool {name!r}: {error}") from error
        return cls(name, job, offer)

    def pool(
        self, now: float, trouble: str = "", preemptible: Collection[str] = (), lingering: int = 0
    ) -> Pool:
        """Return the policy's facts.

        Parameters
        ----------
        trouble : str
            Why its jobs are not accepted at the moment.
        preemptible : collection of str
            The partitions whose jobs SLURM may preempt at once.
        lingering : int
            Released jobs that may still exist.
        """
        job, offer = self.job, self.offer
        shut = now < self.closed_until
        why = self.closed if shut else trouble
        if self.paused_at is not None:
            at = strftime("%H:%M:%S", localtime(self.paused_at))
            paused = f"by its user at {at}; cluster.pools.resume({self.name!r}) goes on with it"
            why = "; ".join(filter(None, (paused, why)))
        is_preemptible = any(name in preemptible for name in job.partitions)
        return Pool(
            self.name,
            threads=job.worker_process_threads * job.worker_processes,
            processes=job.worker_processes,
            memory=job.worker_memory or 0,
            queue_wait=self.queue_wait.value,
            start_up=self.start_up.value,
            minimum=offer.minimum,
            maximum=offer.maximum,
            lifetime=min(job.walltime, self.start_up.value + lifetime_of(job)),
            cost=offer.cost,
            closed=why,
            closed_until=self.closed_until if shut and self.paused_at is None else 0.0,
            output=self.output if shut else "",
            preemptible=is_preemptible if offer.preemptible is None else offer.preemptible,
            lingering=lingering,
            is_paused=self.paused_at is not None,
        )

    def measure(self, job: BatchJob, before: str) -> None:
        """Learn queue wait and start-up from a job that changed its state."""
        waited = before in (JobState.SUBMITTING, JobState.PENDING)
        if waited and job.state in (JobState.BOOTING, JobState.RUNNING) and not job.restarts:
            self._add(self.queue_wait, job.submitted_at, job.started_at)
        # A worker restarted by its nanny connects much later than its job started.
        if job.state == JobState.RUNNING and job.connected_at is None:
            self._add(self.start_up, job.started_at, job.since)
            self.failures, self.times_closed = max(self.failures - 1, 0), 0
            job.connected_at = job.since

    @staticmethod
    def _add(mean: Mean, start: float | None, end: float | None) -> None:
        if start is not None and end is not None:
            mean.add(max(end - start, 0.0))  # clocks of two machines may differ

    def fail(self, why: str) -> str:
        """Count a job that ended before all workers connected; return why the pool is to close, or an empty text."""
        most = config.value("elastic.failures")
        self.failures = min(self.failures + 1, most)
        return "" if self.failures < most else f"{most} jobs ended before a worker came; the last, {why}"

    def close(self, why: str, now: float, output: str = "") -> bool:
        """Close the pool for a while; return whether it was open.

        Jobs requested together close it only once.

        Parameters
        ----------
        output : str
            The last lines of the job that closed it.
        """
        if now < self.closed_until:
            return False
        self.closed, self.output = why, output
        self.closed_until = now + min(_CLOSED_SECONDS * 2 ** min(self.times_closed, 10), _MAX_CLOSED_SECONDS)
        self.times_closed += 1
        return True

    def pause(self, now: float) -> None:
        """Pause the pool until it is resumed."""
        if self.paused_at is None:
            self.paused_at = now

    def resume(self) -> None:
        """Open the pool, whatever closed it; earlier failures do not count any more."""
        self.paused_at, self.closed, self.output = None, "", ""
        self.closed_until, self.failures, self.times_closed = 0.0, 0, 0
