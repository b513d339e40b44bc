"""Dask's `WorkStealing` with our decisions: its protocol, and the methods that any code may call.

A request goes to the victim, the victim answers with the task's state, and only then the task goes to the thief.
Dask's own code, its dashboard, and scripts use these names.  Each either does what Dask documents, with the ledger
kept consistent; none may leave a task without a worker.  Inherited methods read only state
that is valid here: `log`, `story`, `steal_time_ratio`, `stealing_objective`, the counts of pending requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import log2
from typing import cast
from uuid import uuid4

from dask.typing import Key as DaskKey
from distributed import Scheduler, Status
from distributed.comm.core import CommClosedError
from distributed.metrics import time
from distributed.scheduler import TaskState, WorkerState
from distributed.stealing import WorkStealing

from dask_ferro.policy.events import Answer, Ask, Event, MoveOrdered, PlaceAgain, Settlement, TaskFinished
from dask_ferro.policy.facts import Key, Move
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.scheduling_core import SchedulingCore
from dask_ferro.scheduler.upstream import CONFIRMS, REJECTS

# Dask's dashboard colours requests by the ratio of their transfer to their duration: 15 levels.
_LEVELS = 15
# The words of Dask's own log for an outcome.
_WORDS: Mapping[Settlement, str] = {
    "confirmed": "confirm",
    "refused": "already-computing",
    "stale": "reschedule",
}


class EntryPoints(WorkStealing):
    """The methods that Dask calls; `stealing.Stealing` implements what they need.

    Attributes
    ----------
    after_freeing : callable ()
        Called when a device or a worker may have room again.
    """

    core: SchedulingCore
    ledger: Ledger
    after_freeing: Callable[[], None]

    def __init__(self, scheduler: Scheduler) -> None:
        # Part of all stimuli: answers to requests of a previous extension are ignored.
        self._token = uuid4().hex[:8]
        # The stimulus of the answer being processed, so that the task's story shows why it is placed again.
        self._answering = f"ferro-stale-{self._token}"
        super().__init__(scheduler)
        self.in_flight = self.ledger.requests  # type: ignore[assignment]  # by key

    @abstractmethod
    def tell(self, event: Event) -> None:
        """Let the core handle an event, and carry out its instructions."""

    @abstractmethod
    def _answered(self, ts: TaskState, answer: Answer) -> Settlement:
        """Process a victim's answer (as in `policy.events.Answered`), and return the outcome of the request."""

    # -- requests and answers --------------------------------------------------------------------------------

    def _stimulus(self, key: Key) -> str:
        return f"ferro-steal-{self._token}-{self.ledger.requests[key].number}"

    def _ask_for(self, told: Ask, now: float) -> tuple[object, ...] | None:
        """Send the victim a request and return its line for the log; None: the victim's connection is closed."""
        message = {"op": "steal-request", "key": told.key, "stimulus_id": self._stimulus(told.key)}
        with suppress(CommClosedError):
            self.scheduler.stream_comms[told.victim].send(message)
            cost, level = told.seconds + told.cost, level_of(told.cost, told.seconds)
            self.metrics["request_count_total"][level] += 1
            self.metrics["request_cost_total"][level] += cost
            return (now, level, told.key, cost, told.victim, told.before, told.thief, told.after)
        return None

    def _place_anew(self, told: PlaceAgain, now: float) -> None:
        """Let the scheduler place a task again whose victim has answered."""
        self.scheduler._reschedule(cast(DaskKey, told.key), stimulus_id=self._answering)

    def _log_requests(self, lines: list[tuple[object, ...]]) -> None:
        self.log(("request", lines))
        self.count += 1

    def move_task_confirm(
        self, *, key: DaskKey, state: str, stimulus_id: str, worker: str | None = None
    ) -> None:
        """Process a victim's answer: the task goes to the thief, stays, or is placed again."""
        ts, request = self.scheduler.tasks.get(key), self.ledger.requests.get(key)
        if ts is None or request is None or stimulus_id != self._stimulus(key):
            what = "already-aborted" if request is None else "stale-response"
            self.log((what, key, state, worker, stimulus_id))
            return
        victim, thief = request.entry.worker, request.thief
        # The fields that Dask's dashboard and `story` read in its log, in their order.
        addresses = (key, state, victim.address, thief.address, stimulus_id)
        here = [self.scheduler.workers.get(row.address) for row in (thief, victim)]
        to = here[0] if self.ledger.rows.get(thief.address) is thief else None
        is_there = to is not None and to.status == Status.running
        self._answering = stimulus_id
        answer: Answer
        if state in REJECTS:
            answer = "kept" if here[1] is None or ts not in here[1].long_running else "seceded"
        else:
            is_given = state in CONFIRMS and is_there and ts.processing_on is here[1]
            answer = "given" if is_given else "gone"
        outcome = self._answered(ts, answer)
        reason = (not is_there,) if outcome == "stale" else ()
        self.log((_WORDS[outcome], *reason, *addresses))
        # Dask puts root-like tasks on workers that it knows as idle, and it does not check that when we move a task.
        for ws in filter(None, here):
            self.scheduler.check_idle_saturated(ws)

    # -- what anybody may call -------------------------------------------------------------------------------

    def move_task_request(self, ts: TaskState, victim: WorkerState, thief: WorkerState) -> str:
        """Request a task from its worker for another one.

        As in Dask, the caller is responsible for its worth, and for the task's restrictions.

        Returns
        -------
        str
            The request's stimulus; "in-flight": it was requested already; "comm-closed": it cannot be moved, or its
            worker is closing.
        """
        requests = self.ledger.requests
        if ts.key in requests:
            return "in-flight"
        if (entry := self.ledger.entries.get(ts.key)) is not None:
            now, rows = time(), self.ledger.rows
            cost = float(self.scheduler.get_comm_cost(ts, thief))
            gain = rows[victim.address].starts_in(now) - rows[thief.address].starts_in(now) - cost
            self.tell(MoveOrdered(Move(ts.key, victim.address, thief.address, gain, cost, entry.nbytes)))
        return self._stimulus(ts.key) if ts.key in requests else "comm-closed"

    def remove_key_from_stealable(self, ts: TaskState) -> None:
        """Remove a task that left its thread (it seceded) from the ledger."""
        if ts.key not in self.ledger.requests:
            self.tell(TaskFinished(ts.key))


def level_of(cost: float, seconds: float) -> int:
    """Return the level under which Dask's pages show a request: 0 without a transfer, else by its share."""
    if cost <= 0 or seconds <= 0:
        return 0
    return min(max(round(log2(cost / seconds) + 6), 1), _LEVELS - 1)
