"""A bundle of Dask tasks as one task: what a worker runs, and what it measures.

A value is dropped as soon as no task of the bundle reads it any more, unless it is an output.  An error is the task's
own, with a note that names the task.  Each task is timed (0.6 us), and many a result is sized, for the bundles of the
next run: the scheduler gets a message every 0.2 s at most, for all bundles of a process.  Durations are seconds, sizes
bytes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import isfinite, nan
from statistics import fmean
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from dask.typing import Key
from distributed import get_worker
from distributed.sizeof import safe_sizeof

from dask_ferro.lower.bundled.costs import MeasuredTasks, merged, names_of
from dask_ferro.lower.bundled.upstream import rejoin_after_secede
from dask_ferro.lower.upstream import GraphNode

logger = logging.getLogger(__name__)

# Of the seconds of a bundle's tasks, what may be spent on the bytes of their results: 1 us for an array, 0.1 ms for a
# table with text.
_SIZING = 0.05
# The topic of Dask's events under which measurements are sent; seconds between two messages, and groups in one.
TOPIC = "ferro-task-costs"
_EVERY = 0.2
_GROUPS = 256


class Read(NamedTuple):
    """Where a bundle finds an input: the argument's number, the place in it (-1: all of it), and the input's key."""

    argument: int
    place: int
    key: Key


class TaskProgram(NamedTuple):
    """The tasks of a bundle in the order in which they run, its inputs, and the keys of its results.

    `keys` are those under which the graph has the tasks: a list has none of its own, and a graph of Dask's dataframes
    may have a task under another one.
    """

    tasks: tuple[GraphNode, ...]
    reads: tuple[Read, ...]
    outputs: tuple[Key, ...]
    keys: tuple[Key, ...]


class InnerRun(NamedTuple):
    """A task of a bundle that ran: its key, its times on `perf_counter`, its result's bytes (nan: not measured)."""

    key: Key
    start: float
    stop: float
    nbytes: float


# Called with the runs of a bundle's tasks in this process, after it; None: nobody asks.
Listener = Callable[[list[InnerRun]], None]
_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Install a hook that is told of each bundle that ran in this process; None removes it."""
    global _listener
    _listener = listener


def run_tasks(program: TaskProgram, *arguments: Any) -> object:
    """Return the result of a bundle of tasks, or a tuple of several.

    Raises
    ------
    Exception
        What a task raised, with a note that names it.
    """
    values = {
        read.key: arguments[read.argument] if read.place < 0 else arguments[read.argument][read.place]
        for read in program.reads
    }
    left = Counter(program.outputs)
    for task in program.tasks:
        left.update(task.dependencies)
    clock = _Timer()
    for key, task in zip(program.keys, program.tasks, strict=True):
        start = perf_counter()
        try:
            result = task({dep: values[dep] for dep in task.dependencies})
        except Exception as error:
            # Some exceptions forbid it.
            with suppress(Exception):
                error.add_note(f"in task {key!r}, one of the {len(program.tasks)} that ran as one bundle")
            raise
        clock.note(key, start, result)
        # The next task may call `secede` too.
        rejoin_after_secede()
        values[key] = result
        # This name must not keep what no task reads any more.
        del result
        for dep in task.dependencies:
            left[dep] -= 1
            if not left[dep]:
                del values[dep]
    clock.tell()
    if len(program.outputs) == 1:
        return values[program.outputs[0]]
    return tuple(values[key] for key in program.outputs)


class _Timer:
    """The runs of a bundle's tasks."""

    def __init__(self) -> None:
        self._runs: list[InnerRun] = []
        self._sized: set[tuple[str, str]] = set()
        self._budget = 0.0

    def note(self, key: Key, start: float, result: object) -> None:
        """Note a task that has just ended, and the bytes of its result, if it is a group's first or time is left."""
        stop, nbytes, names = perf_counter(), nan, names_of(key)
        self._budget += _SIZING * (stop - start)
        if self._budget > 0 or names not in self._sized:
            self._sized.add(names)
            nbytes = float(safe_sizeof(result))
            self._budget -= perf_counter() - stop
        self._runs.append(InnerRun(key, start, stop, nbytes))

    def tell(self) -> None:
        """Tell the scheduler, now and then, and the hook.  The results are there: nothing may fail for this."""
        try:
            worker = None
            # The caller's own thread, where Dask's local schedulers compute, has none.
            with suppress(ValueError):
                worker = get_worker()
            if worker is not None and (measured := _pending.taken(tallied(self._runs))):
                worker.log_event(TOPIC, [one._asdict() for one in measured])
            if _listener is not None:
                _listener(self._runs)
        except Exception:
            logger.warning("dask_ferro: the times of a bundle's tasks are lost", exc_info=True)


class _Pending:
    """What was measured since the last message."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measured: dict[tuple[str, str], MeasuredTasks] = {}
        self._sent = -_EVERY

    def taken(self, measured: Iterable[MeasuredTasks]) -> list[MeasuredTasks]:
        """Add measurements; return all that are to be sent now, none if the last message is too recent."""
        with self._lock:
            for one in measured:
                name = one.prefix, one.group
                before = self._measured.get(name)
                if before is not None:
                    one = merged(before, one)
                if before is not None or len(self._measured) < _GROUPS:
                    self._measured[name] = one
            now = monotonic()
            if now - self._sent < _EVERY:
                return []
            self._sent = now
            found, self._measured = list(self._measured.values()), {}
            return found


_pending = _Pending()


def pick(results: tuple[object, ...], place: int) -> object:
    """Return one result of a bundle that has several."""
    return results[place]


def is_ours(spec: object) -> bool:
    """Return whether a task of a graph is a bundle, or picks a result of one."""
    return getattr(spec, "func", None) in (run_tasks, pick)


def is_pick(spec: object) -> bool:
    """Return whether a task picks a result of a bundle."""
    return getattr(spec, "func", None) is pick


def tallied(runs: list[InnerRun]) -> list[MeasuredTasks]:
    """Return the runs of a bundle's tasks summed up by group."""
    found: dict[tuple[str, str], list[InnerRun]] = {}
    for run in runs:
        found.setdefault(names_of(run.key), []).append(run)
    tallies = []
    for names, of_group in found.items():
        sized = [run.nbytes for run in of_group if isfinite(run.nbytes)]
        seconds = sum(run.stop - run.start for run in of_group)
        tallies.append(MeasuredTasks(*names, len(of_group), seconds, fmean(sized) if sized else nan))
    return tallies
