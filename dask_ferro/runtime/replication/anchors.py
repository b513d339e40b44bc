"""Anchors: intermediate results held beyond their last reader, so that chains of tasks need not start over.

In a chain of short tasks each result is released as soon as the next one exists: a preemption loses the newest, and
the whole chain runs again.  A copy of one result helps only if it outlives its readers.  An anchor is released when
no path leads from it to a result that could be lost or is still to be computed.

Results that a client wants or wanted are never held, since a user who releases or cancels them expects the memory back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from dask.typing import Key
from distributed import Scheduler
from distributed.scheduler import TaskState

CLIENT = "ferro-copies"
# Tasks visited in one review; anchors beyond that stay held, and are reviewed first the next time.
_FAR = 20000


class Anchors:
    """The results that are held.

    Parameters
    ----------
    scheduler : Scheduler

    Attributes
    ----------
    seconds : dict of key to float
        The seconds that each held result would take to compute again, at the time when it was first held.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.seconds: dict[Key, float] = {}
        self._going: set[Key] = set()

    def hold(self, ts: TaskState, seconds: float) -> None:
        """Hold a result in memory, unless a client wants or wanted it, or it was scattered."""
        if ts.who_wants is None and ts.run_spec is not None:
            self.seconds[ts.key] = seconds
            self._scheduler.client_desires_keys([ts.key], CLIENT)

    def review(self, is_exposed: Callable[[TaskState], bool]) -> int:
        """Release anchors that are not needed, or that a client wants; return the number of tasks visited.

        Parameters
        ----------
        is_exposed : callable
            Returns whether a result in memory may be lost.
        """
        paths = _Paths(is_exposed)
        tasks, gone, kept = self._scheduler.tasks, set(), []
        for key in self.seconds:
            if _is_foreign(tasks.get(key)):
                gone.add(key)
            elif paths.seen <= _FAR:
                kept.append(key)
                if not paths.is_needed(tasks[key]):
                    gone.add(key)
        # Reviewed anchors go to the end.
        if paths.seen > _FAR:
            self.seconds |= {key: self.seconds.pop(key) for key in kept}
        self.let_go(gone)
        return paths.seen

    def let_go(self, keys: Iterable[Key]) -> None:
        """Release some anchors."""
        going = [key for key in keys if self.seconds.pop(key, None) is not None]
        if going and CLIENT in self._scheduler.clients:
            self._scheduler.client_releases_keys(going, CLIENT)
        if not self.seconds:
            self._scheduler.clients.pop(CLIENT, None)

    def let_go_wanted(self) -> None:
        """Release all anchors that a client wants, for instance because it is about to cancel them."""
        tasks = self._scheduler.tasks
        self.let_go([key for key in self.seconds if _is_foreign(tasks.get(key))])

    def let_go_soon(self, keys: Iterable[Key]) -> None:
        """Release some anchors after the present transition of the scheduler, during which that is not possible."""
        going = self.seconds.keys() & keys if self.seconds else set()
        if going and not self._going:
            asyncio.get_running_loop().call_soon(self._go)
        self._going |= going

    def _go(self) -> None:
        going, self._going = self._going, set()
        self.let_go(going)

    def clear(self) -> None:
        """Release all anchors."""
        self.let_go(list(self.seconds))


def _is_foreign(ts: TaskState | None) -> bool:
    """Return whether a task is gone, or wanted by a client other than ours."""
    return ts is None or ts.state != "memory" or {cs.client_key for cs in ts.who_wants or ()} != {CLIENT}


class _Paths:
    """A search along released tasks; each is visited once in a review, whatever the number of anchors."""

    def __init__(self, is_exposed: Callable[[TaskState], bool]) -> None:
        self._is_exposed = is_exposed
        # Whether a task leads to one that needs its inputs.
        self._leads: dict[TaskState, bool] = {}
        self.seen = 0

    def is_needed(self, start: TaskState) -> bool:
        """Return whether a path of released tasks leads to one that is to be computed, or is in memory and exposed."""
        from_: dict[TaskState, TaskState] = {}
        stack = [start]
        while stack:
            task = stack.pop()
            for dts in task.dependents:
                self.seen += 1
                if dts in from_ or self._leads.get(dts) is False:
                    continue
                from_[dts] = task
                if self._leads.get(dts) or self._is_end(dts):
                    self._mark(dts, start, from_)
                    return True
                if dts.state != "memory":
                    stack.append(dts)
            if self.seen > _FAR:
                return True
        self._leads |= dict.fromkeys(from_, False)
        return False

    def _mark(self, task: TaskState, start: TaskState, from_: Mapping[TaskState, TaskState]) -> None:
        while task is not start:
            self._leads[task] = True
            task = from_[task]

    def _is_end(self, ts: TaskState) -> bool:
        if ts.state == "memory":
            return self._is_exposed(ts)
        return ts.state not in ("released", "forgotten", "erred")
