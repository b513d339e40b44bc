"""Our policies on a virtual scheduler: its events go to the core, whose instructions become messages.

As in the plugin, the ledger holds the core's view: projected seconds, learned links, believed queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dask_ferro.policy import events
from dask_ferro.policy.candidates import Candidates
from dask_ferro.policy.estimates import Links
from dask_ferro.policy.events import Answer, Event
from dask_ferro.policy.facts import Address
from dask_ferro.policy.placement import WorkerChoice
from dask_ferro.policy.scaling.work_profile import extrapolate, seconds_left
from dask_ferro.policy.scheduling_core import SchedulingCore, SchedulingSettings
from dask_ferro.policy.stealing.policies import NoStealing, make_policy
from dask_ferro.simulate.cluster import CORE_FLOPS, STOCK_TO_WORKER
from dask_ferro.simulate.task_facts import HOST, SimulatedFacts
from dask_ferro.simulate.virtual_scheduler import Decider, Scheduler, WorkerRecord
from dask_ferro.simulate.virtual_tasks import VirtualTask
from dask_ferro.simulate.virtual_worker import WorkerTask
from dask_ferro.trace import Span

# The states in which workers answer a request, in the core's terms.
_ANSWERS: dict[str, Answer] = {"ready": "given", "running": "kept", "gone": "gone"}
# Dask's `unknown-task-duration`, which the remaining work counts for a task without measurements.
_DASKS_GUESS = 0.5


class CoreAdapter(Decider):
    """A decider that applies our stealing and placement."""

    def __init__(self, scheduler: Scheduler, policy: str, rules: SchedulingSettings, seed: int) -> None:
        self.links = Links()
        self.facts = SimulatedFacts(scheduler)
        self.core = SchedulingCore(
            self.facts,
            make_policy(policy, rules.parameters, seed),
            self.links,
            coalesce=rules.coalesce,
            tick=rules.tick,
        )
        self.ledger = self.core.ledger
        self.facts.ledger = self.ledger
        self.candidates = Candidates(self.ledger, self.links, rules.placement, self._is_open)
        self.facts.candidates = self.candidates
        self._scheduler = scheduler
        self._clock = scheduler.clock
        self._steals = not isinstance(self.core.policy, NoStealing)
        self._sends = rules.scheduler_sends
        self._ran: dict[str, float] = {}  # by prefix without measurements: the longest run so far
        self._freed = False
        self._measured = 0.0, 0.0  # time of the last load measurement, and the scheduler's busy seconds then
        self._since: dict[int, float] = {}  # by task that waits for a worker: since when
        self._held: WorkerTask  # the last finished task's
        self._acts: dict[type, Callable[[Any], None]] = {
            events.Ask: self._ask, events.HandOver: self._hand_over, events.PlaceAgain: self._place_again,
            events.Wake: self._wake, events.Hurry: self._hurry, events.StealCompleted: self._stolen,
            # The core counts these already.
            events.RequestSettled: lambda settled: None,
        }  # fmt: skip

    # ---- observe -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the periodic events."""
        self._clock.background(self._clock.now + self.core.tick, self._tick)

    def learn(self, seconds: Mapping[str, float]) -> None:
        """Load the durations that Dask measured before the plugin was added."""
        for prefix, measured in seconds.items():
            self._tell(events.DurationLearned(prefix, HOST, measured))

    def joined(self, record: WorkerRecord) -> None:
        """Add the worker to the ledger."""
        spec, flops = record.spec, CORE_FLOPS * record.spec.speed
        self._tell(events.SpeedLearned(spec.device, flops, flops))
        self._tell(events.WorkerJoined(record.address, record.nthreads, spec.host, spec.device))
        self._tell(events.MemoryReported(record.address, spec.memory))

    def left(self, record: WorkerRecord) -> None:
        """Remove the worker from the ledger."""
        self._tell(events.WorkerLeft(record.address))
        self.facts.gone(record.address)

    def changed(self, record: WorkerRecord) -> None:
        """Record whether the worker accepts tasks."""
        self._tell(events.AcceptsTasks(record.address, record.accepts))

    def assigned(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Add the task to the worker's queue."""
        spec, takes = job.spec, self.facts.takes(job)
        assigned = events.TaskAssigned(
            job.number, record.address, spec.prefix, job.priority, spec.annotated, nbytes=takes
        )
        self._tell(assigned)

    def finished(self, job: VirtualTask, record: WorkerRecord, held: WorkerTask) -> None:
        """Learn the task's duration, and its move's."""
        self._held = held
        self._tell(events.TaskFinished(job.number, True, held.stop - held.start))
        self.facts.done(job, record.address)
        self._freed = True

    def dropped(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Remove the task from the worker's queue."""
        self._tell(events.TaskFinished(job.number))

    def arrived(self, address: Address, job: VirtualTask, kind: str, seconds: float) -> None:
        """Learn the link's latency and bandwidth from a transfer."""
        self._tell(events.TransferLearned(kind, job.spec.nbytes, seconds))
        self.facts.came(job, address)

    def released(self, job: VirtualTask) -> None:
        """Subtract the result's bytes from its holders."""
        self.facts.dropped(job)
        self._freed = True

    def settled(self) -> None:
        """Record that pending messages are sent now, and check again the tasks that wait for memory."""
        self._tell(events.MessagesSent())
        if self._freed and self.ledger.counts_bytes and self._scheduler.has_unplaced:
            self._freed = False
            self._scheduler.retry()

    def replied(self, address: Address, job: VirtualTask, request: int, state: str) -> None:
        """Pass on a victim's answer to the newest request for a task; ignore answers to older ones."""
        pending = self.ledger.requests.get(job.number)
        if pending is not None and pending.number == request:
            self._tell(events.StealAnswered(job.number, _ANSWERS[state]))

    def _tick(self) -> None:
        (then, before), now, busy = self._measured, self._clock.now, self._scheduler.busy
        self._measured = now, busy
        self._tell(events.LoopMeasured(min((busy - before) / (now - then), 1.0)))
        if self._steals:
            self._scheduler.when_idle(self._look)
        if self.ledger.counts_bytes and self._scheduler.has_unplaced:
            self._scheduler.when_idle(self._scheduler.retry)
        self._clock.background(self._clock.now + self.core.tick, self._tick)

    def _look(self) -> None:
        """Update which tasks workers run, let the core look at all workers, and check for overdue tasks."""
        for address, record in self._scheduler.records.items():
            self._tell(events.WorkerReported(address, self._clock.now, frozenset(record.live.runs())))
        self._tell(events.Tick())

    # ---- enact ---------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """Pass an event to the core and carry out its decisions, which takes the scheduler time."""
        cluster, steps = self._scheduler.world.cluster, self.core.steps
        decided = self.core.handle(event, self._clock.now)
        if self.core.steps > steps:
            self._scheduler.think(cluster.per_step)
        self._scheduler.world.counts.update(self.core.counts, steps=float(self.core.steps))
        for instruction in decided:
            self._acts[type(instruction)](instruction)
        victims = {instruction.victim for instruction in decided if isinstance(instruction, events.Ask)}
        self._scheduler.think(cluster.per_send * len(victims))

    def _wake(self, instruction: events.Wake) -> None:
        if self._steals:
            self._clock.background(
                instruction.at, self._scheduler.when_idle, partial(self._tell, events.WakeDue(instruction.at))
            )

    def _hurry(self, instruction: events.Hurry) -> None:
        """Send a worker's messages soon, or in Dask's batches; a cluster may set the interval."""
        record, soon = self._scheduler.records.get(instruction.worker), self._sends
        if record is not None and self._scheduler.world.cluster.to_worker is None:
            record.live.inbox.interval = soon if instruction.soon else max(STOCK_TO_WORKER, soon)

    def _ask(self, instruction: events.Ask) -> None:
        job, record = self.facts.job(instruction.key), self._scheduler.records[instruction.victim]
        self._scheduler.send(record, record.live.asked, job, self.ledger.requests[instruction.key].number)

    def _hand_over(self, move: events.HandOver) -> None:
        records = self._scheduler.records
        self._scheduler.move(self.facts.job(move.key), records[move.victim], records[move.thief])

    def _place_again(self, instruction: events.PlaceAgain) -> None:
        job = self.facts.job(instruction.key)
        if job.on in self._scheduler.records:
            self._scheduler.place_again(job, self._scheduler.records[job.on])

    def _stolen(self, arrived: events.StealCompleted) -> None:
        """Record the steal from request to start, which only the simulation knows."""
        held, spec = self._held, self._held.job.spec
        lane = arrived.thief, held.lane
        span = Span(
            "steal", spec.key, spec.prefix, *lane, arrived.requested, held.start, source=arrived.victim
        )
        self._scheduler.world.spans.append(span)

    # ---- place ---------------------------------------------------------------------------------------------

    def where(self, job: VirtualTask) -> Address | None:
        """Return the worker where the task is projected to finish first."""
        now, candidates = self._clock.now, self.candidates
        task = self.facts.task(job, waited=now - self._since.setdefault(job.number, now))
        held, nbytes = self.facts.held(job)
        workers = candidates.candidates(task, held, nbytes, job.priority, now)
        inputs = self.facts.inputs(job, [worker.address for worker in workers])
        answer = candidates.choose(task._replace(inputs=inputs), workers, self.ledger.fresh)
        if not isinstance(answer, WorkerChoice):
            return None
        del self._since[job.number]
        return answer.worker

    def _is_open(self, address: Address) -> bool:
        return self.ledger.rows[address].accepts

    def _seconds(self, job: VirtualTask) -> tuple[float, bool]:
        return self.candidates.seconds(job.spec.prefix, job.spec.annotated)

    def suits(self, job: VirtualTask, record: WorkerRecord) -> bool:
        """Whether the worker has time and memory for the task, or no better worker is to be expected."""
        now, candidates = self._clock.now, self.candidates
        if not candidates.are_alike:
            task = self.facts.task(job)
            if candidates.helping(task, (record.address,), self._scheduler.queued, now) is None:
                return False
        free = (record.address,)
        return bool(candidates.in_time(*self._seconds(job), free, self.ledger.fresh, now))

    def ahead(self, job: VirtualTask, record: WorkerRecord) -> int:
        """Return how many more queued tasks a worker is sent that was just given one; `job` is the next."""
        nbytes = self.facts.size_of(job.spec.prefix)
        return self.candidates.ahead(record.address, self._seconds(job), nbytes, self._clock.now)

    def projected(self, job: VirtualTask) -> float:
        """Return the rest of the projected seconds; an overdue task is projected to run for as long again.

        Without a measured duration, a task is projected to take twice the longest run of its prefix so far, but at
        least the guess: as in Dask.
        """
        prefix = job.spec.prefix
        seconds, known = self._seconds(job)
        entry = self.ledger.entries.get(job.number)
        ran = self._clock.now - entry.started if entry is not None and entry.started is not None else 0.0
        if not known:
            self._ran[prefix] = max(self._ran.get(prefix, 0.0), ran)
            seconds = extrapolate(self._ran[prefix], _DASKS_GUESS)
        return seconds_left(seconds, ran)

    def set_end(self, address: Address, at: float) -> None:
        """Set the worker's end in the ledger."""
        self._tell(events.EndAnnounced(address, at))

    def set_fresh(self, seconds: float) -> None:
        """Set the seconds that a newly started worker would have."""
        self.ledger.fresh = seconds

    def busy(self, record: WorkerRecord) -> tuple[float, float]:
        """Return the tasks per thread, and how slow the worker is."""
        return len(record.processing) / record.nthreads, self.ledger.rows[record.address].slowness
