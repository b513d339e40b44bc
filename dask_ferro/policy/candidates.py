"""The selection of the workers that are weighed for a task: the few that can be the best one, from the ledger.

For a ready task, these are the holders of its inputs and the workers on which it would start first; where it is
restricted, all that the restriction admits.  For a batch of similar queued tasks, they are the workers with a free
slot; where devices differ, a slow worker only if the fast ones would not finish all of them earlier.  Where workers
have a known end, a task of known seconds goes where it finishes in time.  The plugin and the simulator share this
selection; they supply the facts of tasks and handle those that remain unassigned.

Durations are seconds, sizes bytes, `now` is the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dask_ferro.policy.estimates import Estimate, Links
from dask_ferro.policy.facts import Address, TaskFacts, Worker, kind_of
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.placement import Placement, PlacementParameters, Wait

# Holders of inputs that are weighed; a block that every worker holds is no reason to consider all of them.
HOLDERS = 8
# The most admitted workers weighed: facts of one take 2 us, so 0.1 ms of the scheduler's time for each task.
_MAX_ADMITTED = 64


class ByClass(NamedTuple):
    """The projected seconds of an unassigned task on the first device class, and on the others where known."""

    device: str
    seconds: float
    known: bool
    others: Mapping[str, float]


@dataclass
class Candidates:
    """The selection of candidates for a scheduler's tasks.

    Parameters
    ----------
    ledger : Ledger
    links : Links
    placement : PlacementParameters
        Chooses among the candidates.
    is_open : callable (address) -> bool
        Whether a worker accepts tasks at this moment: while one is being removed, the ledger still has it.
    """

    ledger: Ledger
    links: Links
    placement: PlacementParameters
    is_open: Callable[[Address], bool]

    # -- what a task takes ---------------------------------------------------------------------------------

    @property
    def are_alike(self) -> bool:
        """Whether all workers are of one class without byte accounting, so that a sample of them suffices."""
        return len(self.ledger.devices) < 2 and not self.ledger.counts_bytes

    @property
    def first_device(self) -> str:
        """The device class that unassigned tasks are described by."""
        return min(self.ledger.devices, default="cpu")

    def seconds(self, prefix: str, annotated: float | Estimate | None) -> tuple[float, bool]:
        """Return the projected seconds on the first device class, and whether they are more than a guess."""
        return self.ledger.durations.of(prefix, self.first_device, annotated)

    def seconds_by_class(self, prefix: str, annotated: float | Estimate | None) -> ByClass:
        """Return the projected seconds on all device classes of the cluster."""
        durations, first = self.ledger.durations, self.first_device
        others = durations.known(prefix, self.ledger.devices, first, annotated)
        return ByClass(first, *durations.of(prefix, first, annotated), others)

    def lasting(self, seconds: float, known: bool) -> float:
        """Return the seconds that a worker must have left for a task; 0: no requirement."""
        return seconds + self.placement.spare if known and self.ledger.ends else 0.0

    # -- a ready task --------------------------------------------------------------------------------------

    def stays(
        self, holder: Address, seconds: float, known: bool, priority: Any, largest: int, now: float
    ) -> bool:
        """Return whether a task stays with the only holder of all its inputs without weighing other workers.

        Parameters
        ----------
        seconds, known
            As returned by `seconds`.
        largest : int
            Bytes of its largest input.
        """
        row = self.ledger.rows.get(holder)
        if row is None or not self.is_open(holder):
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
            Bytes of all its inputs, where devices count them.
        """
        if admitted := self._admitted(task, priority, now):
            return admitted
        ledger, count = self.ledger, self.placement.candidates
        lasting = self.lasting(task.seconds, task.known)
        need = task.nbytes + task.headroom + nbytes
        found = self._soonest(count, priority, now, lasting, need)
        if lasting and not found:
            found = self._soonest(count, priority, now, 0.0, need)
        seen = {worker.address for worker in found}
        others = (address for address in _rank(held) if address not in seen and address in ledger.rows)
        found += [ledger.worker(address, now, priority) for address in others]
        return list(map(self._current, found))

    def _current(self, worker: Worker) -> Worker:
        accepts = self.is_open(worker.address)
        return worker if worker.accepts == accepts else worker._replace(accepts=accepts)

    def _admitted(self, task: TaskFacts, priority: Any, now: float) -> list[Worker]:
        """Return the workers that a restriction admits, if only those are to be weighed; else an empty list."""
        admitted = task.allowed if task.allowed is not None else task.preferred
        if not admitted or len(admitted) > _MAX_ADMITTED:
            return []
        rows = (a for a in sorted(admitted) if a in self.ledger.rows)
        found = [self._current(self.ledger.worker(address, now, priority)) for address in rows]
        return found if task.allowed is not None or any(w.accepts for w in found) else []

    def _soonest(self, count: int, priority: Any, now: float, lasting: float, need: int) -> list[Worker]:
        """Return the workers that run dry first; where bytes are counted, those with room come first."""
        ledger = self.ledger
        if not ledger.counts_bytes:
            return ledger.soonest(now, count, priority, lasting)
        found = ledger.soonest(now, count, priority, lasting, room=need)
        seen = {worker.address for worker in found}
        return found + [w for w in ledger.soonest(now, count, priority, lasting) if w.address not in seen]

    def choose(self, task: TaskFacts, workers: Iterable[Worker], fresh: float) -> Placement:
        """Return the worker to assign a ready task to, or what it waits for.

        Parameters
        ----------
        fresh : float
            Seconds that a worker started for this task would have; 0: none would be started.
        """
        if task.must and task.must not in map(kind_of, self.ledger.devices):
            return Wait("wrong_device")
        fresh = fresh if self.lasting(task.seconds, task.known) else 0.0
        return self.placement.choose(task, workers, self.links, self.ledger.hosts, fresh)

    # -- one of many in a queue ----------------------------------------------------------------------------

    def helping(self, task: TaskFacts, free: Iterable[Address], queued: int, now: float) -> Address | None:
        """Return the worker that would finish a task first, among those with room whose help pays.

        Parameters
        ----------
        free : iterable of addresses
            Workers with a free slot.
        queued : int
            Tasks in the queue.
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
        """Return the workers with enough time for a task, else all of them; none if it should wait."""
        lasting = self.lasting(seconds, known)
        if not lasting:
            return free
        rows = self.ledger.rows
        here = [address for address in free if address in rows]
        if having := [a for a in here if rows[a].ends_at >= now + rows[a].starts_in(now) + lasting]:
            return having
        # A task also waits for a worker that is busy now and has the time.
        waits = self.placement.waits(seconds, fresh) or self.ledger.soonest(now, 1, lasting=lasting)
        return () if waits else here

    def ahead(self, address: Address, took: tuple[float, bool], nbytes: int | None, now: float) -> int:
        """Return how many more queued tasks a worker is sent that was just given one: as many as its threads may have.

        Parameters
        ----------
        took : tuple of float and bool
            As returned by `seconds` for the first of them.
        nbytes : int or None
            Bytes of a result; None: not known.
        """
        row, (seconds, known) = self.ledger.rows.get(address), took
        if row is None or not (self.are_alike and self.is_open(address)):
            return 0
        each = self.placement.tasks_ahead(seconds, known, nbytes)
        if row.ends_at < now + row.starts_in(now) + self.lasting(each * seconds, known):
            return 0
        return max(each * row.nthreads - len(row.running) - len(row.queue) - row.incoming, 0)


def _rank(held: Mapping[Address, int]) -> Iterable[Address]:
    """Return the holders of the most bytes."""
    if len(held) <= HOLDERS:
        return held
    return sorted(held, key=lambda address: (-held[address], address))[:HOLDERS]
