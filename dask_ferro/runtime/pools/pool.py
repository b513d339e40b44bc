"""A kind of job on a batch system: how it is submitted, what was measured of it, and whether it is open.

A pool closes when its jobs are refused, or too many of them end before a worker came (`failures`); it opens again by
itself, each time later.  Its user may pause it, and resume it whatever closed it, or remove it.
Durations are seconds, points in time epoch seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from time import localtime, strftime
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.policy.estimates import Mean
from dask_ferro.policy.scaling.facts import BOOTING, PAUSED, PENDING, REMOVED, RUNNING, Pool
from dask_ferro.runtime.jobs.keywords import WHO, PoolKeywords, keywords_of, read
from dask_ferro.runtime.jobs.script import WorkerJob
from dask_ferro.runtime.pools import failures
from dask_ferro.runtime.slurm.job_lifecycle import SUBMITTING, BatchJob
from dask_ferro.runtime.slurm.parsing import is_job_name, is_plain

# For how long a pool is closed at first, and at most.
_CLOSED, _CLOSED_MOST = 30.0, 1800.0

# What a pool says beside the options of its jobs.
_OWN = frozenset(keywords_of(PoolKeywords))


@dataclass
class JobPool:
    """A kind of job.

    Attributes
    ----------
    job : WorkerJob
        Renders the batch script.
    offer : PoolKeywords
        What was said of it beside its jobs' shape.
    queue_wait, start_up : Mean
        Running estimates.
    is_proven : bool
        Whether a job of it ever had all its workers: its script works.
    output : str
        The last lines of the job that closed it.
    is_explained : bool
        Whether those were looked for; until then nobody is told when it opens again.
    failures : int
        Jobs that failed since one had all its workers.
    failed_at : list of float
        When jobs failed while it was open, since it closed last.
    mode, mode_at : str, float
        "paused" or "removed", and since when; empty: neither.
    """

    name: str
    job: WorkerJob
    offer: PoolKeywords
    queue_wait: Mean = field(default_factory=Mean)
    start_up: Mean = field(default_factory=Mean)
    failures: int = 0
    times_closed: int = 0
    closed_until: float = 0.0
    closed: str = ""
    output: str = ""
    is_proven: bool = False
    is_explained: bool = False
    failed_at: list[float] = field(default_factory=list)
    mode: str = ""
    mode_at: float = 0.0

    @classmethod
    def built(
        cls,
        name: str,
        job_cls: type[WorkerJob],
        address: str,
        options: Mapping[str, Any],
        overrides: Mapping[str, Any],
        prefix: str | None = None,
    ) -> JobPool:
        """Return a pool of jobs with some of the cluster's options replaced.

        Parameters
        ----------
        prefix : str, optional
            What its workers' names begin with; by default the pool's name.

        Raises
        ------
        ConfigError
            For an option that does not exist, or has a wrong value.
        """
        own = {key: value for key, value in overrides.items() if key in _OWN}
        offer = read(PoolKeywords, f"{WHO}: pool {name!r}", own)
        replaced = {key: value for key, value in overrides.items() if key not in own}
        # A job's script has these; what the cluster says of them holds where the pool says nothing.
        replaced |= {key: getattr(offer, key) for key in ("signal_ahead", "grace") if key in own}
        try:
            job = job_cls(address, name=prefix or name, **(dict(options) | replaced))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{WHO}: pool {name!r}: {error}") from error
        return cls(name, job, offer, Mean(offer.queue_wait), Mean(offer.start_up))

    def pool(self, now: float, trouble: str, preemptible: Collection[str] = ()) -> Pool:
        """Return the policy's facts.

        Parameters
        ----------
        trouble : str
            Why its jobs are not accepted at the moment.
        preemptible : collection of str
            The partitions whose jobs SLURM may end.
        """
        job, offer = self.job, self.offer
        shut = now < self.closed_until
        why = self.closed if shut else trouble
        return Pool(
            self.name,
            threads=job.worker_process_threads * job.worker_processes,
            processes=job.worker_processes,
            memory=job.worker_memory or 0,
            queue_wait=self.queue_wait.value,
            start_up=self.start_up.value,
            minimum=0 if self.mode == REMOVED else offer.minimum,
            maximum=offer.maximum,
            lifetime=min(job.walltime, job.lifetime),
            cost=offer.cost,
            closed=self.told_mode(why) if self.mode else why,
            closed_until=self.closed_until if shut and self.is_explained and not self.mode else 0.0,
            output=self.output if shut else "",
            preemptible=self.is_preemptible(preemptible),
            mode=self.mode,
        )

    def is_preemptible(self, partitions: Collection[str]) -> bool:
        """Whether SLURM may end its jobs: what was said, or what one of its partitions says."""
        if self.offer.preemptible is not None:
            return self.offer.preemptible
        return any(name in partitions for name in self.job.partitions)

    def measure(self, job: BatchJob, before: str, connected_at: float | None) -> None:
        """Learn from a job that changed its state: how long it waited, and how long it took to be whole."""
        if before in (SUBMITTING, PENDING) and job.state in (BOOTING, RUNNING) and not job.restarts:
            self._add(self.queue_wait, job.submitted_at, job.started_at)
        if before != RUNNING and job.state == RUNNING:
            if not job.is_measured:  # a worker that its nanny restarts comes much later than its job started
                self._add(self.start_up, job.started_at, connected_at)
            job.is_measured = self.is_proven = True
            self.failures = self.times_closed = 0

    @staticmethod
    def _add(mean: Mean, start: float | None, end: float | None) -> None:
        if start is not None and end is not None:
            mean.add(max(end - start, 0.0))  # clocks of two machines

    def fail(self, why: str, now: float) -> bool:
        """Count a job that ended before a worker came; return whether that closed the pool."""
        limits = failures.limits()
        self.failures += 1
        if now >= self.closed_until:  # those that were asked for together close it once
            self.failed_at = failures.recent([*self.failed_at, now], now, limits)
        reason = failures.too_many(self.failures, self.failed_at, now, limits)
        return bool(reason) and self.close(f"{reason}; the last, {why}", now)

    def close(self, why: str, now: float) -> bool:
        """Ask for no more jobs for a while; return whether it was open.

        Jobs that were asked for together close it once.
        """
        if now < self.closed_until:
            return False
        self.closed, self.output, self.is_explained = why, "", False
        self.closed_until = now + min(_CLOSED * 2 ** min(self.times_closed, 10), _CLOSED_MOST)
        self.times_closed += 1
        self.failed_at.clear()
        return True

    def pause(self, now: float) -> None:
        """Ask for no more jobs until it is resumed."""
        if self.mode != PAUSED:
            self.mode, self.mode_at = PAUSED, now

    def retire(self, now: float) -> None:
        """Ask for no more jobs, and let those go that there are."""
        if self.mode != REMOVED:
            self.mode, self.mode_at = REMOVED, now

    def resume(self) -> None:
        """Open it, whatever closed it; what failed before counts no more."""
        self.mode, self.closed, self.output = "", "", ""
        self.closed_until, self.failures, self.times_closed = 0.0, 0, 0
        self.failed_at.clear()

    def told_mode(self, why: str = "") -> str:
        """Return since when it is paused or being removed, and what ends that."""
        at = strftime("%H:%M:%S", localtime(self.mode_at))
        if self.mode == REMOVED:
            return f"since {at}, until its jobs have ended"
        told = f"by its user at {at}; cluster.pools.resume({self.name!r}) goes on with it"
        return "; ".join(filter(None, (told, why)))

    def explain(self, brief: str = "", output: str = "") -> None:
        """Add what the job that closed it printed: in a line, and as it stands; nothing where there was no such job."""
        self.closed = "; ".join(filter(None, (self.closed, brief)))
        self.output, self.is_explained = output, True


def checked_name(name: object) -> str:
    """Return a name for jobs by which SLURM can list and cancel them.

    Raises
    ------
    ConfigError
        For one that its commands would take apart.
    """
    if not is_job_name(str(name)):
        raise ConfigError(
            f"{WHO}: job_name: got {name!r}, wanted letters, digits, and _ . : + - after the first: "
            "squeue and scancel take it apart elsewhere; choose another, or set jobqueue.slurm.name"
        )
    return str(name)


def overrides_of(pools: Mapping[str, Mapping[str, object]] | None) -> dict[str, dict[str, Any]]:
    """Return what the pools replace, by their names.

    Raises
    ------
    ConfigError
        For a name that no worker can have, or what is no mapping.
    """
    if not isinstance(pools or {}, Mapping):
        raise ConfigError(f"{WHO}: pools={pools!r}; wanted keywords by the name of a pool")
    checked = {}
    for name, overrides in (pools or {}).items():
        # Names of workers are made of it: "gpu-1" and its element 2 would be "gpu" and its process 1-2.
        if not isinstance(name, str) or not is_plain(name):
            raise ConfigError(f"{WHO}: pool {name!r}; wanted letters, digits, _ and -, no number after a -")
        if not isinstance(overrides, Mapping):
            raise ConfigError(f"{WHO}: pool {name!r}: got {overrides!r}, wanted keywords")
        checked[name] = dict(overrides)
    return checked
