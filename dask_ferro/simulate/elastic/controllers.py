"""Who decides how many virtual jobs there are: our policy, and stock Dask's adaptive scaling to compare with.

Both see the facts of a moment and return actions; stock's also looks at the scheduler, as Dask's does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import ceil, inf
from typing import Protocol

from dask_ferro.policy.scaling import facts, step
from dask_ferro.policy.scaling.facts import Job, Name, ScalingFacts
from dask_ferro.simulate.virtual_scheduler import Scheduler

# Seconds of work that Dask wants each thread to have, and the ticks for which it has to want a worker gone.
TARGET_DURATION, WAIT_COUNT = 5.0, 3
# Of queued tasks it looks at so many, and takes the others for the same.
_LOOKED_AT = 100
# It keeps memory for so many times the data.
_MEMORY_RATIO = 2


class Controller(Protocol):
    """Decides on the jobs once a tick."""

    def decide(self, staff: ScalingFacts, scheduler: Scheduler) -> tuple[facts.Action, ...]:
        """Return what to do now."""


@dataclass
class Scaling:
    """`policy.scaling.step` as a controller.

    Attributes
    ----------
    parameters : Parameters
    resize : mapping of phase to int
        From a phase on, the first is 1, there are to be so many workers, no more and no fewer.
    """

    parameters: step.ScalingParameters = field(default_factory=step.ScalingParameters)
    resize: Mapping[int, int] = field(default_factory=dict)
    _state: step.ScalingState = field(default_factory=step.ScalingState)

    def decide(self, staff: ScalingFacts, scheduler: Scheduler) -> tuple[facts.Action, ...]:
        """Return what the policy decides."""
        parameters = self.parameters
        reached = [phase for phase in self.resize if phase <= len(scheduler.submissions)]
        if reached:
            count = self.resize[max(reached)]
            parameters = replace(parameters, minimum=count, maximum=count)
        decision, self._state = step.step(staff, self._state, parameters)
        return decision.actions


@dataclass
class StockAdaptive:
    """`distributed.deploy.Adaptive` of Dask 2026.8 on one pool: a target of occupancy, and a count of three.

    Attributes
    ----------
    minimum, maximum : float
        Jobs.
    """

    minimum: float = 0
    maximum: float = inf
    _counts: Counter[Name] = field(default_factory=Counter)

    def decide(self, staff: ScalingFacts, scheduler: Scheduler) -> tuple[facts.Action, ...]:
        """Return jobs to submit, or those that were too many three times in a row."""
        pool = staff.pools[0].name
        plan = [job for job in staff.jobs if job.state != facts.LEAVING]
        target = int(min(max(self._target(plan, scheduler), self.minimum), self.maximum))
        if target >= len(plan):
            self._counts.clear()
            return (facts.Submit(pool, target - len(plan), ""),) if target > len(plan) else ()
        return self._down(plan, target)

    def _target(self, plan: list[Job], scheduler: Scheduler) -> int:
        records = scheduler.records
        projected = scheduler.decider.projected
        queued = [job for job in scheduler.jobs[: scheduler.known] if job.state in ("queued", "unplaced")]
        waits = sum(projected(job) for job in islice(queued, _LOOKED_AT))
        waits *= max(len(queued) / _LOOKED_AT, 1.0)
        given = list(chain.from_iterable(record.processing.values() for record in records.values()))
        cpu = ceil((waits + sum(projected(job) for job in given)) / TARGET_DURATION)
        cpu = min(cpu, len(queued) + len(given))
        if not records:
            return max(cpu, 1) if queued else cpu
        cpu = ceil(cpu / scheduler.threads * len(records))
        running = sum(job.state == facts.RUNNING for job in plan)
        return cpu if cpu >= running else running - len(_closable(plan, len(plan)))

    def _down(self, plan: list[Job], target: int) -> tuple[facts.Action, ...]:
        to_close = [job for job in plan if job.state in (facts.PENDING, facts.BOOTING)][: len(plan) - target]
        if target < len(plan) - len(to_close):
            to_close += _closable(plan, len(plan) - target)
        self._counts = Counter({job.name: self._counts[job.name] + 1 for job in to_close})
        firmly = {name for name, count in self._counts.items() if count >= WAIT_COUNT}
        cancelled = tuple(job.name for job in to_close if job.name in firmly and job.state != facts.RUNNING)
        drained = tuple(job.name for job in to_close if job.name in firmly and job.state == facts.RUNNING)
        for name in firmly:
            del self._counts[name]
        actions = (facts.Cancel(cancelled, ""), facts.Drain(drained, ""))
        return tuple(action for action in actions if action.jobs)


def _closable(plan: list[Job], most: int) -> list[Job]:
    """Return the idle jobs that Dask would close: those with the least data, while the rest has twice its room."""
    running = [job for job in plan if job.state == facts.RUNNING]
    total = sum(job.nbytes for job in running)
    limit = sum(job.nbytes + job.free for job in running)
    found: list[Job] = []
    for job in sorted(running, key=lambda job: (not job.idle_for, job.nbytes)):
        limit -= job.nbytes + job.free
        if not job.idle_for or len(found) >= most or limit < _MEMORY_RATIO * total:
            break
        found.append(job)
    return found
