"""Results that are held beyond their last reader, so that what comes after them need not start from the beginning.

In a chain of short tasks each result is released as soon as the next one is there: a preemption takes the newest, and
all of the chain runs again.  A copy of one of them helps only if it outlives its readers.  Each of these is let go when
nothing that could be lost, or is still to be computed, leads back to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed import Scheduler
from distributed.scheduler import TaskState

CLIENT = "ferro-copies"
# So many released tasks are looked through from one of them; where there are more, it is held.
_FAR = 1000


class Anchors:
    """The results that are held.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.keys: set[Any] = set()

    def hold(self, key: Any) -> None:
        """Keep a result in memory."""
        self._scheduler.client_desires_keys([key], CLIENT)
        self.keys.add(key)

    def review(self, is_exposed: Callable[[TaskState], bool]) -> None:
        """Let go of those that nothing needs.

        Parameters
        ----------
        is_exposed : callable
            Whether a result that is there may be lost.
        """
        tasks = self._scheduler.tasks
        self._release({k for k in self.keys if k not in tasks or not _is_needed(tasks[k], is_exposed)})

    def clear(self) -> None:
        """Let go of all."""
        self._release(set(self.keys))

    def _release(self, keys: set[Any]) -> None:
        if keys and CLIENT in self._scheduler.clients:
            self._scheduler.client_releases_keys(sorted(keys & self._scheduler.tasks.keys(), key=str), CLIENT)
        self.keys -= keys


def _is_needed(ts: TaskState, is_exposed: Callable[[TaskState], bool]) -> bool:
    """Whether others want it, or a path of released tasks leads to one that is to be computed, or there and exposed."""
    if len(ts.who_wants or ()) > 1:  # who reads it may come just before they let go of it
        return True
    seen: set[TaskState] = set()
    stack = list(ts.dependents)
    while stack:
        task = stack.pop()
        if task in seen:
            continue
        seen.add(task)
        if task.state == "memory":
            if is_exposed(task):
                return True
        elif task.state in ("released", "forgotten", "erred"):
            stack += task.dependents
        else:
            return True
        if len(seen) > _FAR:
            return True
    return False
