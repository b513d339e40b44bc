"""The transfer of retiring workers' results to other workers.

Each result without a holder that stays is given one receiver, in proportion to free memory
(`policy.replication.evacuation`), and receivers fetch a limited amount at a time.  If a retiring worker's time is
limited, its results go first, in the order of `policy.replication.worth`: the most expensive to compute again per
byte. If a receiver leaves, pauses or is silent, its results go to others.  Without enough room, results are placed
until receivers spill and reach their limits.  Which workers retire, and when, is decided elsewhere.  Sizes are bytes,
durations seconds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, cast

from dask.typing import Key
from distributed import Scheduler, Status
from distributed.metrics import monotonic
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.policy.replication.copies import Rooms
from dask_ferro.policy.replication.evacuation import spread
from dask_ferro.policy.replication.worth import UniqueResult, by_worth
from dask_ferro.runtime import upstream
from dask_ferro.runtime.replication.recompute import Recompute
from dask_ferro.runtime.upstream import nbytes_of
from dask_ferro.runtime.worker_memory import free_bytes, spilling_bytes

logger = logging.getLogger(__name__)

# Bytes that one receiver, and all together, fetch at a time, and keys: a worker that has spilled loads them again.
_EACH, _ALL, _EACH_KEYS = 64 * 2**20, 512 * 2**20, 1000
# A receiver is passed over after this silence plus the time of its fetches at the slowest rate.
_SILENCE, _SLOWEST = 10.0, 20e6


class ResultTransfer(NamedTuple):
    """A result on its way to a receiver; `sent` is the time of the request, 0 before that."""

    receiver: str
    nbytes: int
    sent: float = 0.0


class Moving:
    """The unfinished transfers.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.moves: dict[Key, ResultTransfer] = {}
        self._heard: dict[str, float] = {}  # when a result last arrived at a receiver with pending fetches
        self._silent: set[str] = set()

    def place(self, left: set[WorkerState], bounded: Collection[WorkerState] = ()) -> bool:
        """Choose a receiver for each result that only retiring workers hold; False if there is not enough room.

        Parameters
        ----------
        bounded : collection of WorkerState
            Retiring workers whose time is limited.
        """
        now = monotonic()
        receivers = {ws.address: free_bytes(ws) for ws in self.scheduler.running - left}
        self._pass_over(receivers, now)
        alone: dict[Key, int] = {ts.key: nbytes_of(ts) for ts in unheld(left, left)}
        for key, move in list(self.moves.items()):
            if key not in alone or move.receiver not in receivers:
                if move.sent:
                    self._heard[move.receiver] = now
                del self.moves[key]
        for move in self.moves.values():
            receivers[move.receiver] -= move.nbytes
        rest = ((key, nbytes) for key, nbytes in alone.items() if key not in self.moves)
        found = cast(dict[Key, str] | None, spread(rest, receivers))
        if found is None:
            return False
        self.moves.update((key, ResultTransfer(to, alone[key])) for key, to in found.items())
        if found:
            self._order(bounded)
        return True

    def place_some(self, left: set[WorkerState], bounded: Collection[WorkerState] = ()) -> None:
        """Choose receivers for as many results as fit, after `place` found no room for all.

        The most valuable results go first; memory is filled up to the point where receivers spill, and then up to
        their limits.
        """
        by_key = {ts.key: ts for ts in unheld(left, left) if ts.key not in self.moves}
        rest = [by_key[key] for key in self._by_worth(by_key.values())]
        stay = [ws for ws in self.scheduler.running - left if ws.address not in self._silent]
        for room in (free_bytes, spilling_bytes):
            receivers = {ws.address: room(ws) for ws in stay}
            for move in self.moves.values():
                receivers[move.receiver] -= move.nbytes
            rest = self._fill(rest, receivers)
        self._order(bounded)

    def _order(self, bounded: Collection[WorkerState]) -> None:
        """Sort the transfers: results of workers whose time is limited come first, ordered by worth."""
        if not bounded:
            return
        tasks = self.scheduler.tasks
        there = {key: tasks[key] for key in self.moves if key in tasks}
        soon = self._by_worth(ts for ts in there.values() if not (ts.who_has or set()).isdisjoint(bounded))
        first = {key: self.moves[key] for key in soon}
        self.moves = first | {key: move for key, move in self.moves.items() if key not in first}

    def _by_worth(self, results: Iterable[TaskState]) -> list[Key]:
        again = Recompute(self.scheduler)
        held = (UniqueResult(ts.key, nbytes_of(ts), again.seconds(ts)) for ts in results)
        return cast(list[Key], by_worth(held))

    def _fill(self, rest: list[TaskState], receivers: dict[str, int]) -> list[TaskState]:
        """Assign results to the receivers with most room; return those that fit nowhere."""
        rooms, unplaced = Rooms(receivers), []
        for ts in rest:
            nbytes = nbytes_of(ts)
            if (address := rooms.most(nbytes)) is None:
                unplaced.append(ts)
            else:
                rooms.fill(address, nbytes)
                self.moves[ts.key] = ResultTransfer(address, nbytes)
        return unplaced

    def _pass_over(self, receivers: dict[str, int], now: float) -> None:
        """Leave out silent receivers while there are others."""
        coming, _ = self._coming()
        self._silent.clear()
        for address, nbytes in coming.items():
            patience = _SILENCE + nbytes / _SLOWEST
            if len(receivers) > 1 and now - self._heard.get(address, now) > patience:
                logger.warning(
                    "dask_ferro: %s does not fetch the data of retiring workers; other workers will", address
                )
                receivers.pop(address, None)
                self._silent.add(address)

    def _coming(self) -> tuple[Counter[str], Counter[str]]:
        """Return the bytes and the number of keys that each receiver was told to fetch and does not have yet."""
        nbytes: Counter[str] = Counter()
        keys: Counter[str] = Counter()
        for move in self.moves.values():
            if move.sent:
                nbytes[move.receiver] += move.nbytes
                keys[move.receiver] += 1
        return nbytes, keys

    def fetch(self, stimulus_id: str) -> None:
        """Let receivers fetch, each up to its limit and at least one result."""
        coming, keys = self._coming()
        now, total = monotonic(), coming.total()
        told: dict[str, list[Key]] = {}
        for key, move in self.moves.items():
            to = move.receiver
            if move.sent or keys[to] >= _EACH_KEYS or (keys[to] and coming[to] + move.nbytes > _EACH):
                continue
            if total and total + move.nbytes > _ALL:
                break
            if not keys[to]:
                self._heard[to] = now
            coming[to] += move.nbytes
            keys[to] += 1
            total += move.nbytes
            told.setdefault(to, []).append(key)
        for address, some in told.items():
            self.moves.update((key, self.moves[key]._replace(sent=now)) for key in some)
            upstream.copy_to(self.scheduler, address, some, stimulus_id)

    def clear(self) -> None:
        """Forget all transfers; those in progress still arrive, as additional copies."""
        self.moves.clear()
        self._heard.clear()


def unheld(workers: Iterable[WorkerState], left: set[WorkerState]) -> Iterator[TaskState]:
    """Yield the results on some retiring workers that no staying worker holds."""
    for ws in workers:
        for ts in ws.has_what:
            holders = ts.who_has or ()
            # Other workers hold only a name of an actor, and an actor cannot move.
            if not ts.actor and (len(holders) == 1 or not any(_stays(holder, left) for holder in holders)):
                yield ts


def _stays(ws: WorkerState, left: set[WorkerState]) -> bool:
    return ws not in left and ws.status in (Status.running, Status.paused)


def is_clear(worker: WorkerState, left: set[WorkerState]) -> bool:
    """Return whether a retiring worker has no tasks and no unique data."""
    return not worker.processing and not worker.actors and next(unheld([worker], left), None) is None
