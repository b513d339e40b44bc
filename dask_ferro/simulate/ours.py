"""The policies of `dask_ferro.policy` on a virtual scheduler: observe, decide, enact.

What they are shown stands in a ledger, as in the plugin: projected seconds, learned links, believed queues.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from dask_ferro.policy.cost import Links, Speed
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.place import Placement
from dask_ferro.policy.remaining import left, unmeasured
from dask_ferro.policy.row import Entry, Row
from dask_ferro.policy.snapshot import Address, Move, Outcome, Task, Worker
from dask_ferro.policy.steal import (
    LastVictim,
    NoStealing,
    Parameters,
    Policy,
    named,
    overdue_moves,
    threshold_of,
)
from dask_ferro.policy.waits import look
from dask_ferro.simulate.cluster import CORE_FLOPS
from dask_ferro.simulate.jobs import Job
from dask_ferro.simulate.outlook import Outlook
from dask_ferro.simulate.scheduler import Scheduler
from dask_ferro.simulate.seat import Seat
from dask_ferro.simulate.worker import Held
from dask_ferro.trace import Span

# What happens within so many seconds is looked at in one step.
COALESCE = 0.001
TICK = 0.5
# Workers that one step looks at as thieves: it sees the ends of ten queues.
HUNGRY = 32
# Holders of inputs that placement weighs, beside the workers that are free first.
HOLDERS = 8
# Tasks of the queue that are looked at, to tell what all of them take.
QUEUED = 16
# A thread that waited for less had no work to wait for: messages take that long.
_DRY = 0.001


class _Request(NamedTuple):
    number: int
    victim: Address
    thief: Address
    seconds: float  # when it was asked for


class Ours:
    """A decider with a stealing policy and a placement."""

    def __init__(
        self, scheduler: Scheduler, policy: str, placement: Placement, parameters: Parameters, seed: int
    ) -> None:
        self.links = Links()
        self.outlook = Outlook(scheduler)
        self.ledger = Ledger(
            self._describe, unlocks=_unlocks, live=self.outlook.live, holds=self.outlook.holds
        )
        self.ledger.listens = True
        self.outlook.ledger = self.ledger
        self.placement = placement
        self.parameters = parameters
        self._scheduler = scheduler
        self._clock = scheduler.clock
        self._add = scheduler.world.add
        self._policy: Policy = (
            LastVictim(parameters, seed=seed)
            if policy == "last-victim"
            else named(policy, self.links, self.ledger.hosts, parameters)
        )
        self._steals = not isinstance(self._policy, NoStealing)
        self._state = self._policy.init()
        self._outcomes: list[Outcome] = []
        self._requests: dict[int, tuple[Job, _Request]] = {}
        self._in_flight: dict[int, _Request] = {}  # by task
        self._moved: dict[int, _Request] = {}
        self._ran: dict[str, float] = {}  # by prefix of which nothing was measured: the longest run so far
        self._asked = 0
        self._freed = False
        self._since: dict[int, float] = {}  # tasks that wait for a worker
        self._touched: dict[Address, None] = {}
        self._starving: dict[Address, None] = {}
        self._thieves: list[Address] = []  # of the step that is being taken
        self._news = False
        self._due = False
        self._barren = 0  # steps since one moved anything
        self._turn = 0  # of looks at what is overdue

    # ---- observe -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the safety tick."""
        self._clock.background(self._clock.now + TICK, self._tick)

    def joined(self, seat: Seat) -> None:
        """Open the worker's page."""
        spec, flops = seat.spec, CORE_FLOPS * seat.spec.speed
        self.ledger.durations.speeds.setdefault(spec.device, Speed(flops, flops))
        self.ledger.add_worker(seat.address, seat.nthreads, spec.host, spec.device)
        self.ledger.set_memory(seat.address, spec.memory)
        self._touched[seat.address] = None

    def left(self, seat: Seat) -> None:
        """Close the worker's page; what it was asked for gets no answer."""
        self.ledger.remove_worker(seat.address)
        self.outlook.gone(seat.address)
        self._starving.pop(seat.address, None)
        for number, (_, request) in list(self._requests.items()):
            if request.victim == seat.address:
                self._end(number, "stale")

    def changed(self, seat: Seat) -> None:
        """Note whether the worker accepts tasks."""
        self.ledger.set_accepts(seat.address, seat.accepts)
        self._touched[seat.address] = None

    def assigned(self, job: Job, seat: Seat) -> None:
        """Write the task into the worker's queue."""
        spec = job.spec
        self.ledger.assign(
            self._clock.now, job.number, seat.address, spec.prefix, job.priority, job, spec.annotated,
            nbytes=self.outlook.takes(job),
        )  # fmt: skip
        self._touched[seat.address] = None
        if self.ledger.rows[seat.address].queue:
            self._news = True

    def finished(self, job: Job, seat: Seat, held: Held) -> None:
        """Learn what the task took, and how long its move."""
        self._touched[seat.address] = None
        self.ledger.finish(self._clock.now, job.number, held.stop - held.start)
        self.outlook.done(job, seat.address)
        self._freed = True
        self._in_flight.pop(job.number, None)
        request = self._moved.pop(job.number, None)
        if request is None:
            return
        self._add("seconds_worked", held.stop - held.start)
        dry = held.start - max(held.gap, request.seconds) > self._scheduler.world.cluster.before + _DRY
        seconds = held.start - request.seconds
        self._outcomes.append(Outcome("started", request.victim, request.thief, seconds, dry))
        self._scheduler.world.spans.append(
            Span("steal", job.spec.key, job.spec.prefix, request.thief, held.lane, request.seconds, held.start,
                 source=request.victim)
        )  # fmt: skip

    def dropped(self, job: Job, seat: Seat) -> None:
        """Strike the task off."""
        self._touched[seat.address] = None
        self.ledger.finish(self._clock.now, job.number)
        self._in_flight.pop(job.number, None)
        self._moved.pop(job.number, None)

    def arrived(self, address: Address, job: Job, kind: str, seconds: float) -> None:
        """Learn what the link does."""
        copies = 0 if kind == "peer" else self.outlook.copies(job, address)
        self.links.add(kind, job.spec.nbytes, seconds, copies)
        self.outlook.came(job, address)

    def released(self, job: Job) -> None:
        """Take the bytes off their holders."""
        self.outlook.dropped(job)
        self._freed = True

    def settled(self) -> None:
        """See who fell under its threshold, and when the others will."""
        self.ledger.listen(self._clock.now)
        if self._freed and self.ledger.counts_bytes and self._scheduler.has_unplaced:
            self._freed = False
            self._scheduler.retry()
        if self._steals:
            for address in self._touched:
                self._watch(address)
            if self._news:
                self._kick()
        self._touched.clear()
        self._news = False

    def _watch(self, address: Address) -> None:
        row = self.ledger.rows.get(address)
        if row is None:
            return
        if not row.may_take:
            self._starving.pop(address, None)
            return
        now = self._clock.now
        spare = row.starts_in(now) - threshold_of(self._state, address, self.parameters)
        if spare < 0:
            if address not in self._starving:
                self._starving[address] = None
                self._news = True
            return
        self._starving.pop(address, None)
        self._clock.background(now + spare + 1e-6, self._alarm, address, row.version)

    def _alarm(self, address: Address, version: int) -> None:
        """What a worker runs will soon be done, as far as one can tell."""
        row = self.ledger.rows.get(address)
        if row is not None and row.version == version:
            self._starving[address] = None
            self._kick()

    # ---- decide --------------------------------------------------------------------------------------------

    def where(self, job: Job) -> Address | None:
        """Return where the task is projected to finish first."""
        now, ledger = self._clock.now, self.ledger
        found: dict[Address, Worker] = {}
        for dependency in job.inputs:
            for address in islice(dependency.holders, HOLDERS):
                if address in ledger.rows and len(found) < HOLDERS:
                    found.setdefault(address, ledger.worker(address, now, job.priority))
        task = self.outlook.task(job, found, now - self._since.setdefault(job.number, now))
        count, lasting = self.placement.candidates, self._lasting(task.seconds, task.known)
        need = 0
        if ledger.counts_bytes:
            need = task.nbytes + task.headroom + sum(d.spec.nbytes for d in job.inputs)
        soonest = ledger.soonest(now, count, job.priority, lasting, need)
        if need:  # one that is worth waiting for
            soonest += ledger.soonest(now, count, job.priority, lasting)
        if lasting and not soonest:
            soonest = ledger.latest(now, count, job.priority)
        for worker in soonest:
            found.setdefault(worker.address, worker)
        task = task._replace(inputs=self.outlook.inputs(job, found))
        fresh = ledger.fresh if lasting else 0.0
        chosen = self.placement.choose(task, found.values(), self.links, ledger.hosts, fresh)
        if chosen is not None:
            del self._since[job.number]
        return chosen

    def _lasting(self, seconds: float, known: bool) -> float:
        """Return the seconds that a worker needs to have left for a task; 0: that is no matter."""
        return seconds + self.placement.spare if known and self.ledger.ends else 0.0

    def suits(self, job: Job, seat: Seat) -> bool:
        """Whether the worker has the time, or nobody will; and the room, and others are not done without it."""
        if not self._is_wanted(job, seat):
            return False
        if not self.ledger.ends:
            return True
        seconds, known = self.ledger.durations.of(job.spec.prefix, self.outlook.first, job.spec.annotated)
        lasting, now = self._lasting(seconds, known), self._clock.now
        worker = self.ledger.worker(seat.address, now)
        if not lasting or worker.has_time(worker.starts_in, lasting):
            return True
        return not self.placement.waits(seconds, self.ledger.fresh) and not self.ledger.soonest(
            now, 1, lasting=lasting
        )

    def _is_wanted(self, job: Job, seat: Seat) -> bool:
        """Whether a worker's device has room for a task, and faster ones would not be done with all before it."""
        ledger, now = self.ledger, self._clock.now
        if len(ledger.devices) < 2 and not ledger.counts_bytes:
            return True
        worker, task = ledger.worker(seat.address, now), self.outlook.task(job)
        count, some = self._scheduler.queued(QUEUED)
        queued: dict[str, float] = {}
        for other in map(self.outlook.task, some):
            for device, seconds in {other.device: other.seconds, **other.others}.items():
                queued[device] = queued.get(device, 0.0) + seconds * count / len(some)
        return self.placement.helps(task, worker, queued, ledger.threads, ledger.soonest(now, 1))

    def projected(self, job: Job) -> float:
        """Return what is left of the projected seconds; what is overdue is projected to run for as long again.

        Where nothing was measured, a task takes twice what one of its prefix has run for by now, but no less than the
        guess: as in Dask.
        """
        prefix = job.spec.prefix
        seconds, known = self.ledger.durations.of(prefix, self.outlook.first, job.spec.annotated)
        entry = self.ledger.entries.get(job.number)
        ran = self._clock.now - entry.started if entry is not None and entry.started is not None else 0.0
        if not known:
            self._ran[prefix] = max(self._ran.get(prefix, 0.0), ran)
            seconds = unmeasured(self._ran[prefix], seconds)
        return left(seconds, ran)

    def set_end(self, address: Address, at: float) -> None:
        """Write the end on the worker's page."""
        self.ledger.set_end(address, at)

    def set_fresh(self, seconds: float) -> None:
        """Note what a fresh worker would have."""
        self.ledger.fresh = seconds

    def busy(self, seat: Seat) -> tuple[float, float]:
        """Return the tasks that a thread has, and how slow it is."""
        return len(seat.processing) / seat.nthreads, self.ledger.rows[seat.address].slowness

    def _describe(self, job: Job, entry: Entry, row: Row) -> Task | None:
        if job.pinned:
            return None
        inputs = self.outlook.inputs(job, self._thieves)
        return Task(
            job.number,
            entry.seconds,
            entry.known,
            inputs,
            origins=entry.origins,
            device=entry.device,
            others=self.ledger.others(entry),
            nbytes=entry.nbytes,
            headroom=self.outlook.headroom(job),
        )

    def _tick(self) -> None:
        if self._steals:
            self._kick()
            self._scheduler.when_idle(self._sweep)
        if self.ledger.counts_bytes and self._scheduler.has_unplaced:
            self._scheduler.when_idle(self._scheduler.retry)
        self._clock.background(self._clock.now + TICK, self._tick)

    def _kick(self) -> None:
        if not self._due and self._starving and self.ledger.waiting:
            self._due = True
            self._clock.background(self._clock.now + COALESCE, self._scheduler.when_idle, self._step)

    def _step(self) -> None:
        self._due = False
        hungry = self._thieves = list(islice(self._starving, HUNGRY))
        if not hungry or not self.ledger.waiting:
            return
        self._scheduler.think(self._scheduler.world.cluster.per_step)
        now = self._clock.now
        outcomes, self._outcomes = self._outcomes, []
        snapshot = self.ledger.snapshot(now, hungry, outcomes)
        moves, self._state = self._policy.step(snapshot, self._state)
        self._add("steps")
        for address in hungry:  # the next step begins with others
            del self._starving[address]
            self._starving[address] = None
        self._enact(moves)
        self._barren = 0 if moves else self._barren + 1
        if moves and len(self._starving) > HUNGRY:
            self._news = True
        if not moves:
            p = self.parameters
            pause = min(p.bears * p.shortest * 2.0 ** min(self._barren, 10), TICK)
            self._clock.background(now + pause, self._kick)

    def _sweep(self) -> None:
        """Hear from the workers what they run, and move what is overdue while somebody has nothing to do."""
        for address, seat in self._scheduler.seats.items():
            self.ledger.hear(self._clock.now, address, self._clock.now, seat.live.runs())
        idle = self.ledger.idle(self._clock.now) if self.ledger.waiting else []
        if not idle:
            return
        self._thieves = [worker.address for worker in idle]
        self._turn += 1
        policy, patience = self._policy, self.parameters.patience
        found = look(self.ledger, self._clock.now, idle, patience, self._turn, policy.projects)
        self._enact(overdue_moves(policy, found.snapshot, self._state, self.links, self.ledger.hosts))

    def _enact(self, moves: tuple[Move, ...]) -> None:
        asked = set()
        for move in moves:
            number = int(str(move.key))
            job = self._scheduler.jobs[number]
            self._ask(job, move.victim, move.thief, move.nbytes)
            asked.add(move.victim)
        self._scheduler.think(self._scheduler.world.cluster.per_send * len(asked))

    # ---- enact ---------------------------------------------------------------------------------------------

    def _ask(self, job: Job, victim: Address, thief: Address, nbytes: int) -> None:
        self._asked += 1
        request = _Request(self._asked, victim, thief, self._clock.now)
        self._requests[self._asked] = job, request
        self._in_flight[job.number] = request
        self._moved.pop(job.number, None)
        moving = max(nbytes - self.ledger.entries[job.number].nbytes, 0)
        self.ledger.request(self._clock.now, job.number, thief, moving)
        self._touched[victim] = self._touched[thief] = None
        self._add("requests")
        seat = self._scheduler.seats[victim]
        self._scheduler.send(seat, seat.live.asked, job, self._asked)

    def replied(self, address: Address, job: Job, request: int, state: str) -> None:
        """Give the task to the thief, or leave it."""
        asked = self._requests.get(request)
        if asked is None:
            return
        scheduler, now = self._scheduler, self._clock.now
        _, wanted = asked
        self._touched[wanted.victim] = self._touched[wanted.thief] = None
        if self._in_flight.get(job.number) is not wanted:
            self._end(request, "stale")
            return
        del self._in_flight[job.number]
        victim, thief = scheduler.seats[address], scheduler.seats.get(wanted.thief)
        if state == "running":
            self.ledger.refuse(now, job.number)
            self._end(request, "refused")
        elif state == "gone" or thief is None or not thief.accepts:
            self._end(request, "stale")
            scheduler.place_again(job, victim)
        else:
            self.ledger.confirm(now, job.number)
            scheduler.move(job, victim, thief)
            self._moved[job.number] = wanted
            self._end(request, "confirmed")

    def _end(self, number: int, kind: str) -> None:
        _, request = self._requests.pop(number)
        self._add(kind)
        if kind != "confirmed":
            self._outcomes.append(Outcome(kind, request.victim, request.thief))


def _unlocks(job: Job) -> bool:
    """Whether a task is the last that some other one waits for."""
    return any(other.missing == 1 for other in job.after)
