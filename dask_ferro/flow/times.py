"""Measure how long the tasks of bundles and flows take, and the bytes of their results.

Each task is timed (0.6 us) and many results are sized for the next run.  The scheduler gets at most one message in
0.2 s for all bundles of a process.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from dask.typing import Key
from distributed import get_worker
from distributed.sizeof import safe_sizeof

from dask_ferro.flow.costs import MeasuredTasks, merge_tasks, names_of

logger = logging.getLogger(__name__)

# The share of the seconds of a bundle's tasks that may be spent on the bytes of their results: 1 us for an array,
# 0.1 ms for a table with text.
_SIZING = 0.05
# The topic of Dask's events under which measurements are sent; seconds between two messages, and groups in one.
TOPIC = "ferro-task-costs"
_EVERY = 0.2
_GROUPS = 256


@dataclass
class MemberFigures:
    """Values and bytes that a member of a flow sent to other workers, tasks of others that it ran, its idle seconds."""

    values: int = 0
    nbytes: int = 0
    stolen: int = 0
    waited: float = 0.0


class InnerRun(NamedTuple):
    """A task that ran in a bundle: key, times on `perf_counter`, its result's bytes (nan: unmeasured), `ModelPart`."""

    key: Key
    start: float
    stop: float
    nbytes: float
    about: tuple[Any, ...] = ()


# Called after each bundle of this process, with the runs of its tasks; None: not installed.
Listener = Callable[[list[InnerRun]], None]
_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Install a hook that is called after each bundle of this process; None removes it."""
    global _listener
    _listener = listener


class TaskTimes:
    """The tasks that ran in one Dask task, and the task's figures as a member of a flow."""

    def __init__(self) -> None:
        self.figures = MemberFigures()
        self._runs: list[InnerRun] = []
        self._sized: set[tuple[str, str]] = set()
        self._budget = 0.0

    def note(self, key: Key, start: float, result: object, about: tuple[Any, ...] = ()) -> None:
        """Record a task that has just ended; size its result if it is the first of its group or time is left."""
        stop, nbytes, names = perf_counter(), nan, names_of(key)
        self._budget += _SIZING * (stop - start)
        if self._budget > 0 or names not in self._sized:
            self._sized.add(names)
            nbytes = float(safe_sizeof(result))
            self._budget -= perf_counter() - stop
        self._runs.append(InnerRun(key, start, stop, nbytes, about))

    def tell(self) -> None:
        """Report to the scheduler, at intervals, and to the hook.  The results exist: an error must not lose them."""
        try:
            worker = None
            # The caller's own thread, in which Dask's local schedulers compute, has none.
            with suppress(ValueError):
                worker = get_worker()
            if worker is not None and (measured := _measurements.taken(tally(self._runs))):
                worker.log_event(TOPIC, [one._asdict() for one in measured])
            if _listener is not None:
                _listener(self._runs)
        except Exception:
            logger.warning("dask_ferro: the times of a bundle's tasks are lost", exc_info=True)


class _Measurements:
    """The measurements since the last message."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measured: dict[tuple[str, str], MeasuredTasks] = {}
        self._sent = -_EVERY

    def taken(self, measured: Iterable[MeasuredTasks]) -> list[MeasuredTasks]:
        """Add measurements; return all that must be sent now, none if the last message is too recent."""
        with self._lock:
            for one in measured:
                name = one.prefix, one.group
                before = self._measured.get(name)
                if before is not None:
                    one = merge_tasks(before, one)
                if before is not None or len(self._measured) < _GROUPS:
                    self._measured[name] = one
            now = monotonic()
            if now - self._sent < _EVERY:
                return []
            self._sent = now
            found, self._measured = list(self._measured.values()), {}
            return found


_measurements = _Measurements()


def tally(runs: list[InnerRun]) -> list[MeasuredTasks]:
    """Return the runs of a bundle's tasks, summed by group."""
    found: dict[tuple[str, str], list[InnerRun]] = {}
    for run in runs:
        found.setdefault(names_of(run.key), []).append(run)
    tallies = []
    for names, of_group in found.items():
        sized = [run.nbytes for run in of_group if isfinite(run.nbytes)]
        seconds = sum(run.stop - run.start for run in of_group)
        tallies.append(MeasuredTasks(*names, len(of_group), seconds, fmean(sized) if sized else nan))
    return tallies
