"""The public names of Dask's `WorkStealing` that anybody may call, kept to the plugin's promises.

Dask's own code, its dashboard, and scripts hold on to these names.  Each either does what Dask documents, with the
ledger kept right, or refuses by a `ConfigError`; none may leave a task without a worker.  What is inherited unchanged
reads only what stays true here: `log`, `story`, `steal_time_ratio`, `stealing_objective`, the counts of what is in
flight.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from distributed.metrics import time
from distributed.scheduler import TaskState, WorkerState
from distributed.stealing import WorkStealing

from dask_ferro.errors import ConfigError
from dask_ferro.policy.events import Event, Ordered
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.snapshot import Move
from dask_ferro.runtime.shown import Shown

# Dask's own levels of transfer over duration.
_LEVELS = 15


class EntryPoints(WorkStealing):
    """The entry points; what they stand on is `stealing.Stealing`'s."""

    ledger: Ledger
    shown: Shown

    @abstractmethod
    def tell(self, event: Event) -> None:
        """Tell the core of an event, and do what it decides."""

    @abstractmethod
    def _assigned(self, ts: TaskState) -> None:
        """Note that a task was given to a worker."""

    def move_task_request(self, ts: TaskState, victim: WorkerState, thief: WorkerState) -> str:
        """Ask a task back from its worker for another one.

        Whether that is worth it, or goes against the task's restrictions, the caller answers for, as with Dask.

        Returns
        -------
        str
            The request's stimulus; "in-flight": it was asked back already; "comm-closed": its worker is going.

        Raises
        ------
        ConfigError
            The task is not with that worker, has left its thread there, or could never run at the thief.
        """
        if ts in self.in_flight:
            return "in-flight"
        if (trouble := self._trouble(ts, victim, thief)) is not None:
            raise ConfigError(
                f"move_task_request: {ts.key!r} from {victim.address} to {thief.address}: {trouble}"
            )
        now, entry = time(), self.ledger.entries[ts.key]
        cost = float(self.scheduler.get_comm_cost(ts, thief))
        rows = self.ledger.rows
        gain = rows[victim.address].starts_in(now) - rows[thief.address].starts_in(now) - cost
        self.tell(Ordered(Move(ts.key, victim.address, thief.address, gain, cost, entry.nbytes)))
        return self.in_flight[ts]["stimulus_id"] if ts in self.in_flight else "comm-closed"

    def _trouble(self, ts: TaskState, victim: WorkerState, thief: WorkerState) -> str | None:
        """Return why a task cannot be moved, or None."""
        if ts.processing_on is not victim:
            where = "no worker" if ts.processing_on is None else ts.processing_on.address
            return (
                f"it is {ts.state}, with {where}; wanted one that is processing at the worker it is asked of"
            )
        if thief is victim or self.scheduler.workers.get(thief.address) is not thief:
            return "wanted another worker of this cluster as the thief"
        if ts.key not in self.ledger.entries:
            return "it has left its thread (it seceded) and runs to its end"
        lacks = {
            name: amount
            for name, amount in (ts.resource_restrictions or {}).items()
            if thief.resources.get(name, 0) < amount
        }
        return f"it needs {lacks}, which the thief does not have, and would wait for ever" if lacks else None

    # -- what may be stolen, as Dask lists it ----------------------------------------------------------------

    @property
    def key_stealable(self) -> dict[TaskState, tuple[str, int]]:
        """The waiting tasks that may move, with their worker and Dask's level; made when it is asked for."""
        found: dict[TaskState, tuple[str, int]] = {}
        for row in self.ledger.rows.values():
            for _, _, entry in row.queue:
                ts = self.shown.task(entry.key)
                if ts is not None and self.shown.waiting(entry, row) is not None:
                    found[ts] = (row.address, self.steal_time_ratio(ts)[1] or 0)
        return found

    @key_stealable.setter
    def key_stealable(self, value: Any) -> None:
        """Dask's own constructor begins with an empty one; the ledger holds it here."""

    @property
    def stealable(self) -> dict[str, tuple[set[TaskState], ...]]:
        """The same by worker and level."""
        found: dict[str, tuple[set[TaskState], ...]] = {
            address: tuple(set() for _ in range(_LEVELS)) for address in self.ledger.rows
        }
        for ts, (address, level) in self.key_stealable.items():
            found[address][level].add(ts)
        return found

    @stealable.setter
    def stealable(self, value: Any) -> None:
        """As with `key_stealable`."""

    def put_key_in_stealable(self, ts: TaskState) -> None:
        """Take a task into the book that was taken out of it; one that is in it stays."""
        worker = ts.processing_on
        if worker is not None and ts.key not in self.ledger.entries and ts not in worker.long_running:
            self._assigned(ts)

    def recalculate_cost(self, ts: TaskState) -> None:
        """Do nothing: the ledger projects waiting tasks anew with every duration that it learns."""
