"""What tasks in bundles took, sent to the scheduler: a message every 0.2 s at most, for all bundles of a process."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from time import monotonic

from distributed import Worker, get_worker

from dask_ferro.lower.bundled.costs import MeasuredTasks, merged

# The topic of Dask's events under which it is sent.
TOPIC = "ferro-task-costs"
# Seconds between two messages, and groups in one.
_EVERY = 0.2
_GROUPS = 256


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


def add(measured: Iterable[MeasuredTasks]) -> None:
    """Tell the scheduler of tasks that ran in this thread's bundle; without a worker, nobody is told."""
    worker = _worker()
    if worker is not None and (found := _pending.taken(measured)):
        worker.log_event(TOPIC, [one._asdict() for one in found])


def _worker() -> Worker | None:
    try:
        return get_worker()
    # The caller's own thread computes: Dask's local schedulers.
    except ValueError:
        return None
