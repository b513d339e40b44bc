"""The projected seconds of unfinished tasks, from the best available source.

Sources, in this order: the task's own annotation (seconds, or operations and bytes on a device of known speed),
corrected by measurements of its prefix; the ledger's measurements by device class; Dask's mean of the prefix; twice
the longest current run of the prefix; a guess.  Invalid annotations are ignored.  Time already run is subtracted, and
a task that overran its projection is expected to take as long again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import dask
from dask.utils import parse_timedelta
from distributed import Scheduler
from distributed.metrics import time
from distributed.scheduler import TaskState

from dask_ferro.policy.estimates import Estimate, is_duration
from dask_ferro.policy.scaling.work_profile import extrapolate, seconds_left
from dask_ferro.scheduler.annotations import estimate_of
from dask_ferro.scheduler.stealing import Stealing

# A task's own estimate: seconds, or an `Estimate`; None: it has none.
OwnEstimate = Estimate | float | None


class Seconds:
    """The projected seconds of tasks at one moment.

    Parameters
    ----------
    scheduler : Scheduler

    Attributes
    ----------
    is_placed : bool
        Whether our plugin, which keeps the ledger, is installed.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        stealing = scheduler.extensions.get("stealing")
        self._ledger = stealing.ledger if isinstance(stealing, Stealing) else None
        self.is_placed = self._ledger is not None
        self._devices = sorted(self._ledger.devices) if self._ledger is not None else []
        guess = parse_timedelta(dask.config.get("distributed.scheduler.unknown-task-duration"))
        self._guess = float(guess or 0.0)  # for a task without measurements of its prefix
        self._now = time()
        self._known: dict[str, float | None] = {}
        self._left: dict[TaskState, float] = {}

    def left(self, ts: TaskState) -> float:
        """Return the seconds that a task still takes."""
        seconds = self._left.get(ts)
        if seconds is None:
            seconds = self._left[ts] = seconds_left(self._of(ts), self._ran(ts))
        return seconds

    def from_start(self, ts: TaskState) -> float:
        """Return the seconds that a task takes on a worker that starts it over, at least if that is not known."""
        known = self._known_of(ts)
        # What is left of a task without a projection is as long as it has run, which is the least that it takes.
        return self.left(ts) if known is None else max(known, self._ran(ts))

    def _of(self, ts: TaskState) -> float:
        known = self._known_of(ts)
        return extrapolate(ts.prefix.max_exec_time, self._guess) if known is None else known

    def _known_of(self, ts: TaskState) -> float | None:
        """Return the projection of a task that is more than a guess; None: there is none."""
        name, own = ts.prefix.name, estimate_of(ts.annotations)
        if own is not None:
            seconds = self._measured(name, own)
            return self._mean(ts) if seconds is None else seconds
        # Cached by prefix: one pass covers all unfinished tasks, most of them without annotations.
        if name not in self._known:
            self._known[name] = self._measured(name, None) or self._mean(ts)
        return self._known[name]

    def _measured(self, prefix: str, own: OwnEstimate, device: str | None = None) -> float | None:
        """Return the seconds by our measurements or the task's own estimate, without Dask's mean."""
        if self._ledger is None:
            seconds = own.seconds if isinstance(own, Estimate) else own
            return seconds if seconds is not None and is_duration(seconds) else None
        first = device or (self._devices[0] if self._devices else "cpu")
        seconds, known = self._ledger.durations.of(prefix, first, own)
        return seconds if known else None

    @staticmethod
    def _mean(ts: TaskState) -> float | None:
        """Return Dask's mean of a task's prefix; None: none of it has ended."""
        return ts.prefix.duration_average if ts.prefix.duration_average >= 0 else None

    def _ran(self, ts: TaskState) -> float:
        if ts.processing_on is None:
            return 0.0
        entry = self._ledger.entries.get(ts.key) if self._ledger is not None else None
        if entry is not None and entry.started is not None:
            return max(self._now - entry.started, 0.0)  # infinite before its message has left
        return ts.processing_on.executing.get(ts, 0.0)

    def speeds(self, tasks: Iterable[TaskState]) -> Mapping[str, float]:
        """Return the speed-up of other device classes over the projected seconds of some tasks, where known."""
        if len(self._devices) < 2:
            return {}
        work: dict[str, float] = {}
        # One annotation for each prefix: tasks of a prefix differ in size, but hardly in kind.
        estimates: dict[str, OwnEstimate] = {}
        for ts in tasks:
            name = ts.prefix.name
            work[name] = work.get(name, 0.0) + self.left(ts)
            if name not in estimates:
                estimates[name] = estimate_of(ts.annotations)
        total, speeds = sum(work.values()), {}
        for device in self._devices[1:]:
            there_all = 0.0
            for prefix, seconds in work.items():
                here = self._measured(prefix, estimates[prefix])
                there = self._measured(prefix, estimates[prefix], device)
                there_all += seconds * (there / here if here and there else 1.0)
            speeds[device] = total / there_all if there_all > 0 else 1.0
        return speeds
