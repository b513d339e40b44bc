"""The scheduler's stealing extension, which turns a Dask scheduler's hooks into events, and instructions into messages.

It replaces Dask's own and keeps its protocol (`upstream_stealing`).  Decisions are made by `policy.scheduling_core`,
with the facts of tasks from `dask_facts`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, cast

from dask.typing import Key
from distributed import Scheduler, Status
from distributed.metrics import time
from distributed.scheduler import TaskState, WorkerState
from tornado.ioloop import PeriodicCallback

from dask_ferro.policy import events
from dask_ferro.policy.estimates import SENDS, Links
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.scheduling_core import SchedulingCore
from dask_ferro.policy.stealing.policies import make_policy
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.annotations import estimate_of
from dask_ferro.scheduler.dask_facts import DaskTaskFacts
from dask_ferro.scheduler.decision_log import DecisionLog
from dask_ferro.scheduler.device_memory import Devices
from dask_ferro.scheduler.log import Log, Sample
from dask_ferro.scheduler.recorder import task_run
from dask_ferro.scheduler.settings import Settings
from dask_ferro.scheduler.upstream_stealing import EntryPoints
from dask_ferro.scheduler.waits import Waits
from dask_ferro.scheduler.worker_plugin import METRIC, Heartbeat, transfers_of

logger = logging.getLogger(__name__)

# The least seconds between two samples of the load; the slow tick comes twice a second.
_SAMPLE_INTERVAL = 0.9
# Linux: nanoseconds on a core, nanoseconds of waiting for one, and the number of time slices.
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Stealing(EntryPoints):
    """Work stealing by a policy of `dask_ferro.policy.stealing.informed`.

    Parameters
    ----------
    scheduler : Scheduler
    settings : Settings

    Attributes
    ----------
    core : SchedulingCore
        Makes the decisions.
    ledger : Ledger
        The core's projected state of every worker.
    links : Links
        Costs of transfers.
    counts : dict of str to float
        The core's counts.
    records : Log
        What happened, for whoever reads it.
    devices : Devices
        Facts of the workers' devices.
    shown : Shown
        The facts of tasks for a policy.
    decision_log : DecisionLog or None
        The recording of `ferro.scheduler.record`.
    after_tick : callable ()
        Called after each slow tick.
    """

    name = "ferro-stealing"
    # The timer of the next step; and whether steps are refused, from `stop` to `start`.
    _kick: object = None
    _refused = False

    def __init__(self, scheduler: Scheduler, settings: Settings) -> None:
        self.settings = settings
        self.links = Links()
        self.devices = Devices(scheduler, self.tell)
        self.shown: DaskTaskFacts = DaskTaskFacts(scheduler, self.devices)
        policy = make_policy(settings.stealing, settings.parameters)
        self.core = SchedulingCore(
            self.shown, policy, self.links, coalesce=settings.coalesce, tick=settings.tick
        )
        self.decision_log = None if settings.record is None else DecisionLog(settings.record)
        if self.decision_log is not None:
            self.core.on_decision = self.decision_log.put
        self.ledger: Ledger = self.core.ledger
        self.shown.ledger = self.devices.ledger = self.ledger
        self.counts = self.core.counts
        self.records = Log(self.counts)
        self.waits = Waits(self, settings, self._called, self.records.counts["wait"])
        self.after_tick: Callable[[], None] = lambda: None
        self.after_freeing: Callable[[], None] = lambda: None
        self._load = LoopLoad()
        self._beats: dict[str, Heartbeat | None] = {}
        # The heartbeats that workers sent under an earlier installation, whose transfers are not counted again.
        reports = ((a, upstream.metrics_of(ws).get(METRIC)) for a, ws in scheduler.workers.items())
        self._earlier: dict[str, Heartbeat] = {address: beat for address, beat in reports if beat}
        self._acts: dict[type, Callable[..., None]] = {
            events.Ask: self._request,
            events.HandOver: self._hand_over,
            events.PlaceAgain: self._place_anew,
            events.Wake: self._wake,
            events.Hurry: self._hurry,
            events.RequestSettled: lambda settled, now: self.records.moves.append(settled),
            events.StealCompleted: lambda arrived, now: self.records.stolen.append(arrived),
        }
        self._lines: list[tuple[object, ...]] = []  # lines for Dask's log, of the requests being sent
        self._learn(scheduler)
        super().__init__(scheduler)
        # Where Dask's constructor adds it; what happens is passed on by `FerroScheduler`.
        del scheduler.plugins[self.name]
        self._take_over(scheduler)

    def _learn(self, scheduler: Scheduler) -> None:
        """Learn the durations that Dask has measured so far."""
        for prefix in scheduler.task_prefixes.values():
            if prefix.duration_average > 0:
                self.tell(events.DurationLearned(prefix.name, "cpu", prefix.duration_average))

    def _take_over(self, scheduler: Scheduler) -> None:
        """Enter the tasks already assigned to workers into the ledger."""
        for worker in scheduler.workers.values():
            for task in sorted(worker.processing, key=lambda ts: ts.priority or ()):
                if task not in worker.long_running:
                    self.task_assigned(task)

    # -- from start to stop --------------------------------------------------------------------------------

    async def start(self, scheduler: object = None) -> None:
        """Start reacting to events, and start the slow tick.  Idempotent; also after `stop`."""
        self._refused = False
        if "stealing" not in self.scheduler.periodic_callbacks:
            ticks = PeriodicCallback(self._tick, self.settings.tick * 1000)
            self.scheduler.periodic_callbacks["stealing"] = ticks
            ticks.start()
            self._load = LoopLoad()
            self.tell(events.StealingSwitched(True))

    async def stop(self) -> None:
        """Take no more steps; return when no request is pending.  Idempotent."""
        self._switch_off()
        await upstream.quiesce(self, self.scheduler)

    def teardown(self) -> None:
        """Take no more steps, as the scheduler is closing."""
        self._switch_off()
        super().teardown()

    def _switch_off(self) -> None:
        self._refused = True
        self._unkick()
        self.tell(events.StealingSwitched(False))

    # -- what happens --------------------------------------------------------------------------------------

    def tell(self, event: events.Event) -> None:
        """Let the core handle an event, and carry out its instructions."""
        now = time()
        if decided := self.core.handle(event, now):
            self._enact(decided, now)
        if self.ledger.starting and not self.waits.listens:
            self.waits.listen_soon()

    def add_worker(self, scheduler: object = None, worker: str = "") -> None:
        """Add the worker to the ledger, as a thief until it has something to do."""
        ws = self.scheduler.workers[worker]
        accepts, resources = ws.status == Status.running, dict(ws.resources)
        self.tell(events.WorkerJoined(worker, ws.nthreads, ws.host, accepts=accepts, resources=resources))
        self._heard(ws)

    def remove_worker(self, scheduler: object, worker: str, **kwargs: object) -> None:
        """Remove the worker from the ledger.  Its tasks have been taken back by now."""
        self.tell(events.WorkerLeft(worker))
        self.devices.left(worker)
        self._beats.pop(worker, None)

    def worker_changed(self, ws: WorkerState) -> None:
        """Notice that a worker pauses, resumes or is about to retire."""
        self.tell(events.AcceptsTasks(ws.address, ws.status == Status.running))

    def task_changed(self, ts: TaskState, start: str, finish: str) -> None:
        """Notice that bytes of a device are freed."""
        if start == "memory" and self.ledger.counts_bytes:
            self.after_freeing()

    def restart(self, scheduler: object) -> None:
        """Forget tasks; learned costs are kept."""
        self.tell(events.SchedulerRestarted())

    def task_assigned(self, ts: TaskState) -> None:
        """Enter a task into the ledger."""
        ws = ts.processing_on
        if ws is None:
            return
        annotated = estimate_of(ts.annotations) if ts.annotations else None
        nbytes = self.devices.takes(ts) if self.ledger.counts_bytes else 0
        needs = ts.resource_restrictions
        self.tell(
            events.TaskAssigned(ts.key, ws.address, ts.prefix.name, ts.priority, annotated, needs, nbytes)
        )

    def task_left(
        self, ts: TaskState, finish: str, seconds: float | None, message: Mapping[str, Any]
    ) -> None:
        """Remove a task from the ledger, and learn from one that is done."""
        is_done = finish == "memory"
        if is_done:
            self.devices.sizes.add(ts.prefix.name, message.get("nbytes") or 0)
            if self.records.tasks.length:
                ws = self.scheduler.workers.get(message["worker"])
                if run := task_run(ts, message, ws.nthreads if ws is not None else 1):
                    self.records.tasks.append(run)
        self.tell(events.TaskFinished(ts.key, is_done, seconds))
        if self.ledger.counts_bytes:
            self.after_freeing()

    # -- when to take a step -------------------------------------------------------------------------------

    def _wake(self, wake: events.Wake, now: float) -> None:
        self._unkick()
        self._kick = self.scheduler.loop.call_at(
            self.scheduler.loop.time() + wake.at - time(), self.waits.step, wake.at
        )

    def _called(self, due: float) -> None:
        if not self._refused:
            self.tell(events.WakeDue(due))

    def _unkick(self) -> None:
        if self._kick is not None:
            self.scheduler.loop.remove_timeout(self._kick)
            self._kick = None

    def balance(self) -> None:
        """Consider every worker, and request the moves that the policy decides; also after `stop`."""
        for address, row in list(self.ledger.rows.items()):
            ws = self.scheduler.workers.get(address)  # None: the worker is being removed
            accepts = ws is not None and self.waits.is_open(ws)
            if row.accepts != accepts:
                self.tell(events.AcceptsTasks(address, accepts))
            if ws is not None:
                self._heard(ws)
        waits = self.scheduler.unrunnable or self.scheduler.queued or self.ledger.requests
        self.tell(events.Tick(elsewhere=bool(waits)))

    def _tick(self) -> None:
        """Consider every worker, whatever the events were."""
        share = self._load.share()
        if share is not None:
            self.tell(events.LoopMeasured(share))
        self.balance()
        self.waits.tick()
        self._sample()
        self.after_tick()

    def _sample(self) -> None:
        """Record the load, about once a second."""
        now, newest, ledger = time(), self.records.loads.newest, self.ledger
        if newest is not None and 0 <= now - newest.time < _SAMPLE_INTERVAL:
            return
        s, waiting = self.scheduler, ledger.waiting
        running = len(ledger.entries) - waiting
        load = Sample(now, len(s.workers), s.total_nthreads, running, waiting, len(s.queued))
        self.records.loads.append(load)

    def _heard(self, ws: WorkerState) -> None:
        """Learn from a worker's heartbeat: its device, and the durations of its transfers."""
        beat = upstream.metrics_of(ws).get(METRIC)
        if ws.executing:
            self.tell(
                events.WorkerReported(ws.address, ws.last_seen, frozenset(ts.key for ts in ws.executing))
            )
        # A worker may change its resources at any time, for which Dask has no hook.
        if ws.resources != self.ledger.rows[ws.address].resources:
            self.tell(events.ResourcesReported(ws.address, dict(ws.resources)))
        if not beat and ws.address not in self._beats:
            self._beats[ws.address] = None
            self.devices.guess(ws)
        before = self._beats.get(ws.address)
        if not beat or (before is not None and before["beat"] == beat["beat"]):
            return
        self._beats[ws.address] = beat
        self.records.received(beat, before or self._earlier.pop(ws.address, None))
        self.devices.heard(ws, beat)
        for sample in transfers_of(beat, self.ledger.hosts):
            self.tell(events.TransferLearned(*sample))

    # -- what is decided -----------------------------------------------------------------------------------

    def _enact(self, decided: list[events.Instruction], now: float) -> None:
        failed: Exception | None = None
        for instruction in decided:
            try:
                self._acts[type(instruction)](instruction, now)
            # The core assumes that all of them are carried out, so the others still are, and the first error is
            # raised.
            except Exception as error:
                logger.exception("dask_ferro could not do %r", instruction)
                failed = failed or error
        if self._lines:
            lines, self._lines = self._lines, []
            self._log_requests(lines)
        if failed is not None:
            raise failed

    def _hurry(self, hurry: events.Hurry, now: float) -> None:
        upstream.put_sends(self.scheduler, [hurry.worker], SENDS if hurry.soon else upstream.WORKER_SENDS)

    def _request(self, ask: events.Ask, now: float) -> None:
        line = self._ask_for(ask, now)
        # The victim is leaving; Dask will take its tasks back.
        if line is None:
            self.tell(events.RequestUnsent(ask.key))
        else:
            self._lines.append(line)

    def _hand_over(self, move: events.HandOver, now: float) -> None:
        ts, workers = self.scheduler.tasks[cast(Key, move.key)], self.scheduler.workers
        upstream.hand_over(self.scheduler, ts, workers[move.victim], workers[move.thief])

    # -- the answer ----------------------------------------------------------------------------------------

    def _answered(self, ts: TaskState, answer: events.Answer) -> events.Settlement:
        now = time()
        decided = self.core.handle(events.StealAnswered(ts.key, answer), now)
        self._enact(decided, now)
        settled = (i.outcome for i in decided if isinstance(i, events.RequestSettled))
        return next(settled, "stale")  # a restart made the core forget the request


class LoopLoad:
    """The load of an event loop: the share of time in which its thread ran, or was ready to run without a core.

    Linux reports how long a thread waited for a core; elsewhere only running time counts.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def share(self) -> float | None:
        """Return the busy share of the time since the last call, 0.0 to 1.0; None on the first call."""
        now, busy = perf_counter(), thread_time() + _core_wait()
        last, self._last = self._last, (now, busy)
        if last is None or now <= last[0]:
            return None
        return min(max((busy - last[1]) / (now - last[0]), 0.0), 1.0)


def _core_wait() -> float:
    """Return the seconds in which this thread was ready to run without a core; 0.0 if they are not counted."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these counters
        return 0.0


def stealing_of(scheduler: Scheduler) -> Stealing | None:
    """Return a scheduler's stealing extension, or None if it is not ours."""
    stealing = scheduler.extensions.get("stealing")
    return stealing if isinstance(stealing, Stealing) else None
