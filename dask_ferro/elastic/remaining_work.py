"""The remaining work of a scheduler as demands for scaling: its width over time with unlimited threads.

The profile is that of `policy.scaling.work_profile`, over all unfinished tasks.  Tasks with the same resources or
device class, or bound to workers, form a demand of their own.  The seconds of a task are projected from its
annotation, from measurements of its prefix, or by a guess.  A task that seceded needs no thread: it is no work, but
its dependents come later.  Beyond some 20,000 tasks a sample represents them all.  Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, NamedTuple

from distributed import Scheduler
from distributed.scheduler import TaskState

from dask_ferro.policy.scaling.work_profile import ProjectedSpan, profile, schedule
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.annotations import wish_of
from dask_ferro.scheduler.projected_seconds import Seconds
from dask_ferro.scheduler.scheduler_calls import DemandRow

# States of unfinished tasks whose inputs are all there.
READY: tuple[Literal["processing", "queued", "no-worker"], ...] = ("processing", "queued", "no-worker")
# A schedule of this many tasks takes 60 ms.
EXACT = 20_000


class Requirements(NamedTuple):
    """The requirements of a task: resources, one of certain workers, or a device class."""

    resources: tuple[tuple[str, float], ...] = ()
    bound: bool = False
    device: str = ""


class Demands:
    """The remaining work of a scheduler, as rows for `ferro_roster`.

    Parameters
    ----------
    scheduler : Scheduler
    exact : int
        The number of tasks up to which each is considered.
    """

    def __init__(self, scheduler: Scheduler, exact: int = EXACT) -> None:
        self.scheduler = scheduler
        self.exact = exact

    def remaining(self) -> int:
        """Return the number of unfinished tasks."""
        prefixes = self.scheduler.task_prefixes.values()
        return sum(
            prefix.states["waiting"] + sum(map(prefix.states.__getitem__, READY)) for prefix in prefixes
        )

    def rows(self) -> list[DemandRow]:
        """Return a row for each kind of needs; see `DemandRow`."""
        seconds = Seconds(self.scheduler)
        count = self.remaining()
        away = self._seceded()
        spans = self._exact(seconds) if count <= self.exact else self._sampled(seconds, count, away)
        if away:
            spans = ((ts, span) for ts, span in spans if ts not in away)
        kinds: dict[Requirements, list[tuple[TaskState, ProjectedSpan]]] = {}
        for ts, span in spans:
            kinds.setdefault(needs_of(ts, seconds.is_placed), []).append((ts, span))
        return [self._row(needs, own, seconds) for needs, own in kinds.items()]

    def _row(
        self, needs: Requirements, own: list[tuple[TaskState, ProjectedSpan]], seconds: Seconds
    ) -> DemandRow:
        # Whole tasks: one that moves to a fresh job starts over, whatever part of it has run.
        ready = (seconds.from_start(ts) for ts, _ in own if ts.state in READY)
        resources = dict(needs.resources)
        return {
            "profile": profile(span for _, span in own),
            "longest": max(ready, default=0.0),
            "resources": resources,
            "workers": self._bound_to(ts for ts, _ in own) if needs.bound else None,
            "device": needs.device or ("gpu" if names_a_gpu(resources) else None),
            "speeds": seconds.speeds(ts for ts, _ in own),
        }

    def _bound_to(self, tasks: Iterable[TaskState]) -> list[str]:
        """Return the workers that tasks are bound to, including those on hosts that they are bound to."""
        found: set[str] = set()
        for ts in tasks:
            found.update(ts.worker_restrictions or ())
            for host in ts.host_restrictions or ():
                found.update(self.scheduler.host_info.get(host, {}).get("addresses", ()))
        return sorted(found)

    def _seceded(self) -> set[TaskState]:
        """Return the tasks that seceded and are not done: they wait for others."""
        return set().union(*(ws.long_running for ws in self.scheduler.workers.values()))

    def _ready(self) -> Iterator[TaskState]:
        for ws in self.scheduler.workers.values():
            yield from ws.processing
        yield from self.scheduler.queued
        yield from self.scheduler.unrunnable

    def _exact(self, seconds: Seconds) -> Iterable[tuple[TaskState, ProjectedSpan]]:
        return schedule(
            list(self._ready()),
            lambda ts: (other for other in ts.dependents if other.state == "waiting"),
            lambda ts: len(ts.waiting_on or ()),
            seconds.left,
        ).items()

    def _sampled(
        self, seconds: Seconds, count: int, away: set[TaskState]
    ) -> Iterator[tuple[TaskState, ProjectedSpan]]:
        """Yield a sample of the tasks with matching widths; waiting tasks are assumed to be as wide as those before."""
        stride = count // max(self.exact // 2, 1) | 1
        tasks = islice(self.scheduler.tasks.values(), 0, None, stride)
        found = [ts for ts in tasks if ts.state == "waiting" or (ts.state in READY[:2] and ts not in away)]
        rare = self.scheduler.unrunnable  # a single such task may need a pool of its own
        width = (count - len(rare) - len(away)) / max(len(found), 1)
        first = [seconds.left(ts) for ts in found if ts.state != "waiting"]
        later = [seconds.left(ts) for ts in found if ts.state == "waiting"]
        begin = sum(first) / max(len(first), 1)
        lasts = sum(later) / max(len(first), 1)
        for ts in found:
            if ts.state == "waiting":
                yield ts, ProjectedSpan(begin, begin + lasts, width * seconds.left(ts) / lasts)
            else:
                yield ts, ProjectedSpan(0.0, seconds.left(ts), width)
        yield from ((ts, ProjectedSpan(0.0, seconds.left(ts))) for ts in islice(rare, self.exact))


def needs_of(ts: TaskState, is_placed: bool = True) -> Requirements:
    """Return the requirements of a task.

    Parameters
    ----------
    is_placed : bool
        Whether a required device class is honoured in placement, which stock Dask does not do.
    """
    device = wish_of(ts.annotations).must if ts.annotations and is_placed else ""
    if ts.loose_restrictions or not upstream.is_restricted(ts) or upstream.is_held(ts):
        return Requirements(device=device) if device else _NO_REQUIREMENTS
    resources = tuple(sorted((ts.resource_restrictions or {}).items()))
    return Requirements(resources, bool(ts.worker_restrictions or ts.host_restrictions), device)


_NO_REQUIREMENTS = Requirements()


def names_a_gpu(resources: Iterable[str]) -> bool:
    """Return whether a worker's or a task's resources name a GPU."""
    return any(name.upper() == "GPU" for name in resources)
