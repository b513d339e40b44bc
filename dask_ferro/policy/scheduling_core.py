"""The scheduling decisions without I/O: `handle(event, now)` returns the instructions that follow from an event.

The plugin feeds it the events of a Dask scheduler, the simulator those of a virtual one; both carry out the
instructions unchanged.  It has no clock, sends nothing and knows tasks only by key: the facts of a waiting task are
asked of `Facts` while an event is handled, for the few tasks under consideration.  Storing those facts here for
every task would cost the scheduler more than stealing does.

- A step runs when an event may call for one: a worker's backlog is under its threshold, or work arrives while one
  starves.  Events within `coalesce` share a step; a tick considers every worker.
- Steps run only while a queue is long enough for one of its tasks to be moved, or has stalled for long enough.
- A step shows the policy a few of the thieves and the longest queues.  The next step shows other thieves and, where
  nothing could be moved, other victims.
- A tick's step also sees some overdue tasks of all queues, other ones at each tick.
- Messages to a worker with little to do are sent soon; for one with plenty, or while the scheduler's loop is
  saturated, they are sent in batches, which are cheaper.

Durations are seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_ferro.policy import events
from dask_ferro.policy.estimates import SENDS, Links
from dask_ferro.policy.events import Event, Instruction
from dask_ferro.policy.facts import Address, Move, Outcome, Worker
from dask_ferro.policy.ledger import TASKS, VICTIMS, Ledger
from dask_ferro.policy.placement import PlacementParameters
from dask_ferro.policy.stealing.decision import StealingDecision
from dask_ferro.policy.stealing.informed import (
    Policy,
    StealingParameters,
    StealingState,
    adapt,
    forget_worker,
    threshold_of,
)
from dask_ferro.policy.stealing.policies import for_overdue
from dask_ferro.policy.stealing.snapshot import Facts
from dask_ferro.policy.waits import OverdueTasks, look
from dask_ferro.policy.worker_load import Entry, PendingRequest, StealRecord, WorkerLoad

# Seconds within which events share a step, and seconds between ticks, at which every worker is examined.
COALESCE, TICK = 0.001, 0.5
# Thieves considered by one step, which sees the ends of ten queues.
THIEVES = 32
# The most unread outcomes kept: no step reads them while stealing is off.  100 kB.
HISTORY = 1000
# Idle workers considered at one tick: the facts of one take 2 us.
MAX_IDLE = 256
_NO_TASKS = OverdueTasks()
# The least seconds from an event to its step: a step takes as long.
_MIN_STEP = 1e-4
# A saturated loop counts as such until its load is below this share of the bound, as each change sends every worker a
# message.
RELEASE_FACTOR = 0.9
_COUNTS = ("requests", *events.OUTCOMES, "seconds_moving", "seconds_worked")


@dataclass(frozen=True)
class SchedulingSettings:
    """What all decisions of a scheduler follow, in the plugin and in the simulator.

    Attributes
    ----------
    parameters : StealingParameters
    placement : PlacementParameters
    rank : bool
        Whether narrow graphs are ordered by upward rank.
    coalesce, tick : float
        Seconds within which events share a step, and between ticks.
    scheduler_sends, worker_sends : float
        Seconds between two batches of messages to a worker with little work, and from a worker.
    """

    parameters: StealingParameters = field(default_factory=StealingParameters)
    placement: PlacementParameters = field(default_factory=PlacementParameters)
    rank: bool = True
    coalesce: float = COALESCE
    tick: float = TICK
    scheduler_sends: float = SENDS
    worker_sends: float = SENDS


class SchedulingCore:
    """The scheduling decisions of one scheduler.

    Parameters
    ----------
    facts : Facts
    policy : Policy
    links : Links, optional
        Costs of transfers; share one object with the caller that updates it.
    coalesce, tick : float
        Seconds within which events share a step, and between ticks.

    Attributes
    ----------
    ledger : Ledger
        The projected state of every worker.
    state : StealingState
        The state of the stealing policy.
    counts : mapping of str to float
        "requests", "confirmed", "refused", "stale"; "seconds_moving", the projected costs of confirmed moves;
        "seconds_worked", the durations of stolen tasks.  A thread works on one task at a time, so the latter is time
        that was filled; gains cannot be added up, since many tasks wait at the same time.
    steps, ticks : int
        Number of policy steps and of ticks.
    overdue : OverdueTasks
        The overdue tasks found at the latest tick.
    on_decision : callable (StealingDecision) or None
        Receives each decision of the policy: values, which may be kept.
    """

    def __init__(
        self,
        facts: Facts,
        policy: Policy,
        links: Links | None = None,
        *,
        coalesce: float = COALESCE,
        tick: float = TICK,
    ) -> None:
        self.policy = policy
        self.links = Links() if links is None else links
        self.ledger = Ledger(facts)
        self.facts = facts
        self.state = StealingState()
        self.counts: dict[str, float] = dict.fromkeys(_COUNTS, 0)
        self.steps = 0
        self.overdue = _NO_TASKS
        # A step at the moment of its cause would be followed by others at the same moment, without end.
        self.coalesce, self.tick = max(coalesce, _MIN_STEP), tick
        self.on_decision: Callable[[StealingDecision], None] | None = None
        self._is_on = True
        self._decided: list[Instruction] = []
        self._outcomes: deque[Outcome] = deque(maxlen=HISTORY)
        self._hungry: dict[Address, None] = {}
        self._saturated = False
        self._wake: float | None = None
        self._barren = 0  # consecutive steps without a move although a worker was under its threshold
        self._looked = 0.0  # when the queues were last checked for a stall
        self.ticks = 0
        self._handlers = self._by_event()

    def _by_event(self) -> Mapping[type, Callable[[Any, float], None]]:
        """Return the handler of each event type."""
        return {
            events.WorkerJoined: self._joined, events.WorkerLeft: self._left, events.AcceptsTasks: self._opened,
            events.TaskAssigned: self._assigned, events.TaskFinished: self._finished,
            events.StealAnswered: self._answered, events.RequestUnsent: self._unsent, events.Tick: self._ticked,
            events.RequestWithdrawn: self._withdrawn, events.MoveOrdered: self._ordered, events.WakeDue: self._due,
            events.StealingSwitched: self._switched, events.SchedulerRestarted: self._restarted,
            events.LoopMeasured: self._loop_measured,
            # Facts reported or learned go straight to the ledger: they call for no decision by themselves.
            events.WorkerReported: lambda event, now: self.ledger.hear(now, *event),
            events.MessagesSent: lambda event, now: self.ledger.listen(now),
            events.DeviceReported: lambda event, now: self.ledger.set_device(*event),
            events.MemoryReported: lambda event, now: self.ledger.set_memory(*event),
            events.ResourcesReported: lambda event, now: self.ledger.set_resources(*event),
            events.EndAnnounced: lambda event, now: self.ledger.set_end(*event),
            events.DurationLearned: lambda event, now: self.ledger.durations.add(*event),
            events.SpeedLearned: lambda event, now: self.ledger.durations.set_speed(*event),
            events.TransferLearned: lambda event, now: self.links.add(*event),
        }  # fmt: skip

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Apply an event and return the instructions that follow from it, in order."""
        self._handlers[type(event)](event, now)
        if not self._decided:
            return []
        decided, self._decided = self._decided, []
        return decided

    def threshold(self, address: Address) -> float:
        """Return a worker's stealing threshold in seconds of backlog."""
        return threshold_of(self.state, address, self.policy.parameters)

    # -- workers -------------------------------------------------------------------------------------------

    def _joined(self, event: events.WorkerJoined, now: float) -> None:
        """Add the worker, as a thief until it has something to do."""
        row = self.ledger.add_worker(*event)
        self._hurry(row)
        self._hungry[event.worker] = None
        self._ask(now)

    def _left(self, event: events.WorkerLeft, now: float) -> None:
        gone = event.worker
        self.ledger.remove_worker(gone)
        self._hungry.pop(gone, None)
        self._outcomes = deque((o for o in self._outcomes if o.thief != gone), HISTORY)
        self.state = forget_worker(self.state, gone)

    def _opened(self, event: events.AcceptsTasks, now: float) -> None:
        if event.worker in self.ledger.rows:
            self.ledger.set_accepts(event.worker, event.accepts)
            if event.accepts:
                self._hungry[event.worker] = None
            self._ask(now)

    # -- tasks ---------------------------------------------------------------------------------------------

    def _assigned(self, event: events.TaskAssigned, now: float) -> None:
        if event.worker not in self.ledger.rows:
            return
        entry = self.ledger.assign(now, *event)
        self._hurry(entry.worker)
        if entry.state == "queued" and self._hungry and self._is_worth_it(now):
            self._ask(now)

    def _finished(self, event: events.TaskFinished, now: float) -> None:
        key, ledger = event.key, self.ledger
        entry = ledger.entries.get(key)
        if entry is None:
            return
        request = ledger.requests.get(key) if ledger.requests else None
        # The task left before its victim answered.
        if request is not None:
            self._settle("stale", request, now)
        if entry.stolen is not None and event.done:
            self._arrived(entry, entry.stolen, event.seconds or 0.0, now)
        ledger.finish(now, key, event.seconds)
        self._hurry(entry.worker)
        self._look_at(entry.worker, now)
        if request is not None:
            self._look_at(request.thief, now)

    def _arrived(self, entry: Entry, stolen: StealRecord, seconds: float, now: float) -> None:
        """Record when a stolen task started: its end, seen here, less its duration, so that only one clock is used."""
        victim, requested = stolen
        thief = entry.worker.address
        delay = max(now - seconds - requested, 0.0)
        # The duration by the worker's clock, but no more than has passed here.
        worked = min(seconds, max(now - requested, 0.0))
        self._outcomes.append(Outcome("started", victim, thief, delay))
        self.counts["seconds_worked"] += worked
        self._decided.append(events.StealCompleted(entry.key, victim, thief, requested, delay))

    def _restarted(self, event: events.SchedulerRestarted, now: float) -> None:
        for key in list(self.ledger.entries):
            self.ledger.finish(now, key)

    # -- when to take a step -------------------------------------------------------------------------------

    def _switched(self, event: events.StealingSwitched, now: float) -> None:
        self._is_on, self._wake = event.on, None
        if not event.on:
            self._set_saturated(False)  # No tick follows that would reset it.
        else:
            self._hungry.update(dict.fromkeys(self.ledger.rows))
            self._ask(now)

    def _look_at(self, row: WorkerLoad, now: float) -> None:
        """Ask for a step at the time when a worker will have less than its threshold to do."""
        if not row.may_take or row.address not in self.ledger.rows:
            return
        self._hungry[row.address] = None
        if self._is_worth_it(now):
            self._ask(now, max(self._left_over(row.address, now), 0.0))

    def _ask(self, now: float, wait: float = 0.0) -> None:
        due, wake = now + (wait if wait > self.coalesce else self.coalesce), self._wake
        if (wake is None or due < wake) and self._is_on:
            self._wake = due
            self._decided.append(events.Wake(due))

    def _is_worth_it(self, now: float) -> bool:
        """Return whether any queue is long enough for one of its tasks to be moved, or has stalled for long enough.

        Where neither holds yet, a step is scheduled for later.
        """
        ledger, p = self.ledger, self.policy.parameters
        if not ledger.waiting:
            return False
        if ledger.longest() >= p.shortest:
            return True
        long = p.bears * p.shortest
        if now - self._looked >= long / 2:
            if ledger.waits_for(now, long):
                return True
            self._looked = now
        self._ask(now, long / 2)
        return False

    def _left_over(self, address: Address, now: float) -> float:
        """Return the seconds until a worker falls below its threshold, tasks requested from it excluded."""
        return self.ledger.rows[address].starts_in(now) - self.threshold(address)

    def _due(self, event: events.WakeDue, now: float) -> None:
        if event.at == self._wake:
            self._step(now)

    def _ticked(self, event: events.Tick, now: float) -> None:
        ledger, p = self.ledger, self.policy.parameters
        self._hungry.update((address, None) for address, row in ledger.rows.items() if row.may_take)
        idle = self._some_idle(now) if ledger.waiting or event.elsewhere else []
        self.facts.begin([worker.address for worker in idle])
        self.overdue = look(ledger, now, idle, p.patience, self.ticks, self.policy.projects)
        self.ticks += 1
        self._step(now, self.overdue)

    def _some_idle(self, now: float) -> list[Worker]:
        """Return idle workers, at most `MAX_IDLE` of them and different ones at each tick."""
        idle = self.ledger.idle(now)
        first = self.ticks * MAX_IDLE % max(len(idle), 1)
        return (idle[first:] + idle[:first])[:MAX_IDLE] if len(idle) > MAX_IDLE else idle

    # -- the step ------------------------------------------------------------------------------------------

    def _step(self, now: float, overdue: OverdueTasks = _NO_TASKS) -> None:
        self._wake = None
        rows = self.ledger.rows
        idle = [a for a in self._hungry if (row := rows.get(a)) is not None and row.may_take]
        self._hungry = dict.fromkeys(idle)
        if self._outcomes:
            self.state = adapt(self.state, self._outcomes, self.policy.parameters)
            self._outcomes.clear()
        if not overdue.thieves and (not idle or not self._is_worth_it(now)):
            return
        hungry = [a for a in idle if self._left_over(a, now) <= 0]
        thieves = list(dict.fromkeys((*overdue.thieves, *hungry[:THIEVES])))
        moves = self._decide(thieves, overdue, now) if thieves else ()
        self._request(moves, now)
        seen = dict.fromkeys(thieves)
        self._hungry = {**{a: None for a in idle if a not in seen}, **seen}
        self._barren = 0 if moves or not hungry else self._barren + 1
        if len(hungry) > THIEVES and moves:
            self._ask(now)
        else:
            self._look_again(idle, now)

    def _decide(self, thieves: Sequence[Address], overdue: OverdueTasks, now: float) -> tuple[Move, ...]:
        """Return the policy's moves for some thieves, from a small snapshot or, if that yields none, a full one."""
        ledger, policy = self.ledger, for_overdue(self.policy) if overdue.thieves else self.policy
        moves: tuple[Move, ...] = ()
        self.facts.begin(thieves)
        asked = policy.asks(thieves, ledger.rows, self.state)
        threads = sum(ledger.rows[address].nthreads for address in thieves)
        # A quick look would show the chosen victims of the first thief alone.
        skip, few = self._barren * VICTIMS, TASKS
        if asked is None:
            few = policy.parameters.quick * (1 + threads)
        for room in (few, TASKS) if few < TASKS else (TASKS,):
            snapshot = ledger.snapshot(
                now, thieves, self.links, asked, skip=skip, tasks=room, first=overdue.tasks
            )
            moves = policy.step(snapshot, self.state)
            if self.on_decision is not None:
                self.on_decision(StealingDecision(policy, self.state, snapshot, moves))
            if moves or sum(map(len, snapshot.queues.values())) < room:
                break
        self.state = self.state._replace(turns=self.state.turns + 1)
        self.steps += 1
        return moves

    def _look_again(self, idle: Iterable[Address], now: float) -> None:
        """Schedule the next step: when a worker falls below its threshold, or queued tasks have waited longer."""
        if not self._is_worth_it(now):
            return
        left_over = [self._left_over(address, now) for address in idle]
        if waits := [wait for wait in left_over if wait > 0]:
            self._ask(now, min(waits))
        if len(waits) < len(left_over):
            p = self.policy.parameters
            self._ask(now, min(p.bears * p.shortest * 2.0 ** min(self._barren, 10), self.tick))

    # -- requests and answers ------------------------------------------------------------------------------

    def _ordered(self, event: events.MoveOrdered, now: float) -> None:
        self.facts.begin([event.move.thief])
        self._request((event.move,), now)

    def _request(self, moves: Iterable[Move], now: float) -> None:
        ledger = self.ledger
        rows = ledger.rows
        for key, victim, thief, gain, cost, nbytes in moves:
            entry = ledger.entries.get(key)
            if entry is None or key in ledger.requests or thief not in rows:
                continue
            if not self.facts.reserve(key, victim, thief):
                continue
            before, after = rows[victim].starts_in(now), rows[thief].starts_in(now)
            ledger.request(now, key, thief, max(nbytes - entry.nbytes, 0), gain, cost)
            self.counts["requests"] += 1
            self._decided.append(events.Ask(key, victim, thief, gain, cost, entry.seconds, before, after))

    def _unsent(self, event: events.RequestUnsent, now: float) -> None:
        """Cancel a request that could not be sent; the victim is going, and its tasks will be taken back."""
        if event.key in self.ledger.requests:
            self.counts["requests"] -= 1
            self.ledger.refuse(now, event.key)

    def _withdrawn(self, event: events.RequestWithdrawn, now: float) -> None:
        request = self.ledger.requests.get(event.key)
        if request is not None and not request.withdrawn:
            self.ledger.withdraw(now, event.key)

    def _answered(self, event: events.StealAnswered, now: float) -> None:
        request = self.ledger.requests.get(event.key)
        # A task that its victim has given up must be placed again, whoever asked for it.
        if request is None:
            if event.answer not in ("kept", "seceded"):
                self._decided.append(events.PlaceAgain(event.key, "", ""))
            return
        thief, victim = request.thief, request.entry.worker
        if event.answer == "kept":
            self._settle("refused", request, now)
            self.ledger.refuse(now, event.key)
        elif event.answer == "seceded":
            self._settle("refused", request, now)
            # It occupies no thread.
            self.ledger.finish(now, event.key)
            self._look_at(victim, now)
        elif event.answer == "given" and self.ledger.rows.get(thief.address) is thief and thief.accepts:
            self._settle("confirmed", request, now)
            self.ledger.confirm(now, event.key)
            self._decided.append(events.HandOver(event.key, victim.address, thief.address))
            return
        else:
            self._settle("stale", request, now)
            self.ledger.finish(now, event.key)
            self._look_at(victim, now)
            self._decided.append(events.PlaceAgain(event.key, victim.address, thief.address))
        self._look_at(thief, now)

    def _settle(self, outcome: events.Settlement, request: PendingRequest, now: float) -> None:
        """Record the outcome of a request; tell the policy of failed ones unless the thief has left.

        An outcome for a thief that has left would bring it back into the policy's state.
        """
        key, victim, thief = request.entry.key, request.entry.worker.address, request.thief.address
        self.counts[outcome] += 1
        if outcome == "confirmed":
            self.counts["seconds_moving"] += request.cost
        self._decided.append(
            events.RequestSettled(key, victim, thief, outcome, now, request.gain, request.cost)
        )
        if outcome != "confirmed" and thief in self.ledger.rows:
            self._outcomes.append(Outcome(outcome, victim, thief))

    # -- messages ------------------------------------------------------------------------------------------

    def _loop_measured(self, event: events.LoopMeasured, now: float) -> None:
        """Set whether the loop is saturated; then messages to all workers are sent in batches."""
        bound = self.policy.parameters.saturated
        self._set_saturated(event.share >= (bound * RELEASE_FACTOR if self._saturated else bound))

    def _set_saturated(self, saturated: bool) -> None:
        if saturated != self._saturated:
            self._saturated = saturated
            for row in self.ledger.rows.values():
                self._hurry(row)

    def _hurry(self, row: WorkerLoad) -> None:
        """Instruct the caller to send a worker's messages soon or in batches, by its backlog and the loop's load."""
        plenty = self.policy.parameters.plenty
        soon = not self._saturated and row.waiting_seconds * row.slowness < plenty * row.nthreads
        if soon != row.soon:
            row.soon = soon
            self._decided.append(events.Hurry(row.address, soon))
