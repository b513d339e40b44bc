"""Stock Dask's adaptive scaling on a virtual scheduler, as a baseline: distributed 2026.8, rule by rule.

The target by occupancy and memory is `Scheduler.adaptive_target`'s, the choice of workers to close
`Scheduler.workers_to_close`'s, and the count of three before any is closed `AdaptiveCore.recommendations`'.  Jobs are
of one pool, with one worker each.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import NamedTuple, cast

from dask_ferro.policy.scaling.facts import (
    LEAVING,
    RUNNING,
    Action,
    Cancel,
    Drain,
    Job,
    Name,
    ScalingFacts,
    Submit,
)
from dask_ferro.simulate.virtual_scheduler import Scheduler
from simulated.stock import Stock

# Dask's seconds of work per thread, and for how many ticks a worker must be superfluous before it is closed.
TARGET_DURATION, WAIT_COUNT = 5.0, 3
# Dask looks at this many of the tasks that wait for a worker, and assumes the others to be like them.
# least twice the memory of the data.
_LOOKED_AT = 100
# Above this share of all memory Dask doubles the workers.  It keeps enough of them for twice the memory of the data.
_FULL, _MEMORY_RATIO = 0.6, 2


class _Connected(NamedTuple):
    """A connected worker: its job, its tasks, and the bytes that it holds."""

    job: Name
    tasks: int
    nbytes: int


@dataclass
class StockAdaptive:
    """`distributed.deploy.Adaptive` of Dask 2026.8 on one pool.

    Attributes
    ----------
    minimum, maximum : float
        Numbers of jobs.
    """

    minimum: float = 0
    maximum: float = inf
    _counts: Counter[Name] = field(default_factory=Counter)

    def decide(self, staff: ScalingFacts, scheduler: Scheduler) -> tuple[Action, ...]:
        """Return a submission of jobs, or the end of jobs that were superfluous three times in a row.

        Nothing is decided while jobs leave: Dask awaits their end before it looks again.
        """
        if any(job.state == LEAVING for job in staff.jobs):
            return ()
        pool, plan = staff.pools[0], staff.jobs
        workers = _workers(plan, scheduler)
        target = min(_target(workers, scheduler, pool.memory), self.maximum)
        target = int(max(target, self.minimum))
        if target >= len(plan):
            self._counts.clear()
            return (Submit(pool.name, target - len(plan), ""),) if target > len(plan) else ()
        return self._down(plan, workers, target)

    def _down(self, plan: Sequence[Job], workers: Sequence[_Connected], target: int) -> tuple[Action, ...]:
        to_close = [job.name for job in plan if job.state != RUNNING][: len(plan) - target]
        cancelled = set(to_close)
        if target < len(plan) - len(to_close):
            # Whatever they run or hold: Dask closes the number that it wants, not only workers without cost.
            to_close += [worker.job for worker in _by_cost(workers)[: max(len(workers) - target, 0)]]
        self._counts = Counter({name: self._counts[name] + 1 for name in to_close})
        firmly = [name for name in to_close if self._counts[name] >= WAIT_COUNT]
        for name in firmly:
            del self._counts[name]
        absent = tuple(name for name in firmly if name in cancelled)
        there = tuple(name for name in firmly if name not in cancelled)
        return tuple(action for action in (Cancel(absent, ""), Drain(there, "")) if action.jobs)


def _workers(plan: Sequence[Job], scheduler: Scheduler) -> list[_Connected]:
    """Return the connected workers, in the order in which they joined."""
    decider = cast(Stock, scheduler.decider)
    jobs = {f"host-{job.name}": job.name for job in plan if job.state == RUNNING}
    return [
        _Connected(jobs[record.spec.host], len(record.processing), decider.pages[record.address].nbytes)
        for record in scheduler.records.values()
        if record.spec.host in jobs
    ]


def _target(workers: Sequence[_Connected], scheduler: Scheduler, memory: int) -> int:
    """Return the number that `Scheduler.adaptive_target` would; `memory` is per worker."""
    decider = cast(Stock, scheduler.decider)
    known = scheduler.jobs[: scheduler.known]
    ready = [job for job in known if job.state == "queued"]
    ready += [job for job in known if job.state == "unplaced"]
    waits = sum(map(decider.projected, ready[:_LOOKED_AT])) * max(len(ready) / _LOOKED_AT, 1.0)
    cpu = ceil((decider.total_occupancy() + waits) / TARGET_DURATION)
    # A few long tasks do not need more workers than tasks.
    cpu = min(cpu, len(ready) + sum(worker.tasks for worker in workers))
    if not workers:
        return max(cpu, 1) if ready else cpu
    cpu = ceil(cpu / scheduler.threads * len(workers))
    is_full = sum(worker.nbytes for worker in workers) > _FULL * memory * len(workers) > 0
    target = max(cpu, 2 * len(workers) if is_full else 0)
    return target if target >= len(workers) else len(workers) - _closable(workers, memory)


def _closable(workers: Sequence[_Connected], memory: int) -> int:
    """Return how many idle workers Dask would close while the others have twice the memory of the data."""
    needed = _MEMORY_RATIO * sum(worker.nbytes for worker in workers)
    idle = sum(not worker.tasks for worker in workers)
    return next((n for n in range(idle) if memory * (len(workers) - n - 1) < needed), idle)


def _by_cost(workers: Sequence[_Connected]) -> list[_Connected]:
    """Return the workers in Dask's order of closing: idle ones, then those with the least data, then the newest."""
    return sorted(workers, key=lambda worker: (not worker.tasks, -worker.nbytes))[::-1]
