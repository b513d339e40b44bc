"""Tasks that wait while some worker has nothing to do: found at each slow tick, moved if they may, told if not.

Stealing's steps are quick because they look at little; what they do not see is found here, a few tasks at a tick.  So
is a worker that does not answer: one whose event loop is held up (a native call that keeps the GIL) would keep what it
was asked for.  What waits there without need is placed anew; a result that the worker sends later counts for nothing.

Durations are seconds, on the scheduler's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import cast
from uuid import uuid4

from dask.typing import Key
from distributed import Status
from distributed.metrics import time
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.policy.events import AcceptsTasks, MessagesSent, Sweep, Withdrawn
from dask_ferro.policy.facts import Worker
from dask_ferro.policy.waits import Wait, by_reason, waits_of
from dask_ferro.runtime import upstream
from dask_ferro.runtime.plugin.settings import Settings
from dask_ferro.runtime.upstream_stealing import EntryPoints, StealRequest

# A step that comes so late finds answers that nobody has read; it lets them be read first.
_LATE, _AFTER = 0.005, 0.001
# A victim that was not heard of, not even by its heartbeat (one in 0.5 s to 5 s), since it was asked so long ago.
_SILENT = 3.0
# One that is heard of, and does not answer: the message was lost in a connection that was set up anew.
_LOST = 30.0
# A tick that comes so much later than it should (a graph that took long to read, a clock that was set, a machine that
# slept) finds answers and heartbeats that nobody has read: silence is counted from then on.
_STALL = 1.0


class Waits:
    """What waits at the workers of one scheduler although others are idle.

    Parameters
    ----------
    stealing : EntryPoints
        The scheduler's stealing extension, which owns these waits.
    settings : Settings
    take_step : callable (time)
        Takes the step of stealing that was due then, unless stealing was stopped.

    Attributes
    ----------
    now : list of Wait
        As of the newest tick, the longest first; of thousands, some.
    began : Counter of str
        Tasks of which such a wait was seen, by its first reason.
    elsewhere : callable (idle workers) -> iterable of Wait
        What waits at the scheduler.
    """

    def __init__(self, stealing: EntryPoints, settings: Settings, take_step: Callable[[float], None]) -> None:
        self._stealing, self._settings = stealing, settings
        self._tell, self._take_step = stealing.tell, take_step
        self.now: list[Wait] = []
        self.began: Counter[str] = Counter()
        self.elsewhere: Callable[[list[Worker]], Iterable[Wait]] = lambda idle: ()
        # Workers that do not answer: when they were heard of last.
        self.silent: dict[str, float] = {}
        # When it ticked last, and since when it does so in time.
        self._ticked, self._awake = 0.0, 0.0
        # Tasks of which it was said that they wait, and that still do; and by key, requests of which nothing was heard.
        self._told: set[Hashable] = set()
        self._listens = False
        self._withdrawn: dict[Key, str] = {}

    # -- the clock -----------------------------------------------------------------------------------------

    def listen_soon(self) -> None:
        """Tell the ledger when the scheduler has sent what it has to send: in the next turn of its loop."""
        if not self._listens:
            self._listens = True
            self._stealing.scheduler.loop.asyncio_loop.call_soon(self._listen)  # type: ignore[attr-defined]

    def _listen(self) -> None:
        self._listens = False
        self._tell(MessagesSent())

    def step(self, due: float) -> None:
        """Take the step of stealing that was due then; if the loop was busy since, after what came meanwhile."""
        if self.silent:  # what was asked of those since, nobody will answer
            self._give_up_on_silent(self._ticked)
        if time() - due > _LATE:
            self._stealing.scheduler.loop.call_later(_AFTER, self._take_step, due)
        else:
            self._take_step(due)

    # -- the tick ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at what is overdue: move what may move, place anew what nobody answers for, note the rest."""
        stealing, now = self._stealing, time()
        ledger = stealing.ledger
        # A stolen task is sent without a transition, which would have asked for this.
        if ledger.starting:
            self.listen_soon()
        if not 0 <= now - self._ticked <= self._settings.tick + _STALL:
            self._awake = now
        self._ticked = now
        self._hear_again()
        self._give_up_on_silent(now)
        scheduler = stealing.scheduler
        self._tell(Sweep(bool(stealing.asked or scheduler.unrunnable or scheduler.queued)))
        found = stealing.core.found
        idle = found.idle
        told = self._asked(idle, now)
        # What was asked for is shown as what may not move, as actors are.
        known = {ts.key for ts in stealing.asked}
        told += [wait for wait in waits_of(found) if wait.key not in known]
        told += self.elsewhere(idle) if idle else ()
        self._count(told)
        self.now = sorted(told, key=lambda wait: -wait.seconds)

    def _count(self, told: list[Wait]) -> None:
        """Count the tasks that nothing was told of before: of many, each tick shows others."""
        entries, unrunnable = self._stealing.ledger.entries, self._stealing.scheduler.unrunnable
        tasks = self._stealing.scheduler.tasks
        self._told = {
            key
            for key in self._told
            if ((entry := entries.get(key)) is not None and entry.started is None)
            or tasks.get(cast(Key, key)) in unrunnable
        }
        new = {wait.key: wait.reason for wait in told if wait.key not in self._told}
        self.began.update(new.values())
        self._told.update(new)

    def _asked(self, idle: list[Worker], now: float) -> list[Wait]:
        """Return what a worker was asked for, and has not answered for long."""
        patience = self._settings.parameters.patience
        some = tuple(worker.address for worker in idle[:3])
        waits = []
        for ts, info in self._stealing.asked.items() if idle else ():
            entry = self._stealing.ledger.entries.get(ts.key)
            if entry is not None and now - entry.requested > patience:
                reason = "silent" if ts.key in self._withdrawn else "asked"
                address = info["victim"].address
                waits.append(Wait(ts.key, address, now - entry.requested, len(idle), some, reason))
        return waits

    def is_open(self, ws: WorkerState) -> bool:
        """Whether a worker may be given tasks: it accepts them, and answers."""
        return ws.status == Status.running and ws.address not in self.silent

    # -- who does not answer -------------------------------------------------------------------------------

    def _hear_again(self) -> None:
        """Open the workers that were heard of again, and let what waits at the scheduler know."""
        workers, before = self._stealing.scheduler.workers, self.silent
        self.silent = {a: at for a, at in before.items() if a in workers and workers[a].last_seen <= at}
        if len(self.silent) < len(before):
            self._stealing.after_freeing()

    def _give_up_on_silent(self, now: float) -> None:
        requests = self._stealing.asked
        if self._withdrawn:
            here = {info["stimulus_id"] for info in requests.values()}
            self._withdrawn = {key: told for key, told in self._withdrawn.items() if told in here}
        for ts, info in list(requests.items()):
            entry = self._stealing.ledger.entries.get(ts.key)
            if entry is None:
                continue
            asked, victim = now - max(entry.requested, self._awake), info["victim"]
            is_silent = asked > _SILENT and victim.last_seen < entry.requested
            if is_silent and victim.address not in self.silent:
                self._close(victim)
            if is_silent or asked > _LOST or victim.address in self.silent:
                self._give_up(ts, info)

    def _close(self, ws: WorkerState) -> None:
        """Give a worker nothing more until it is heard of again."""
        self.silent[ws.address] = ws.last_seen
        if ws.address in self._stealing.ledger.rows:
            self._tell(AcceptsTasks(ws.address, False))

    def _give_up(self, ts: TaskState, info: StealRequest) -> None:
        """Place a task anew that its worker does not give up, or let its thief do something else meanwhile."""
        scheduler, victim = self._stealing.scheduler, info["victim"]
        if all(self._is_held_beside(dts, victim) for dts in ts.dependencies):
            upstream.take_back(scheduler, ts.key, victim.address, f"ferro-silent-{uuid4().hex[:8]}")
        elif ts.key not in self._withdrawn:
            self._withdrawn[ts.key] = info["stimulus_id"]
            self._tell(Withdrawn(ts.key))

    @staticmethod
    def _is_held_beside(dts: TaskState, victim: object) -> bool:
        return any(ws is not victim for ws in dts.who_has or ())

    def counts(self) -> dict[str, int]:
        """Return how many tasks wait by reason, as of the newest tick."""
        return by_reason(self.now)
