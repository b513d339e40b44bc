"""The transfer of retiring workers' results to other workers.

Each result without a holder that stays is given one receiver, in proportion to free memory
(`policy.scaling.evacuation`), and receivers fetch a limited amount at a time, so that what goes first also arrives
first.  If a retiring worker's time is limited, its results go in the order of `recompute.rank`: the most expensive to
compute again per byte.  If a receiver leaves, pauses or is silent, its results go to others.  Without enough room, the
results with the highest rank are placed until receivers reach their limits.  Which workers retire, and when, is
decided elsewhere.  Sizes are bytes, durations seconds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, cast

import dask
from dask.typing import Key
from distributed import Scheduler, Status
from distributed.metrics import monotonic
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.elastic.recompute import Recompute
from dask_ferro.policy.scaling.evacuation import spread
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.upstream import metrics_of

logger = logging.getLogger(__name__)

# Bytes that one receiver fetches at a time: of one request, a worker fetches the last key first.
_FETCH_BYTES = 64 * 2**20
# The least that a result counts for: a worker that has spilled loads it again.
_MIN_BYTES = 64 * 2**10
# A receiver is passed over when a result has not come after this time and that of its fetches at the slowest rate.
_SILENCE, _SLOWEST = 10.0, 20e6
# Dask's default for the share of memory from which a worker spills.
_TARGET = 0.6
# For a worker without a memory limit: a petabyte, so that shares of it can still be compared.
_ENDLESS = 2**50


class ResultTransfer(NamedTuple):
    """A result on its way to a receiver; `sent` is the time of the request, 0 before that."""

    receiver: str
    nbytes: int
    sent: float = 0.0


class PendingTransfers:
    """The unfinished transfers.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.moves: dict[Key, ResultTransfer] = {}

    def place(self, left: set[WorkerState], bounded: bool = False, partly: bool = False) -> bool:
        """Choose a receiver for each result that only retiring workers hold.

        Parameters
        ----------
        bounded : bool
            Whether the time of retiring workers is limited: then the results with the highest rank go first.
        partly : bool
            Whether as many results as fit are placed, even if receivers spill.

        Returns
        -------
        bool
            Whether there was room for all; otherwise none is placed, unless some may be.
        """
        stay = self._receivers(left)
        alone = {ts.key: ts for ts in sole_results(left, left)}
        self.moves = {key: move for key, move in self.moves.items() if key in alone and move.receiver in stay}
        rest = [ts for key, ts in alone.items() if key not in self.moves]
        rest.sort(key=lambda ts: (-ts.get_nbytes(), repr(ts.key)))  # the largest first, so that all may fit
        placed = self._spread(rest, stay.values(), free_bytes)
        if len(placed) < len(rest):
            if not partly:
                return False
            rest.sort(key=Recompute(self.scheduler).rank)
            placed = self._spread(rest, stay.values(), spilling_bytes)
        self.moves |= {key: ResultTransfer(to, alone[key].get_nbytes()) for key, to in placed.items()}
        if placed and bounded:
            again = Recompute(self.scheduler)
            self.moves = {
                key: self.moves[key] for key in sorted(self.moves, key=lambda k: again.rank(alone[k]))
            }
        return True

    def _receivers(self, left: set[WorkerState]) -> dict[str, WorkerState]:
        """Return the workers that stay, without silent ones while there are others."""
        stay = {ws.address: ws for ws in self.scheduler.running - left}
        coming, now = self._coming(), monotonic()
        silent = {
            move.receiver
            for move in self.moves.values()
            if move.sent and now - move.sent > _SILENCE + coming[move.receiver] / _SLOWEST
        }
        for address in silent & stay.keys():
            if len(stay) > 1:
                logger.warning(
                    "dask_ferro: %s does not fetch the data of retiring workers; other workers will", address
                )
                del stay[address]
        return stay

    def _spread(
        self,
        results: Iterable[TaskState],
        stay: Iterable[WorkerState],
        room: Callable[[WorkerState], int],
    ) -> dict[Key, str]:
        """Return the receivers of results, in that order, beside what is already coming."""
        free = {ws.address: room(ws) for ws in stay}
        for move in self.moves.values():
            free[move.receiver] -= move.nbytes
        return cast(dict[Key, str], spread(((ts.key, ts.get_nbytes()) for ts in results), free))

    def _coming(self) -> Counter[str]:
        """Return the bytes that each receiver was asked to fetch and does not have yet."""
        coming: Counter[str] = Counter()
        for move in self.moves.values():
            if move.sent:
                coming[move.receiver] += max(move.nbytes, _MIN_BYTES)
        return coming

    def fetch(self, stimulus_id: str) -> None:
        """Let receivers fetch, each up to its limit and at least one result."""
        coming, now = self._coming(), monotonic()
        asked: dict[str, list[Key]] = {}
        for key, move in self.moves.items():
            nbytes, to = max(move.nbytes, _MIN_BYTES), move.receiver
            if not move.sent and (not coming[to] or coming[to] + nbytes <= _FETCH_BYTES):
                coming[to] += nbytes
                asked.setdefault(to, []).append(key)
        for address, keys in asked.items():
            self.moves.update((key, self.moves[key]._replace(sent=now)) for key in keys)
            upstream.copy_to(self.scheduler, address, keys, stimulus_id)


def sole_results(workers: Iterable[WorkerState], left: set[WorkerState]) -> Iterator[TaskState]:
    """Yield the results on some retiring workers that no staying worker holds."""
    for ws in workers:
        for ts in ws.has_what:
            holders = ts.who_has or ()
            # Other workers hold only a name of an actor, and an actor cannot move.
            if not ts.actor and (
                len(holders) == 1 or not any(_is_staying(holder, left) for holder in holders)
            ):
                yield ts


def _is_staying(ws: WorkerState, left: set[WorkerState]) -> bool:
    return ws not in left and ws.status in (Status.running, Status.paused)


def is_clear(worker: WorkerState, left: set[WorkerState]) -> bool:
    """Return whether a retiring worker has no tasks and no unique data."""
    return not worker.processing and not worker.actors and next(sole_results([worker], left), None) is None


def free_bytes(worker: WorkerState) -> int:
    """Return the bytes that a worker can take before it spills: its limit's `target` share, less its use.

    Its use is the data in memory and other memory that has been in use for a while (Dask's "optimistic" memory).
    """
    if not worker.memory_limit:
        return _ENDLESS
    used = worker.memory.optimistic if "memory" in metrics_of(worker) else worker.nbytes
    target = dask.config.get("distributed.worker.memory.target") or _TARGET
    return max(int(target * worker.memory_limit) - used, 0)


def spilling_bytes(worker: WorkerState) -> int:
    """Return the bytes that a worker can take if it spills: its limit less all its data, including that on disk.

    Sizes on disk are about those in memory.  A worker that does not spill can take no more than `free_bytes`.
    """
    if not worker.memory_limit or not dask.config.get("distributed.worker.memory.target"):
        return free_bytes(worker)
    return max(worker.memory_limit - worker.nbytes, free_bytes(worker))
