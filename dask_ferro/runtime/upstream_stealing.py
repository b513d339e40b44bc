"""Dask's `WorkStealing` with our decisions in it: its protocol, and its names that anybody may call.

A request goes to the victim, the victim answers in which state the task was, and only then is it the thief's.
Dask's own code, its dashboard, and scripts hold on to these names.  Each either does what Dask documents, with the
ledger kept right, or refuses by a `ConfigError`; none may leave a task without a worker.  What is inherited unchanged
reads only what stays true here: `log`, `story`, `steal_time_ratio`, `stealing_objective`, the counts of what is in
flight.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from math import log2
from typing import TypedDict, cast
from uuid import uuid4

from dask.typing import Key as DaskKey
from distributed import Scheduler, Status
from distributed.comm.core import CommClosedError
from distributed.metrics import time
from distributed.scheduler import TaskState, WorkerState
from distributed.stealing import WorkStealing

from dask_ferro.errors import ConfigError
from dask_ferro.policy.events import Answer, Ask, Event, Ordered, PlaceAgain, Settlement
from dask_ferro.policy.facts import Move
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.scheduling_core import SchedulingCore
from dask_ferro.policy.stealing.snapshot import Facts
from dask_ferro.runtime.upstream import CONFIRMS, REJECTS

# Dask's dashboard colours requests by the ratio of their transfer to their duration: 15 levels.
_LEVELS = 15
# What Dask's own log calls an outcome.
_WORDS: Mapping[Settlement, str] = {
    "confirmed": "confirm",
    "refused": "already-computing",
    "stale": "reschedule",
}


class StealRequest(TypedDict):
    """A request that is not answered, as Dask's own code reads it."""

    victim: WorkerState
    thief: WorkerState
    victim_duration: float
    thief_duration: float
    stimulus_id: str


class EntryPoints(WorkStealing):
    """The entry points; what they stand on is `stealing.Stealing`'s.

    Attributes
    ----------
    after_freeing : callable ()
        Called when a device, or a worker, may have room again.
    """

    core: SchedulingCore
    ledger: Ledger
    shown: Facts
    after_freeing: Callable[[], None]

    def __init__(self, scheduler: Scheduler) -> None:
        # In all stimuli: answers to requests of an extension that was here before are none of ours.
        self._token = uuid4().hex[:8]
        # The stimulus of the answer that is being taken: what is placed anew by it is found in the task's story.
        self._answering = f"ferro-stale-{self._token}"
        super().__init__(scheduler)

    @abstractmethod
    def tell(self, event: Event) -> None:
        """Tell the core of an event, and do what it decides."""

    @abstractmethod
    def _assigned(self, ts: TaskState) -> None:
        """Note that a task was given to a worker."""

    @abstractmethod
    def _seceded(self, ts: TaskState) -> None:
        """Note that a task left its thread."""

    @abstractmethod
    def _answered(self, ts: TaskState, answer: Answer) -> Settlement:
        """Take a victim's answer (as `policy.events.Answered` has it), and return what came of the request."""

    # -- requests and answers --------------------------------------------------------------------------------

    @property
    def asked(self) -> Mapping[TaskState, StealRequest]:
        """The requests that are not answered, by task."""
        return self.in_flight

    def _ask_for(self, told: Ask, now: float) -> tuple[object, ...] | None:
        """Send the victim a request, and return its line of the log; None: the victim has no connection any more."""
        workers, cost = self.scheduler.workers, told.seconds + told.cost
        ts = self.scheduler.tasks[cast(DaskKey, told.key)]
        stimulus_id = f"ferro-steal-{self._token}-{self._request_counter}"
        self._request_counter += 1
        info: StealRequest = {
            "victim": workers[told.victim],
            "thief": workers[told.thief],
            "victim_duration": told.seconds,
            "thief_duration": cost,
            "stimulus_id": stimulus_id,
        }
        self._add_to_in_flight(ts, info)
        try:
            message = {"op": "steal-request", "key": told.key, "stimulus_id": stimulus_id}
            self.scheduler.stream_comms[told.victim].send(message)
        except CommClosedError:
            self._remove_from_in_flight(ts)
            return None
        level = level_of(told.cost, told.seconds)
        self.metrics["request_count_total"][level] += 1
        self.metrics["request_cost_total"][level] += cost
        return (now, level, told.key, cost, told.victim, told.before, told.thief, told.after)

    def _place_anew(self, told: PlaceAgain, now: float) -> None:
        """Let the scheduler place a task anew, whose victim has answered."""
        self.scheduler._reschedule(cast(DaskKey, told.key), stimulus_id=self._answering)

    def _forget_asked(self, ts: TaskState) -> None:
        """Forget the request for a task, if there is one."""
        if self.in_flight:
            self._remove_from_in_flight(ts)

    def _settle_asked(self) -> None:
        """Let `stop` return at once, and count from nothing, where no request is on its way."""
        if not self.in_flight:
            self.in_flight_tasks.clear()
            self._in_flight_event.set()

    def _log_requests(self, lines: list[tuple[object, ...]]) -> None:
        self.log(("request", lines))
        self.count += 1

    def move_task_confirm(
        self, *, key: DaskKey, state: str, stimulus_id: str, worker: str | None = None
    ) -> None:
        """Take a victim's answer: the task is the thief's, or stays, or has to be placed again."""
        ts = self.scheduler.tasks.get(key)
        info = self.asked.get(ts) if ts is not None else None
        if ts is None or info is None or info["stimulus_id"] != stimulus_id:
            what = "already-aborted" if info is None else "stale-response"
            self.log((what, key, state, worker, stimulus_id))
            return
        self._remove_from_in_flight(ts)
        thief, victim = info["thief"], info["victim"]
        # The fields, and their order, that Dask's dashboard and `story` read of its own log.
        addresses = (key, state, victim.address, thief.address, stimulus_id)
        is_there = self.scheduler.workers.get(thief.address) is thief and thief.status == Status.running
        self._answering = stimulus_id
        answer: Answer
        if state in REJECTS:
            answer = "seceded" if ts in victim.long_running else "kept"
        else:
            is_given = state in CONFIRMS and is_there and ts.processing_on is victim
            answer = "given" if is_given else "gone"
        outcome = self._answered(ts, answer)
        reason = (not is_there,) if outcome == "stale" else ()
        self.log((_WORDS[outcome], *reason, *addresses))
        # Dask puts roots on workers that it knows as idle, and it does not look when we move a task.
        self.scheduler.check_idle_saturated(thief)
        self.scheduler.check_idle_saturated(victim)

    # -- what anybody may call -------------------------------------------------------------------------------

    @abstractmethod
    def _look_at_all(self) -> None:
        """Take a step that looks at every worker."""

    def balance(self) -> None:
        """Look at every worker, and request the moves that the policy decides; also after `stop`."""
        self._look_at_all()

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
                ts = self.scheduler.tasks.get(cast(DaskKey, entry.key))
                if ts is not None and self.shown.waiting(entry, row) is not None:
                    found[ts] = (row.address, self.steal_time_ratio(ts)[1] or 0)
        return found

    @key_stealable.setter
    def key_stealable(self, value: object) -> None:
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
    def stealable(self, value: object) -> None:
        """As with `key_stealable`."""

    def put_key_in_stealable(self, ts: TaskState) -> None:
        """Take a task into the book that was taken out of it; one that is in it stays."""
        worker = ts.processing_on
        if worker is not None and ts.key not in self.ledger.entries and ts not in worker.long_running:
            self._assigned(ts)

    def remove_key_from_stealable(self, ts: TaskState) -> None:
        """Take a task that left its thread (it seceded) out of the book."""
        self._seceded(ts)

    def recalculate_cost(self, ts: TaskState) -> None:
        """Do nothing: the ledger projects waiting tasks anew with every duration that it learns."""


def level_of(cost: float, seconds: float) -> int:
    """Return the level under which Dask's pages show a request: 0 without a transfer, else by its share."""
    if cost <= 0 or seconds <= 0:
        return 0
    return min(max(round(log2(cost / seconds) + 6), 1), _LEVELS - 1)
