"""How soon messages to each worker leave: soon where it has little to do; where it has plenty, batches are cheaper."""

from __future__ import annotations

from distributed import Scheduler

from dask_ferro.policy.row import Row
from dask_ferro.runtime import upstream

# Seconds of queue a thread from which a worker does not notice Dask's own 5 ms of gathering.
_PLENTY = 0.01


class Sends:
    """Intervals of a scheduler's messages to its workers.

    Parameters
    ----------
    soon : float
        Seconds for which messages to a worker that has little to do are gathered.
    """

    def __init__(self, scheduler: Scheduler, soon: float) -> None:
        self._scheduler = scheduler
        self._soon = soon
        self._hurried: dict[str, bool] = {}

    def set(self, row: Row) -> None:
        """Let a worker's interval follow what it has to do; nothing is done where that is as before."""
        hurried = row.waiting_seconds * row.slowness < _PLENTY * row.nthreads
        if hurried != self._hurried.get(row.address):
            self._hurried[row.address] = hurried
            seconds = self._soon if hurried else max(upstream.WORKER_SENDS, self._soon)
            upstream.put_sends(self._scheduler, [row.address], seconds)

    def left(self, address: str) -> None:
        """Forget a worker: one that comes back has Dask's interval."""
        self._hurried.pop(address, None)
