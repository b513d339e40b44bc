"""The scheduler's stealing extension: observes transitions, asks the policy, sends what it decided.

It takes the place of Dask's own and keeps its protocol (`upstream_stealing`).  What it decides is in `policy`; what
it knows is a `Ledger`.

A step is taken when something happened that may call for one: a worker has less than its threshold to do, or there
is new work while one starves.  Events within a millisecond or so share a step; a slow tick looks at everybody.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from distributed import Scheduler, Status
from distributed.metrics import time
from distributed.scheduler import TaskState, WorkerState
from tornado.ioloop import PeriodicCallback

from dask_ferro.policy.cost import Links
from dask_ferro.policy.ledger import VICTIMS, Ledger
from dask_ferro.policy.row import Entry, Row
from dask_ferro.policy.snapshot import Move, Outcome, Task
from dask_ferro.policy.steal import State, named, threshold_of, without
from dask_ferro.runtime import upstream
from dask_ferro.runtime.affinity import estimate_of
from dask_ferro.runtime.devices import Devices
from dask_ferro.runtime.sends import Sends
from dask_ferro.runtime.settings import Settings
from dask_ferro.runtime.shown import Shown, unbound, unlocks
from dask_ferro.runtime.telemetry import Telemetry
from dask_ferro.runtime.upstream_stealing import EntryPoints
from dask_ferro.runtime.waits import Waits
from dask_ferro.runtime.watch import Watch, level_of
from dask_ferro.runtime.worker import METRIC, sent

logger = logging.getLogger(__name__)

# Workers that one step looks at as thieves.
_THIEVES = 32
# Changes of thresholds that are kept, and outcomes that no step has read: after `stop` none does.  100 kB each.
_HISTORY = 1000
# States whose end gives a worker bytes back.
_HELD = ("memory", "processing")


class Stealing(EntryPoints):
    """Work stealing by a policy of `dask_ferro.policy.steal`.

    Parameters
    ----------
    scheduler : Scheduler
    settings : Settings

    Attributes
    ----------
    ledger : Ledger
        What every worker is believed to be doing.
    links : Links
        What moving bytes costs.
    state : State
        The policy's.
    thresholds : deque of (time, address, seconds)
        How the workers' thresholds changed, the newest last.
    counts : mapping of str to float
        "requests", "confirmed", "refused", "stale"; "seconds moving", projected, of the confirmed ones; "seconds
        worked": measured, by workers in tasks that they stole.  No thread works at two at a time, so this is time
        that was filled; seconds by which tasks finish earlier are no such thing, for many wait at once.
    watch : Watch
        What is kept for the dashboard's pages.
    devices : Devices
        What is known of the workers' devices.
    shown : Shown
        What a policy is shown of a task.
    after_tick : callable ()
        Called after each slow tick.
    after_freeing : callable ()
        Called when a device may have room again.
    """

    name = "ferro-stealing"

    def __init__(self, scheduler: Scheduler, settings: Settings) -> None:
        self.settings = settings
        self.links = Links()
        self.devices = Devices(scheduler, self.links)
        self.shown = Shown(scheduler, self.devices)
        self.ledger = Ledger(
            self._shown, unlocks=unlocks, live=self.devices.live, holds=self.shown.holds, unbound=unbound
        )
        self.ledger.listens = True
        for prefix in upstream.prefixes(scheduler):
            if prefix.duration_average > 0:  # what Dask has seen before us
                self.ledger.durations.add(prefix.name, "cpu", prefix.duration_average)
        self.policy = named(settings.stealing, self.links, self.ledger.hosts, settings.parameters)
        self.state: State = self.policy.init()
        self.counts: dict[str, float] = defaultdict(float)
        self.telemetry = Telemetry(settings.recorded_tasks)
        self.watch = Watch()
        self.thresholds: deque[tuple[float, str, float]] = deque(maxlen=_HISTORY)
        self.waits = Waits(self, self._ask, self._enact, self._called)
        self.after_tick: Callable[[], None] = lambda: None
        self.after_freeing: Callable[[], None] = lambda: None
        self._outcomes: deque[Outcome] = deque(maxlen=_HISTORY)
        # By key: victim, requested, whether the thief is dry.
        self._arriving: dict[Any, tuple[str, float, bool]] = {}
        self._hungry: dict[str, None] = {}
        self._skip = 0
        self._kick: Any = None
        self._kick_at = 0.0
        self._beats: dict[str, int] = {}
        self._sends = Sends(scheduler, settings.scheduler_sends)
        self._refused = False
        super().__init__(scheduler)
        for worker in scheduler.workers.values():
            for task in sorted(worker.processing, key=lambda ts: ts.priority or ()):
                if task not in worker.long_running:
                    self._assigned(task)

    # -- from start to stop --------------------------------------------------------------------------------

    async def start(self, scheduler: Any = None) -> None:
        """Take steps when something happens, and start the slow tick.  Idempotent; also after `stop`."""
        self._refused = False
        if "stealing" not in self.scheduler.periodic_callbacks:
            ticks = PeriodicCallback(self._tick, self.settings.tick * 1000)
            self.scheduler.periodic_callbacks["stealing"] = ticks
            ticks.start()
            self._settle_asked()
            self._hungry.update(dict.fromkeys(self.ledger.rows))
            self._ask()

    async def stop(self) -> None:
        """Take no more steps; return when no request is on its way.  Idempotent."""
        self._refused = True
        self._unkick()
        await upstream.quiet(self, self.scheduler)

    def teardown(self) -> None:
        """Take no more steps: the scheduler is going."""
        self._refused = True
        self._unkick()
        super().teardown()

    # -- what happens --------------------------------------------------------------------------------------

    def add_worker(self, scheduler: Any = None, worker: Any = None) -> None:
        """Open the worker's page; it is a thief until it has something to do."""
        ws = self.scheduler.workers[worker]
        self.ledger.add_worker(
            worker, ws.nthreads, ws.host, accepts=ws.status == Status.running, resources=ws.resources
        )
        self.telemetry.joined(worker, ws.nthreads)
        self._sends.set(self.ledger.rows[worker])
        self._heard(ws)
        self._hungry[worker] = None
        self._ask()

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        """Close the worker's page.  Its tasks have been taken back by now."""
        self.ledger.remove_worker(worker)
        self.devices.left(worker)
        self.telemetry.left(worker)
        self._hungry.pop(worker, None)
        self._beats.pop(worker, None)
        self._sends.left(worker)
        self._outcomes = deque((o for o in self._outcomes if o.thief != worker), _HISTORY)
        self.state = without(self.state, worker)
        self._settle_asked()

    def log_event(self, topic: str, msg: Any) -> None:
        """Notice workers that pause, run again or are about to leave: Dask has no other hook for it."""
        if isinstance(msg, dict) and msg.get("action") == "worker-status-change":
            row, ws = self.ledger.rows.get(topic), self.scheduler.workers.get(topic)
            if row is not None and ws is not None:
                self.ledger.set_accepts(topic, ws.status == Status.running)
                if row.accepts:
                    self._hungry[topic] = None
                self._ask()

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Keep the book."""
        try:
            if start == "processing":
                self._left(key, finish, kwargs)
            if finish == "processing":
                self._assigned(self.scheduler.tasks[key])
            if self.ledger.counts_bytes and start in _HELD:
                self.after_freeing()
            if self.ledger.starting:
                self.waits.listen_soon()
        except Exception:  # Dask would swallow it
            logger.exception("dask_ferro lost track of %r (%s to %s)", key, start, finish)
            raise

    def _seceded(self, ts: TaskState) -> None:
        entry = self.ledger.entries.get(ts.key)
        if entry is not None and entry.thief is None:
            self.ledger.finish(time(), ts.key)
            self._look_at(entry.worker)

    def restart(self, scheduler: Any) -> None:
        """Forget tasks; what things cost stays known."""
        for key in list(self.ledger.entries):
            self.ledger.finish(time(), key)
        self._arriving.clear()

    def _assigned(self, ts: TaskState) -> None:
        ws = ts.processing_on
        if ws is None or ws.address not in self.ledger.rows:
            return
        told, nbytes = estimate_of(ts.annotations), self.devices.takes(ts, self.ledger)
        entry = self.ledger.assign(
            time(),
            ts.key,
            ws.address,
            ts.prefix.name,
            ts.priority,
            ts,
            told,
            ts.resource_restrictions,
            nbytes,
        )
        self._sends.set(entry.worker)
        if entry.started is None and self._hungry:
            self._ask()

    def _left(self, key: Any, finish: str, message: dict[str, Any]) -> None:
        ts = self.scheduler.tasks[key]
        info = self._forget_asked(ts)
        if info is not None:  # it was done before the victim was asked
            self.counts["stale"] += 1
            self.watch.moved(time(), key, info, "stale")
            self._came_of("stale", info["victim"].address, info["thief"].address)
        seconds = None
        if finish == "memory":
            spans = message.get("startstops") or ()
            for span in reversed(spans):  # a worker that ran the task before sends that run too
                if span["action"] == "compute":
                    seconds = span["stop"] - span["start"]
                    break
            self.devices.done(ts, message.get("nbytes") or 0, self.ledger)
            if self._arriving:
                self._arrived(ts, seconds or 0.0)
            if self.telemetry.is_on:
                thread = message.get("thread")
                self.telemetry.finished(ts, message["worker"], spans, message.get("nbytes"), thread)
        elif self._arriving:
            self._arriving.pop(key, None)
        entry = self.ledger.finish(time(), key, seconds)
        if entry is not None:
            self._sends.set(entry.worker)
            self._look_at(entry.worker)
        if info is not None and (thief := self.ledger.rows.get(info["thief"].address)) is not None:
            self._look_at(thief)

    def _arrived(self, ts: TaskState, seconds: float) -> None:
        """Note when a stolen task had started: its end, seen here, less its duration; no clock but this one."""
        arrived = self._arriving.pop(ts.key, None)
        entry = self.ledger.entries.get(ts.key)
        if arrived is not None and entry is not None:
            victim, requested, dry = arrived
            thief = entry.worker.address
            now = time()
            # By the worker's clock, but no more than passed here.
            worked = min(seconds, max(now - requested, 0.0))
            self.counts["seconds worked"] += worked
            self.watch.worked(now, worked)
            delay = max(now - seconds - requested, 0.0)
            self._came_of("started", victim, thief, delay, dry)
            self.telemetry.stolen(ts.key, victim, thief, requested, requested + delay, ts.prefix.name)

    def _came_of(self, kind: str, victim: str, thief: str, seconds: float = 0.0, dry: bool = False) -> None:
        """Tell the policy what came of a move, unless the thief has left: it would be given a threshold again."""
        if thief in self.ledger.rows:
            self._outcomes.append(Outcome(kind, victim, thief, seconds, dry))

    # -- when to take a step -------------------------------------------------------------------------------

    def _look_at(self, row: Row) -> None:
        """Ask for a step when a worker has, or soon will have, less than its threshold to do."""
        if not row.may_take or row.address not in self.ledger.rows:
            return
        self._hungry[row.address] = None
        if self.waits.is_worth_it():
            self._ask(max(self._left_over(row.address, time()), 0.0))

    def _ask(self, wait: float = 0.0) -> None:
        if self._refused:
            return
        due = time() + max(wait, self.settings.coalesce)
        if self._kick is not None:
            if self._kick_at <= due:
                return
            self._unkick()
        self._kick_at = due
        self._kick = self.scheduler.loop.call_at(
            self.scheduler.loop.time() + due - time(), self.waits.step, due
        )

    def _called(self) -> None:
        if not self._refused:
            self._step()

    def _unkick(self) -> None:
        if self._kick is not None:
            self.scheduler.loop.remove_timeout(self._kick)
            self._kick = None

    def _tick(self) -> None:
        """Look at everybody, whatever the events said."""
        self._hear_all()
        self._step()
        self.waits.tick()
        threshold = partial(threshold_of, self.state, parameters=self.settings.parameters)
        self.watch.sampled(time(), self.scheduler, self.ledger, threshold)
        self.after_tick()

    def _hear_all(self) -> None:
        for address, row in self.ledger.rows.items():
            ws = self.scheduler.workers.get(address)  # None: it is being removed
            accepts = ws is not None and self.waits.is_open(ws)
            if row.accepts != accepts:
                self.ledger.set_accepts(address, accepts)
            if row.may_take:
                self._hungry[address] = None
            if ws is not None:
                self._heard(ws)

    def _heard(self, ws: WorkerState) -> None:
        """Learn from a worker's heartbeat: its device, and what its transfers took."""
        told = upstream.metrics_of(ws).get(METRIC)
        if ws.executing:
            self.ledger.hear(time(), ws.address, ws.last_seen, {ts.key for ts in ws.executing})
        if not told and ws.address not in self._beats:
            self._beats[ws.address] = 0
            self.devices.guess(ws, self.ledger)
        if not told or self._beats.get(ws.address) == told["beat"]:
            return
        self._beats[ws.address] = told["beat"]
        self.devices.heard(ws, told, self.ledger)
        for sender, sample in sent(told, self.ledger.hosts):
            self.devices.received(sender, ws.address, sample)

    # -- the step ------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._unkick()
        rows = self.ledger.rows
        idle = [a for a in self._hungry if (row := rows.get(a)) is not None and row.may_take]
        self._hungry = dict.fromkeys(idle)
        if not self._outcomes and (not idle or not self.waits.is_worth_it()):
            return
        now = time()
        hungry = [a for a in idle if self._left_over(a, now) <= 0]
        thieves = hungry[:_THIEVES]
        self.shown.begin(thieves, ((ts, info["thief"].address) for ts, info in self.asked.items()))
        snapshot = self.ledger.snapshot(now, thieves, self._outcomes, skip=self._skip)
        self._outcomes.clear()
        before = self.state.thresholds
        moves, self.state = self.policy.step(snapshot, self.state)
        if self.state.thresholds is not before:
            changed = ((a, t) for a, t in self.state.thresholds.items() if before.get(a) != t)
            self.thresholds.extend((now, address, threshold) for address, threshold in changed)
        self._enact(moves, now)
        # Others have their turn next time: at the thieves' end, and where nothing may move at the victims' as well.
        seen = dict.fromkeys(thieves)
        self._hungry = {**{a: None for a in idle if a not in seen}, **seen}
        self._skip = 0 if moves or not hungry else self._skip + VICTIMS
        if len(hungry) > _THIEVES and moves:
            self._ask()
        else:
            left_over = {address: self._left_over(address, now) for address in idle}
            self.waits.look_again(left_over, self._skip // VICTIMS)

    def _enact(self, moves: tuple[Move, ...], now: float) -> set[Any]:
        """Request moves; return the keys of those that were."""
        requests = [record for move in moves if (record := self._request(move, now)) is not None]
        if requests:
            self._log_requests(requests)
        return {record[2] for record in requests}

    def _left_over(self, address: str, now: float) -> float:
        """Return the seconds until a worker falls under its threshold; what is asked of it already counts."""
        threshold = threshold_of(self.state, address, self.settings.parameters)
        return self.ledger.rows[address].starts_in(now) - threshold

    def _shown(self, ts: TaskState, entry: Entry, row: Row) -> Task | None:
        return None if ts in self.asked else self.shown.waiting(ts, entry, self.ledger)

    def _request(self, move: Move, now: float) -> tuple[Any, ...] | None:
        scheduler = self.scheduler
        ts = scheduler.tasks.get(cast(Any, move.key))
        victim, thief = scheduler.workers.get(move.victim), scheduler.workers.get(move.thief)
        entry = self.ledger.entries.get(move.key)
        if ts is None or victim is None or thief is None or entry is None or ts.processing_on is not victim:
            return None
        if not self.shown.has_resources(ts, thief):
            return None
        row = self.ledger.rows[move.victim]
        before, after = row.starts_in(now), self.ledger.rows[move.thief].starts_in(now)
        self.ledger.request(now, move.key, move.thief, max(move.nbytes - entry.nbytes, 0))
        self.shown.sends(ts, move.thief)
        if not self._ask_for(
            ts, victim, thief, move, entry.seconds
        ):  # Dask will take the victim's tasks back
            self.ledger.refuse(now, move.key)
            return None
        level = level_of(move.cost, entry.seconds)
        self.counts["requests"] += 1
        return (now, level, move.key, entry.seconds + move.cost, move.victim, before, move.thief, after)

    # -- the answer ----------------------------------------------------------------------------------------

    def _answered(self, ts: TaskState, info: Mapping[str, Any], outcome: str) -> None:
        if outcome == "refused":
            self._kept(ts.key, info["victim"], info["thief"])
        elif outcome == "confirmed":
            self._given(ts, info)
        else:
            self.counts["stale"] += 1
            self._came_of("stale", info["victim"].address, info["thief"].address)
        self.watch.moved(time(), ts.key, info, outcome)

    def _kept(self, key: Any, victim: WorkerState, thief: WorkerState) -> None:
        self.counts["refused"] += 1
        self._came_of("refused", victim.address, thief.address)
        entry = self.ledger.entries.get(key)
        if entry is not None and entry.thief is not None:
            if entry.payload in victim.long_running:  # it seceded meanwhile: it has no thread
                self.ledger.finish(time(), key)
            else:
                self.ledger.refuse(time(), key)
        if thief.address in self.ledger.rows:
            self._look_at(self.ledger.rows[thief.address])

    def _given(self, ts: TaskState, info: Mapping[str, Any]) -> None:
        victim, thief = info["victim"], info["thief"]
        self.counts["confirmed"] += 1
        self.counts["seconds moving"] += info["cost"]
        entry = self.ledger.entries[ts.key]
        if entry.thief is None:  # nothing was heard of it for long
            self.ledger.request(time(), ts.key, thief.address)
        row = self.ledger.rows[thief.address]
        self._arriving[ts.key] = (victim.address, entry.requested, len(row.running) < row.nthreads)
        upstream.hand_over(self.scheduler, ts, victim, thief)
        self.ledger.confirm(time(), ts.key)
