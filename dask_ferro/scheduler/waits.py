"""Tasks that wait while a worker is idle, as the core finds some at each tick: why they wait, and who does not answer.

A worker whose event loop is blocked (a native call that keeps the GIL) would keep the tasks requested from it.  Its
waiting tasks are placed again where possible; a result that it sends later is ignored.

Durations are seconds, on the scheduler's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import cast
from uuid import uuid4

from dask.typing import Key
from distributed import Status
from distributed.metrics import time
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.policy.events import AcceptsTasks, MessagesSent, RequestWithdrawn
from dask_ferro.policy.facts import Worker
from dask_ferro.policy.waits import WaitingTask, by_reason, waits_of
from dask_ferro.policy.worker_load import PendingRequest
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.settings import Settings
from dask_ferro.scheduler.upstream_stealing import EntryPoints

# A step that is this late has unread answers; it waits this long for them to be read.
_LATE_STEP, _READ_DELAY = 0.005, 0.001
# Seconds without any message of a victim (its heartbeat comes every 0.5 s to 5 s) after which it counts as silent.
_SILENT = 3.0
# Seconds after which a request to a responsive victim counts as lost, as in a connection that was set up anew.
_REQUEST_TIMEOUT = 30.0
# A tick that is this late (a large graph, a changed clock, a machine that slept) finds unread answers and heartbeats:
# silence is counted from then on.
_STALL = 1.0
# One event for all iterations of the loop: there are thousands a second.
_MESSAGES_SENT = MessagesSent()


class Waits:
    """The tasks that wait at the workers of one scheduler although others are idle.

    Parameters
    ----------
    stealing : EntryPoints
        The scheduler's stealing extension, which owns these waits.
    settings : Settings
    take_step : callable (time)
        Takes the step of stealing that was due at that time, unless stealing was stopped.
    began : dict of str to float
        Numbers of tasks seen waiting, by their first reason; counted here.

    Attributes
    ----------
    now : list of WaitingTask
        Waits at the newest tick, the longest first; if there are thousands, some of them.
    elsewhere : callable (idle workers) -> iterable of WaitingTask
        Returns the waits at the scheduler.
    awake : float
        Since when ticks have been on time: silence before that may be the scheduler's own.
    listens : bool
        Whether the ledger will be told, in the next iteration of the loop, that messages have been sent.
    unserved : float or None
        Since when there have been ready tasks and no worker, as seen by the ticks; None: there is no such time.
    """

    def __init__(
        self,
        stealing: EntryPoints,
        settings: Settings,
        take_step: Callable[[float], None],
        began: dict[str, float],
    ) -> None:
        self._stealing, self._settings = stealing, settings
        self._tell, self._take_step = stealing.tell, take_step
        self.now: list[WaitingTask] = []
        self.began = began
        self.elsewhere: Callable[[list[Worker]], Iterable[WaitingTask]] = lambda idle: ()
        # The silent workers, with the time at which each was last heard of.
        self.silent: dict[str, float] = {}
        self._ticked = 0.0  # the time of the latest tick
        self.awake = 0.0
        self.unserved: float | None = None
        # Tasks reported as waiting that still wait.
        self._reported: set[Hashable] = set()
        self.listens = False

    # -- the clock -----------------------------------------------------------------------------------------

    def listen_soon(self) -> None:
        """Tell the ledger when the scheduler has sent its pending messages: in the next iteration of its loop."""
        if not self.listens:
            self.listens = True
            self._stealing.scheduler.loop.asyncio_loop.call_soon(self._listen)  # type: ignore[attr-defined]

    def _listen(self) -> None:
        self.listens = False
        self._tell(_MESSAGES_SENT)

    def step(self, due: float) -> None:
        """Take the step of stealing that was due at `due`; if the loop was busy since, after pending messages."""
        if self.silent:  # silent workers will not answer requests made since
            self._give_up_on_silent(self._ticked)
        if time() - due > _LATE_STEP:
            self._stealing.scheduler.loop.call_later(_READ_DELAY, self._take_step, due)
        else:
            self._take_step(due)

    # -- the tick ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Take back the tasks of silent workers, and report those that the core found overdue and did not move."""
        stealing, now = self._stealing, time()
        ledger = stealing.ledger
        if not 0 <= now - self._ticked <= self._settings.tick + _STALL:
            self.awake = now
        self._ticked = now
        self._hear_again()
        self._give_up_on_silent(now)
        scheduler = stealing.scheduler
        if scheduler.workers or not (scheduler.unrunnable or scheduler.queued):
            self.unserved = None
        elif self.unserved is None:
            self.unserved = now
        overdue = stealing.core.overdue
        idle = list(overdue.idle)
        waits = self._asked(idle, now)
        # Requested tasks are described as unmovable, like actors.
        waits += [
            wait
            for wait in waits_of(overdue, now, stealing.core.links, ledger.hosts)
            if wait.key not in ledger.requests
        ]
        waits += self.elsewhere(idle) if idle else ()
        self._count(waits)
        self.now = sorted(waits, key=lambda wait: -wait.seconds)

    def _count(self, waits: list[WaitingTask]) -> None:
        """Count the tasks not reported before; of many, each tick reports others."""
        entries, unrunnable = self._stealing.ledger.entries, self._stealing.scheduler.unrunnable
        tasks = self._stealing.scheduler.tasks
        self._reported = {
            key
            for key in self._reported
            if ((entry := entries.get(key)) is not None and entry.state != "running")
            or tasks.get(cast(Key, key)) in unrunnable
        }
        new = {wait.key: wait.reason for wait in waits if wait.key not in self._reported}
        for reason in new.values():
            self.began[reason] += 1
        self._reported.update(new)

    def _asked(self, idle: list[Worker], now: float) -> list[WaitingTask]:
        """Return the tasks whose request a worker has not answered for long."""
        patience = self._settings.parameters.patience
        some = tuple(worker.address for worker in idle[:3])
        waits = []
        for key, request in self._stealing.ledger.requests.items() if idle else ():
            if now - request.at > patience:
                reason, victim = (
                    "worker_unresponsive" if request.withdrawn else "steal_pending",
                    request.entry.worker.address,
                )
                waits.append(WaitingTask(key, victim, now - request.at, len(idle), some, reason))
        return waits

    def is_open(self, ws: WorkerState) -> bool:
        """Return whether a worker may be assigned tasks: it accepts them, and answers."""
        return ws.status == Status.running and ws.address not in self.silent

    # -- who does not answer -------------------------------------------------------------------------------

    def _hear_again(self) -> None:
        """Reopen the workers that were heard of again, and try the tasks that wait at the scheduler."""
        workers, before = self._stealing.scheduler.workers, self.silent
        self.silent = {a: at for a, at in before.items() if a in workers and workers[a].last_seen <= at}
        if len(self.silent) < len(before):
            self._stealing.after_freeing()

    def _give_up_on_silent(self, now: float) -> None:
        workers, requests = self._stealing.scheduler.workers, self._stealing.ledger.requests
        for key, request in list(requests.items()):
            victim = workers.get(request.entry.worker.address)
            # Taking one task back may end the requests for others.
            if victim is None or requests.get(key) is not request:
                continue
            asked = now - max(request.at, self.awake)
            is_silent = asked > _SILENT and victim.last_seen < request.at
            if is_silent and victim.address not in self.silent:
                self._close(victim)
            if is_silent or asked > _REQUEST_TIMEOUT or victim.address in self.silent:
                self._give_up(request, victim)

    def _close(self, ws: WorkerState) -> None:
        """Assign nothing more to a worker until it is heard of again."""
        self.silent[ws.address] = ws.last_seen
        if ws.address in self._stealing.ledger.rows:
            self._tell(AcceptsTasks(ws.address, False))

    def _give_up(self, request: PendingRequest, victim: WorkerState) -> None:
        """Place a task again that its worker does not give up; if its input is only there, free its thief instead."""
        scheduler, key = self._stealing.scheduler, cast(Key, request.entry.key)
        if all(self._is_held_beside(dts, victim) for dts in scheduler.tasks[key].dependencies):
            upstream.take_back(scheduler, key, victim.address, f"ferro-silent-{uuid4().hex[:8]}")
        elif not request.withdrawn:
            self._tell(RequestWithdrawn(key))

    @staticmethod
    def _is_held_beside(dts: TaskState, victim: object) -> bool:
        return any(ws is not victim for ws in dts.who_has or ())

    def counts(self) -> dict[str, int]:
        """Return the number of waiting tasks by reason, at the newest tick."""
        return by_reason(self.now)
