"""The scheduler plugin that counts finished tasks by worker, for the records of jobs.

It is separate because a cluster may have no other plugin of ours; its hooks cost as little as empty ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Set
from typing import Any

from dask.typing import Key
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin


class TaskCounts(SchedulerPlugin):
    """The number of tasks that each worker finished without error, by its name."""

    name = "ferro-jobs"

    def __init__(self) -> None:
        self._done: Counter[str] = Counter()
        # By address.
        self._names: dict[str, str] = {}

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Learn a worker's name."""
        self._names[worker] = str(scheduler.workers[worker].name)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: object) -> None:
        """Forget a worker's address; its count stays until its job is over."""
        # A worker that its nanny restarts comes back under the same name.
        self._names.pop(worker, None)

    def transition(self, key: Key, start: str, finish: str, *args: object, **kwargs: Any) -> None:
        """Count a task that finished without error."""
        # Copies of a result are no transitions.
        if start == "processing" and finish == "memory":
            name = self._names.get(kwargs.get("worker", ""))
            if name is not None:
                self._done[name] += 1

    def of(self, workers: Collection[str]) -> int:
        """Return the number of tasks that some workers finished."""
        return sum(self._done[name] for name in workers)

    def take(self, workers: Collection[str]) -> int:
        """Return that number, and count from 0 again."""
        return sum(self._done.pop(name, 0) for name in workers)

    def keep(self, workers: Set[str]) -> None:
        """Forget all counts but those of some workers, and of connected ones."""
        for name in self._done.keys() - workers - set(self._names.values()):
            del self._done[name]
