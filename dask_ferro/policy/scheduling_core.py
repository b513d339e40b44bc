"""Work stealing without any input or output: `handle(event, now)` returns what is to be done about an event.

The plugin feeds it what happens on a Dask scheduler, the simulator what happens on a virtual one; both carry out what
it returns, and decide nothing of that themselves.  It has no clock, sends nothing and knows no task but by its key:
what a policy is shown of a task that waits, it asks of `Facts` while it handles an event, for the few tasks that are
looked at.  To keep those facts here for every task would cost the scheduler more than stealing does.

- A step is taken when something happened that may call for one: a worker has less than its threshold to do, or there is
  new work while one starves.  Events within `coalesce` share a step; a tick looks at everybody.
- Steps are asked for while a queue is long enough for one of its tasks to be moved, or stands for long enough.
- A step shows the policy a few of the thieves and the longest queues.  Others have their turn in the next one: at the
  thieves' end, and where nothing may move at the victims' as well.
- A sweep, at each tick, looks for tasks that wait for longer than was expected, wherever they are.
- Messages to a worker that has little to do leave soon; where it has plenty, or the scheduler's loop no time, batches
  are cheaper.

Durations are seconds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dask_ferro.policy import events
from dask_ferro.policy.estimates import LEARNING, Durations, Learning, Links
from dask_ferro.policy.events import Event, Instruction
from dask_ferro.policy.facts import Address, Key, Move, Outcome, Worker
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.ledger_view import TASKS, VICTIMS
from dask_ferro.policy.stealing.informed import Policy, StealingState, adapted, threshold_of, without
from dask_ferro.policy.stealing.policies import overdue_moves
from dask_ferro.policy.stealing.snapshot import Facts
from dask_ferro.policy.waits import OverdueTasks, look
from dask_ferro.policy.worker_load import Entry, WorkerLoad

# Seconds in which what happens shares a step, and from one tick to the next, unless somebody says otherwise.
COALESCE, TICK = 0.001, 0.5
# Workers that one step looks at as thieves: it sees the ends of ten queues.
THIEVES = 32
# Outcomes that no step has read: while stealing is off none does.  100 kB.
HISTORY = 1000
# Idle workers that one sweep looks at: a row takes 2 us.
IDLE = 256
# A saturated loop counts as such until its load is under this share of the bound: each change is a message a worker.
EASED = 0.9


class PendingAsk(NamedTuple):
    """A request that was not answered yet."""

    victim: Address
    thief: Address
    gain: float
    cost: float


class PendingArrival(NamedTuple):
    """A task that was sent to its thief, and is not done there."""

    victim: Address
    requested: float
    dry: bool  # whether the thief had a thread with nothing to do when it was sent the task


class SchedulingCore:
    """The decisions of one scheduler's work stealing.

    Parameters
    ----------
    facts : Facts
    policy : Policy
    links : Links, optional
        What moving bytes costs; who learns it shares it.
    coalesce, tick : float
        Seconds, as `ferro.scheduler` has them.
    learning : Learning

    Attributes
    ----------
    ledger : Ledger
        What every worker is believed to be doing.
    state : StealingState
        The policy's.
    counts : mapping of str to float
        "requests", "confirmed", "refused", "stale".
    steps, sweeps : int
        How often the policy was asked, and how often there was a sweep.
    found : OverdueTasks
        What the newest sweep saw.
    """

    def __init__(
        self,
        facts: Facts,
        policy: Policy,
        links: Links | None = None,
        *,
        coalesce: float = COALESCE,
        tick: float = TICK,
        learning: Learning = LEARNING,
    ) -> None:
        self.policy = policy
        self.links = Links(learning=learning) if links is None else links
        self.ledger = Ledger(facts, Durations(learning))
        self.facts = facts
        self.ledger.listens = True
        self.state = StealingState()
        self.counts: dict[str, float] = defaultdict(float)
        self.steps = 0
        self.found: OverdueTasks = look(self.ledger, 0.0, [], policy.parameters.patience, 0)
        self.coalesce, self.tick = coalesce, tick
        self._is_on = True
        self._decided: list[Instruction] = []
        self._asked: dict[Key, PendingAsk] = {}
        self._arriving: dict[Key, PendingArrival] = {}
        self._outcomes: deque[Outcome] = deque(maxlen=HISTORY)
        self._hungry: dict[Address, None] = {}
        self._hurried: dict[Address, bool] = {}
        self._saturated = False
        self._wake: float | None = None
        self._barren = 0  # steps since one moved anything although somebody was under its threshold
        self._looked = 0.0  # when it was looked at last whether a queue stands
        self.sweeps = 0
        self._handlers = self._by_event()

    def _by_event(self) -> Mapping[type, Callable[[Any, float], None]]:
        """Return what takes in each kind of event."""
        return {
            events.Joined: self._joined, events.Left: self._left, events.AcceptsTasks: self._opened,
            events.Assigned: self._assigned, events.Finished: self._finished, events.Answered: self._answered,
            events.Unsent: self._unsent, events.Withdrawn: self._withdrawn, events.Ordered: self._ordered,
            events.Due: self._due, events.Tick: self._ticked, events.Sweep: self._swept,
            events.Switched: self._switched, events.Restarted: self._restarted,
            events.LoopMeasured: self._loop_measured,
            # What is told or learned beside tasks goes to the ledger as it is: nothing is decided by it alone.
            events.Heard: lambda event, now: self.ledger.hear(now, *event),
            events.MessagesSent: lambda event, now: self.ledger.listen(now),
            events.DeviceTold: lambda event, now: self.ledger.set_device(*event),
            events.MemoryTold: lambda event, now: self.ledger.set_memory(*event),
            events.ResourcesTold: lambda event, now: self.ledger.set_resources(*event),
            events.EndTold: lambda event, now: self.ledger.set_end(*event),
            events.SizeLearned: lambda event, now: self.ledger.set_bytes(*event),
            events.DurationLearned: lambda event, now: self.ledger.durations.add(*event),
            events.SpeedLearned: lambda event, now: self.ledger.durations.set_speed(*event),
            events.TransferLearned: lambda event, now: self.links.add(*event),
        }  # fmt: skip

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event in, and return what is to be done about it, in order."""
        self._handlers[type(event)](event, now)
        if not self._decided:
            return []
        decided, self._decided = self._decided, []
        return decided

    def ask_of(self, facts: Facts) -> None:
        """Ask these facts from now on."""
        self.facts = self.ledger.facts = facts

    def threshold(self, address: Address) -> float:
        """Return a worker's threshold in seconds of backlog."""
        return threshold_of(self.state, address, self.policy.parameters)

    # -- workers -------------------------------------------------------------------------------------------

    def _joined(self, event: events.Joined, now: float) -> None:
        """It is a thief until it has something to do."""
        row = self.ledger.add_worker(*event)
        self._hurry(row)
        self._hungry[event.worker] = None
        self._ask(now)

    def _left(self, event: events.Left, now: float) -> None:
        gone = event.worker
        for key in self.ledger.remove_worker(gone):
            self._asked.pop(key, None)
            self._arriving.pop(key, None)
        self._hungry.pop(gone, None)
        self._hurried.pop(gone, None)
        self._outcomes = deque((o for o in self._outcomes if o.thief != gone), HISTORY)
        self.state = without(self.state, gone)

    def _opened(self, event: events.AcceptsTasks, now: float) -> None:
        if event.worker in self.ledger.rows:
            self.ledger.set_accepts(event.worker, event.accepts)
            if event.accepts:
                self._hungry[event.worker] = None
            self._ask(now)

    # -- tasks ---------------------------------------------------------------------------------------------

    def _assigned(self, event: events.Assigned, now: float) -> None:
        if event.worker not in self.ledger.rows:
            return
        entry = self.ledger.assign(now, *event)
        self._hurry(entry.worker)
        if entry.started is None and self._hungry and self._is_worth_it(now):
            self._ask(now)

    def _finished(self, event: events.Finished, now: float) -> None:
        key = event.key
        asked = self._asked.pop(key, None) if self._asked else None
        # It left before the victim was asked.
        if asked is not None:
            self._settle("stale", key, asked, now)
        if self._arriving and (arriving := self._arriving.pop(key, None)) is not None and event.done:
            self._arrived(key, arriving, event.seconds or 0.0, now)
        entry = self.ledger.finish(now, key, event.seconds)
        if entry is not None:
            self._hurry(entry.worker)
            self._look_at(entry.worker, now)
        if asked is not None and (thief := self.ledger.rows.get(asked.thief)) is not None:
            self._look_at(thief, now)

    def _arrived(self, key: Key, arriving: PendingArrival, seconds: float, now: float) -> None:
        """Note when a stolen task had started: its end, seen here, less its duration; no clock but this one."""
        entry = self.ledger.entries.get(key)
        if entry is None:
            return
        victim, requested, dry = arriving
        thief = entry.worker.address
        delay = max(now - seconds - requested, 0.0)
        # By the worker's clock, but no more than passed here.
        worked = min(seconds, max(now - requested, 0.0))
        self._outcomes.append(Outcome("started", victim, thief, delay, dry))
        self._decided.append(events.Arrived(key, victim, thief, requested, delay, worked))

    def _restarted(self, event: events.Restarted, now: float) -> None:
        for key in list(self.ledger.entries):
            self.ledger.finish(now, key)
        self._asked.clear()
        self._arriving.clear()

    # -- when to take a step -------------------------------------------------------------------------------

    def _switched(self, event: events.Switched, now: float) -> None:
        self._is_on, self._wake = event.on, None
        if not event.on:
            self._set_saturated(False)  # no tick will tell that it is over
        else:
            self._hungry.update(dict.fromkeys(self.ledger.rows))
            self._ask(now)

    def _look_at(self, row: WorkerLoad, now: float) -> None:
        """Ask for a step when a worker has, or soon will have, less than its threshold to do."""
        if not row.may_take or row.address not in self.ledger.rows:
            return
        self._hungry[row.address] = None
        if self._is_worth_it(now):
            self._ask(now, max(self._left_over(row.address, now), 0.0))

    def _ask(self, now: float, wait: float = 0.0) -> None:
        if not self._is_on:
            return
        due = now + max(wait, self.coalesce)
        if self._wake is None or due < self._wake:
            self._wake = due
            self._decided.append(events.Wake(due))

    def _is_worth_it(self, now: float) -> bool:
        """Whether any queue is long enough for one of its tasks to be moved, or stands for long enough.

        A step is asked for, after a while, where neither is so yet.
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
        """Return the seconds until a worker falls under its threshold; what is asked of it already counts."""
        return self.ledger.rows[address].starts_in(now) - self.threshold(address)

    def _due(self, event: events.Due, now: float) -> None:
        if event.at == self._wake:
            self._step(now)

    def _ticked(self, event: events.Tick, now: float) -> None:
        rows = self.ledger.rows.items()
        self._hungry.update((address, None) for address, row in rows if row.may_take)
        self._step(now)

    # -- the step ------------------------------------------------------------------------------------------

    def _step(self, now: float) -> None:
        self._wake = None
        rows = self.ledger.rows
        idle = [a for a in self._hungry if (row := rows.get(a)) is not None and row.may_take]
        self._hungry = dict.fromkeys(idle)
        if self._outcomes:
            self.state = adapted(self.state, self._outcomes, self.policy.parameters)
            self._outcomes.clear()
        if not idle or not self._is_worth_it(now):
            return
        hungry = [a for a in idle if self._left_over(a, now) <= 0]
        thieves = hungry[:THIEVES]
        moves = self._decide(thieves, now) if thieves else ()
        self._request(moves, now)
        seen = dict.fromkeys(thieves)
        self._hungry = {**{a: None for a in idle if a not in seen}, **seen}
        self._barren = 0 if moves or not hungry else self._barren + 1
        if len(hungry) > THIEVES and moves:
            self._ask(now)
        else:
            self._look_again(idle, now)

    def _decide(self, thieves: Sequence[Address], now: float) -> tuple[Move, ...]:
        """Return the policy's moves for some thieves, by a look at few tasks, and where none moves at more."""
        ledger, policy = self.ledger, self.policy
        moves: tuple[Move, ...] = ()
        self.facts.begin(thieves)
        asked = policy.asks(thieves, ledger.everyone, self.state)
        threads = sum(ledger.rows[address].nthreads for address in thieves)
        # Of certain victims each thief is shown its own: a quick look would show the first of them alone.
        skip, few = self._barren * VICTIMS, TASKS
        if asked is None:
            few = policy.parameters.quick * (1 + threads)
        for room in (few, TASKS) if few < TASKS else (TASKS,):
            snapshot = ledger.snapshot(now, thieves, self.links, asked, skip=skip, tasks=room)
            moves = policy.step(snapshot, self.state)
            if moves or sum(map(len, snapshot.queues.values())) < room:
                break
        self.state = self.state._replace(turns=self.state.turns + 1)
        self.steps += 1
        return moves

    def _look_again(self, idle: Iterable[Address], now: float) -> None:
        """Come back when the next worker falls under its threshold, or when what waits has waited for some more."""
        if not self._is_worth_it(now):
            return
        left_over = [self._left_over(address, now) for address in idle]
        if waits := [wait for wait in left_over if wait > 0]:
            self._ask(now, min(waits))
        if len(waits) < len(left_over):
            p = self.policy.parameters
            self._ask(now, min(p.bears * p.shortest * 2.0 ** min(self._barren, 10), self.tick))

    def _swept(self, event: events.Sweep, now: float) -> None:
        ledger, policy = self.ledger, self.policy
        idle = self._some_idle(now) if ledger.waiting or event.elsewhere else []
        self.facts.begin([worker.address for worker in idle])
        patience = policy.parameters.patience
        self.found = look(ledger, now, idle, patience, self.sweeps, policy.projects, self.links)
        self._request(overdue_moves(policy, self.found.snapshot, self.state), now)
        self.sweeps += 1

    def _some_idle(self, now: float) -> list[Worker]:
        """Return idle workers; of very many, others at each turn."""
        idle = self.ledger.idle(now)
        first = self.sweeps * IDLE % max(len(idle), 1)
        return (idle[first:] + idle[:first])[:IDLE] if len(idle) > IDLE else idle

    # -- requests and answers ------------------------------------------------------------------------------

    def _ordered(self, event: events.Ordered, now: float) -> None:
        self.facts.begin([event.move.thief])
        self._request((event.move,), now)

    def _request(self, moves: Iterable[Move], now: float) -> None:
        rows = self.ledger.rows
        for key, victim, thief, gain, cost, nbytes in moves:
            entry = self.ledger.entries.get(key)
            if entry is None or entry.thief is not None or thief not in rows:
                continue
            if not self.facts.reserve(key, victim, thief):
                continue
            before, after = rows[victim].starts_in(now), rows[thief].starts_in(now)
            self.ledger.request(now, key, thief, max(nbytes - entry.nbytes, 0))
            self._asked[key] = PendingAsk(victim, thief, gain, cost)
            self._arriving.pop(key, None)
            self.counts["requests"] += 1
            self._decided.append(events.Ask(key, victim, thief, gain, cost, entry.seconds, before, after))

    def _unsent(self, event: events.Unsent, now: float) -> None:
        """The victim is going, and its tasks will be taken back."""
        if self._asked.pop(event.key, None) is not None:
            self.counts["requests"] -= 1
            self.ledger.refuse(now, event.key)

    def _withdrawn(self, event: events.Withdrawn, now: float) -> None:
        if event.key in self._asked and self.ledger.entries[event.key].thief is not None:
            self.ledger.withdraw(now, event.key)

    def _answered(self, event: events.Answered, now: float) -> None:
        asked, entry = self._asked.pop(event.key, None), self.ledger.entries.get(event.key)
        # Nobody may be left with a task that was given up.
        if asked is None:
            if event.answer not in ("kept", "seceded"):
                self._decided.append(events.PlaceAgain(event.key, "", ""))
            return
        thief = self.ledger.rows.get(asked.thief)
        if event.answer in ("kept", "seceded"):
            self._kept(event, entry, asked, now)
        elif event.answer == "given" and entry is not None and thief is not None and thief.accepts:
            self._given(entry, asked, thief, now)
        else:
            self._settle("stale", event.key, asked, now)
            self._decided.append(events.PlaceAgain(event.key, asked.victim, asked.thief))

    def _kept(self, event: events.Answered, entry: Entry | None, asked: PendingAsk, now: float) -> None:
        self._settle("refused", event.key, asked, now)
        # It has no thread.
        if entry is not None and event.answer == "seceded":
            self.ledger.finish(now, event.key)
            self._look_at(entry.worker, now)
        elif entry is not None and entry.thief is not None:
            self.ledger.refuse(now, event.key)
        if asked.thief in self.ledger.rows:
            self._look_at(self.ledger.rows[asked.thief], now)

    def _given(self, entry: Entry, asked: PendingAsk, thief: WorkerLoad, now: float) -> None:
        self._settle("confirmed", entry.key, asked, now)
        # Nothing was heard of it for long.
        if entry.thief is None:
            self.ledger.request(now, entry.key, asked.thief)
        dry = len(thief.running) < thief.nthreads
        self._arriving[entry.key] = PendingArrival(asked.victim, entry.requested, dry)
        self.ledger.confirm(now, entry.key)
        self._decided.append(events.HandOver(entry.key, asked.victim, asked.thief))

    def _settle(self, outcome: events.Settlement, key: Key, asked: PendingAsk, now: float) -> None:
        """Note what became of a request; of one in vain tell the policy, unless its thief has left.

        A thief that has left would be remembered again.
        """
        victim, thief, gain, cost = asked
        self.counts[outcome] += 1
        self._decided.append(events.Settled(key, victim, thief, outcome, now, gain, cost))
        if outcome != "confirmed" and thief in self.ledger.rows:
            self._outcomes.append(Outcome(outcome, victim, thief))

    # -- messages ------------------------------------------------------------------------------------------

    def _loop_measured(self, event: events.LoopMeasured, now: float) -> None:
        """Gather messages to everybody where the loop has no time left: the worker would wait for its next turn."""
        bound = self.policy.parameters.saturated
        self._set_saturated(event.share >= (bound * EASED if self._saturated else bound))

    def _set_saturated(self, saturated: bool) -> None:
        if saturated != self._saturated:
            self._saturated = saturated
            for row in self.ledger.rows.values():
                self._hurry(row)

    def _hurry(self, row: WorkerLoad) -> None:
        """Let the gathering of a worker's messages follow what it has to do, and what the loop has."""
        plenty = self.policy.parameters.plenty
        soon = not self._saturated and row.waiting_seconds * row.slowness < plenty * row.nthreads
        if soon != self._hurried.get(row.address):
            self._hurried[row.address] = soon
            self._decided.append(events.Hurry(row.address, soon))
