"""The exoneration of tasks after a worker died because the batch system ended its job.

Dask fails a task when more than `distributed.scheduler.allowed-failures` workers died while they had it.  That is
meant for tasks that kill their worker; a preemption, a walltime or a failed node kills workers as well, and a long
task on preemptible jobs would fail at the fourth.  So a caller that learns from the batch system why a job ended
takes the blame back.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from dask.typing import Key
from distributed import Scheduler

logger = logging.getLogger(__name__)

# The most dead workers whose tasks are remembered; the newest are kept.
_MAX_WORKERS = 1000


class SuspicionReset:
    """The tasks of workers that died.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._had: dict[str, frozenset[Key]] = {}  # by worker's name, the newest last
        self._ended: set[str] = set()  # workers that are connected still, though their jobs were ended

    def died(self, name: str, keys: Collection[Key]) -> None:
        """Record the tasks that are blamed for a worker's death."""
        self._had.pop(name, None)
        if name in self._ended:
            self._ended.discard(name)
            self._forgive(keys)
        elif keys:
            self._had[name] = frozenset(keys)
            if len(self._had) > _MAX_WORKERS:
                del self._had[next(iter(self._had))]

    def came(self, name: str) -> None:
        """Record that a worker's nanny restarted it: its job had not ended."""
        self._had.pop(name, None)
        self._ended.discard(name)

    def take_back(self, names: Iterable[str]) -> int:
        """Take back the blame for deaths of workers, also those still to come; return the number of tasks.

        A task that has already failed stays failed.
        """
        self._ended &= {str(ws.name) for ws in self._scheduler.workers.values()}
        count = 0
        for name in names:
            count += self._forgive(self._had.pop(name, ()))
            self._ended.add(name)
        return count

    def _forgive(self, keys: Collection[Key]) -> int:
        count = 0
        for key in keys:
            ts = self._scheduler.tasks.get(key)
            if ts is not None and ts.suspicious > 0 and ts.state != "erred":
                ts.suspicious -= 1
                ts.prefix.suspicious -= 1
                count += 1
        if count:
            logger.info("dask_ferro: %d tasks are not to blame for workers whose jobs were ended", count)
        return count
