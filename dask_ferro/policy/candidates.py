"""Which workers are weighed for a task: the few that can be the best one, read off a ledger.

Of a ready task, those are the holders of its inputs and the workers on which it would start first; all that a
restriction admits, where there is one.  Of many alike that wait in a queue, those with a free slot: where devices
differ, a slow one only while the fast ones would not be done with all of them before.  Where workers end at a known
time, a task of known seconds goes where it will be done by then.  The plugin and the simulator have this in common;
what a task is, and what becomes of one that nobody is given, they know.

Durations are seconds, sizes bytes, `now` is the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dask_ferro.policy.estimates import Estimate, Links
from dask_ferro.policy.facts import Address, TaskFacts, Worker
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.placement import PlacementParameters, begins_now

# Holders of inputs that are weighed; a block that every worker holds is no reason to look at all of them.
HOLDERS = 8
# Tasks of a queue that are looked at, whichever, to tell what all of them take.
QUEUED = 16
# Workers that are weighed where restrictions admit many: a row takes 2 us, so 0.1 ms of the scheduler for each task.
_ADMITTED = 64


class ByClass(NamedTuple):
    """What a task that nobody was given takes: on the first device class, and on the others where that is known."""

    device: str
    seconds: float
    known: bool
    others: Mapping[str, float]


@dataclass
class Candidates:
    """The candidates for a scheduler's tasks.

    Parameters
    ----------
    ledger : Ledger
    links : Links
    placement : PlacementParameters
        What chooses among them.
    current : callable (Worker) -> Worker
        A row as it is at this moment, where the ledger hears of something later.
    frees_soon : callable (address) -> bool
        `Worker.frees_soon` of one that has no room.
    """

    ledger: Ledger
    links: Links
    placement: PlacementParameters
    current: Callable[[Worker], Worker] = lambda worker: worker
    frees_soon: Callable[[Address], bool] = lambda address: False

    # -- what a task takes ---------------------------------------------------------------------------------

    @property
    def are_alike(self) -> bool:
        """Whether the workers are of one class, and no device counts its bytes: then a look at some settles it."""
        return len(self.ledger.devices) < 2 and not self.ledger.counts_bytes

    @property
    def first_device(self) -> str:
        """The class by which tasks are told that nobody was given."""
        return min(self.ledger.devices, default="cpu")

    def seconds(self, prefix: str, told: float | Estimate | None) -> tuple[float, bool]:
        """Return the projected seconds on the first device class, and whether they are more than a guess."""
        return self.ledger.durations.of(prefix, self.first_device, told)

    def seconds_by_class(self, prefix: str, told: float | Estimate | None) -> ByClass:
        """Return the projected seconds on all device classes of the cluster."""
        durations, first = self.ledger.durations, self.first_device
        others = durations.known(prefix, self.ledger.devices, first, told)
        return ByClass(first, *durations.of(prefix, first, told), others)

    def lasting(self, seconds: float, known: bool) -> float:
        """Return the seconds that a worker needs to have left for a task; 0: that is no matter."""
        return seconds + self.placement.spare if known and self.ledger.ends else 0.0

    # -- a ready task --------------------------------------------------------------------------------------

    def stays(
        self, holder: Address, seconds: float, known: bool, priority: Any, largest: int, now: float
    ) -> bool:
        """Return whether a task stays with the one holder of all its inputs, whoever else there is.

        Parameters
        ----------
        seconds, known
            As `seconds` returned them.
        largest : int
            Bytes of its largest input.
        """
        row = self.ledger.rows.get(holder)
        if row is None or not row.accepts:
            return False
        starts_in, lasting = row.starts_in(now, priority), self.lasting(seconds, known)
        if lasting and row.ends_at < now + starts_in + lasting:
            return False
        return self.placement.settles(seconds, known, starts_in, self.ledger.first(now), largest)

    def candidates(
        self, task: TaskFacts, held: Mapping[Address, int], nbytes: int, priority: Any, now: float
    ) -> list[Worker]:
        """Return the workers to weigh for a ready task.

        Parameters
        ----------
        held : mapping of address to int
            Bytes of its inputs on each of their holders.
        nbytes : int
            Of all its inputs, where a device counts them.
        """
        if admitted := self._admitted(task, priority, now):
            return admitted
        ledger, count = self.ledger, self.placement.candidates
        lasting = self.lasting(task.seconds, task.known)
        found = self._soonest(count, priority, now, lasting, task.nbytes + task.headroom + nbytes)
        if lasting and not found:
            found = ledger.latest(now, count, priority)
        seen = {worker.address for worker in found}
        others = (address for address in _most(held) if address not in seen and address in ledger.rows)
        found += [ledger.worker(address, now, priority) for address in others]
        return [self.current(worker) for worker in found]

    def _admitted(self, task: TaskFacts, priority: Any, now: float) -> list[Worker]:
        """Return the workers that a restriction admits, where those are all that there is to weigh."""
        admitted = task.allowed if task.allowed is not None else task.preferred
        if not admitted or len(admitted) > _ADMITTED:
            return []
        rows = (a for a in sorted(admitted) if a in self.ledger.rows)
        found = [self.current(self.ledger.worker(address, now, priority)) for address in rows]
        return found if task.allowed is not None or any(w.accepts for w in found) else []

    def _soonest(self, count: int, priority: Any, now: float, lasting: float, need: int) -> list[Worker]:
        """Return the workers that run dry first; where bytes count, those that have room before those that have not."""
        ledger = self.ledger
        if not ledger.counts_bytes:
            return ledger.soonest(now, count, priority, lasting)
        found = ledger.soonest(now, count, priority, lasting, room=need)
        seen = {worker.address for worker in found}
        return found + [w for w in ledger.soonest(now, count, priority, lasting) if w.address not in seen]

    def choose(self, task: TaskFacts, workers: Iterable[Worker], fresh: float) -> Address | None:
        """Return the worker to give a ready task to; None: nobody may have it, or it waits.

        Parameters
        ----------
        fresh : float
            Seconds that a worker would have that joined for this task; 0: nobody would.
        """
        fresh = fresh if self.lasting(task.seconds, task.known) else 0.0
        weighed = [self._with_frees_soon(worker, task) for worker in workers]
        return self.placement.choose(task, weighed, self.links, self.ledger.hosts, fresh)

    def _with_frees_soon(self, worker: Worker, task: TaskFacts) -> Worker:
        """Return the row with `frees_soon`, where it matters: it takes a look at all that the worker holds."""
        if (
            worker.busy
            or not worker.accepts
            or task.waited < self.placement.patience
            or begins_now(task, worker)
        ):
            return worker
        return worker._replace(frees_soon=self.frees_soon(worker.address))

    def waits(self, seconds: float, known: bool, fresh: float) -> bool:
        """Return whether a task that was given to nobody waits for a fresh worker."""
        return bool(self.lasting(seconds, known)) and self.placement.waits(seconds, fresh)

    # -- one of many in a queue ----------------------------------------------------------------------------

    def helping(
        self, task: TaskFacts, free: Iterable[Address], queued: Mapping[str, float], now: float
    ) -> Address | None:
        """Return the worker that would be done first with a task, of those with room that help with the queue.

        Parameters
        ----------
        free : iterable of addresses
            Workers with a free slot.
        queued : mapping of device class to seconds
            As `queued_seconds` returns them.
        """
        ledger, first = self.ledger, self.ledger.soonest(now, 1)
        rows = [ledger.worker(address, now) for address in free if address in ledger.rows]
        for row in sorted(rows, key=lambda row: (row.starts_in + (task.on(row) or 0.0), row.address)):
            if self.placement.helps(task, row, queued, ledger.threads, first):
                return row.address
        return None

    def in_time(
        self, seconds: float, known: bool, free: Iterable[Address], fresh: float, now: float
    ) -> Iterable[Address]:
        """Return those of the workers that have the time for a task, or whom to take where none has."""
        lasting = self.lasting(seconds, known)
        if not lasting:
            return free
        rows = self.ledger.rows
        left = {a: row.ends_at - now - row.starts_in(now) for a in free if (row := rows.get(a)) is not None}
        if having := [address for address, seconds_left in left.items() if seconds_left >= lasting]:
            return having
        if not left or self.placement.waits(seconds, fresh):
            return ()
        # One that is busy now.
        if self.ledger.soonest(now, 1, lasting=lasting):
            return ()
        return (max(left, key=lambda address: (left[address], address)),)


def queued_seconds(some: Sequence[ByClass], count: int) -> dict[str, float]:
    """Return the projected seconds of so many tasks, of which some are known, on one thread of each class."""
    total: dict[str, float] = {}
    for one in some:
        for device, seconds in {one.device: one.seconds, **one.others}.items():
            total[device] = total.get(device, 0.0) + seconds * count / len(some)
    return total


def _most(held: Mapping[Address, int]) -> Iterable[Address]:
    """Return the holders of most bytes."""
    if len(held) <= HOLDERS:
        return held
    return sorted(held, key=lambda address: (-held[address], address))[:HOLDERS]
