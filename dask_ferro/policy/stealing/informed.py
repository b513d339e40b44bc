"""The stealing policy `informed`, and the base class and parameters of all policies: `step(snapshot, state) -> moves`.

Rules of every policy:
- a thief accepts tasks, is not the victim, is allowed for the task, and is no worker that the task was stolen from,
  unless the task has since waited for several times the cost of its move;
- no task moves to a device that has no room for it and its inputs;
- only queued tasks move, never running ones; the last to start moves first, the cheapest among those.

Rules of `InformedPolicy`, which uses projections:
- a task stays that is projected to start within its worker's threshold, unless that worker is paused and starts
  nothing: a request takes as long to be answered, and is refused by then;
- a task moves when it is projected to finish earlier by a margin.  A task that is shorter than its move moves when it
  is projected to wait for several times the cost of the move.  So no task waits beside an idle worker for more than a
  small multiple of its move's cost, and tasks with a shorter wait stay;
- no task of known duration moves to a worker that ends before it would finish.

A threshold is seconds of backlog: a worker with less is a thief, one with more may be a victim.  It follows the
measured seconds from a request to the stolen task's start, so that the task arrives just when the thief runs dry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from dask_ferro.policy.estimates import BURDEN, SPARE
from dask_ferro.policy.facts import Address, Move, Outcome, TaskFacts, Worker
from dask_ferro.policy.stealing.snapshot import Snapshot
from dask_ferro.policy.stealing.tentative import Tentative, may

# The longest threshold in seconds: a stolen task may have waited behind a long one that came after it.
_LONGEST = 0.25
# For each thief, the victims that it would ask, in order.
Asks = Mapping[Address, tuple[Address, ...]]


@dataclass(frozen=True)
class StealingParameters:
    """Parameters of stealing, in seconds, tasks and shares."""

    # Seconds of backlog under which a worker steals, at first.
    threshold: float = 0.005
    # The share by which it follows each measured time from a steal's request to the stolen task's start.
    threshold_follow: float = 0.25
    # The most seconds of work that one step gives a thief; it always gives one task.
    reach: float = 0.1
    # A task moves when it is projected to finish earlier by this much, so that moving a task twice never pays.
    margin: float = 0.002
    burden: float = BURDEN
    # The cost of a move to the scheduler and two workers beside the transfer.  A task projected to be shorter moves
    # only when it is projected to wait for `bears` times the cost of its move.
    shortest: float = 0.002
    # A task that moves after waiting for as long as its move costs pays at most twice (ski rental); the multiple is
    # higher, as moves are refused and delay others.
    bears: float = 10.0
    # A task of unknown duration moves when it has waited for so long, or for `bears` times the cost of its move.  One
    # that has waited for so long counts as overdue: projections no longer keep it in its queue.
    patience: float = 0.5
    # Tasks of a queue considered for one move.
    tries: int = 8
    # Tasks that a step first considers for each thread of its thieves, plus one: a thread takes `reach` seconds of
    # work, mostly a few tasks.  If none of them moves, the step considers up to 640.
    quick: int = 16
    # Seconds of queue per thread from which a worker's messages are batched for 5 ms, as Dask does.
    plenty: float = 0.01
    # The share of time that the scheduler's loop is busy, or waits for a core, from which messages to all workers are
    # batched for 5 ms: each message costs the loop some 0.1 ms.
    saturated: float = 0.9
    # How long a paused worker is projected to stay paused.  Dask checks a worker's memory ten times a second, and it
    # takes longer than that to spill or release the data.
    pause: float = 1.0
    # The least time between the projected end of a task and the end of its worker, where that is known.
    spare: float = SPARE


class StealingState(NamedTuple):
    """The memory of a policy between steps.

    Attributes
    ----------
    thresholds : mapping of address to seconds
    victims : mapping of address to address
        The last worker from which each thief stole successfully.
    turns : int
        Number of steps so far, from which random choices are derived.
    """

    thresholds: Mapping[Address, float] = {}
    victims: Mapping[Address, Address] = {}
    turns: int = 0


@dataclass(frozen=True)
class Policy(ABC):
    """A stealing policy: a value whose decisions depend only on the snapshot and the state.

    Attributes
    ----------
    parameters : StealingParameters
    seed : int
        Seed of random choices.
    projects : bool
        Whether its steps use projected seconds; otherwise every task that waits beside an idle worker is overdue.
    """

    parameters: StealingParameters = StealingParameters()
    seed: int = 0
    projects: ClassVar[bool] = True

    def asks(
        self, thieves: Sequence[Address], everyone: Collection[Address], state: StealingState
    ) -> Asks | None:
        """Return the victims whose queues a step needs for each thief; None: the longest queues.

        Parameters
        ----------
        everyone : collection of addresses
            All workers.
        """
        return None

    @abstractmethod
    def step(self, snapshot: Snapshot, state: StealingState) -> tuple[Move, ...]:
        """Return the moves to make now."""


def threshold_of(state: StealingState, worker: Address, parameters: StealingParameters) -> float:
    """Return a worker's threshold in seconds of backlog."""
    return state.thresholds.get(worker, parameters.threshold)


def adapt(state: StealingState, outcomes: Iterable[Outcome], parameters: StealingParameters) -> StealingState:
    """Return the state updated with the outcomes of earlier moves."""
    outcomes = tuple(outcomes)
    if not outcomes:
        return state
    thresholds, victims = dict(state.thresholds), dict(state.victims)
    for kind, victim, thief, seconds in outcomes:
        if kind == "started":
            victims[thief] = victim
            value = thresholds.get(thief, parameters.threshold)
            thresholds[thief] = value + parameters.threshold_follow * (min(seconds, _LONGEST) - value)
        else:
            victims.pop(thief, None)
    return state._replace(thresholds=thresholds, victims=victims)


def forget_worker(state: StealingState, worker: Address) -> StealingState:
    """Return the state without a worker that has left."""
    victims = {k: v for k, v in state.victims.items() if worker not in (k, v)}
    thresholds = {k: v for k, v in state.thresholds.items() if k != worker}
    return state._replace(thresholds=thresholds, victims=victims)


def is_starving(worker: Worker, threshold: float) -> bool:
    """Return whether a worker should steal.

    One whose running task unlocks others is about to have work, so it steals only when it has none.
    """
    if not worker.accepts or (worker.waiting and worker.busy >= worker.nthreads):
        return False
    return worker.starts_in <= 0 or (worker.starts_in < threshold and not worker.unlocks)


class InformedPolicy(Policy):
    """The policy that steals from the longest queues of the cluster whenever a move gains time."""

    def step(self, snapshot: Snapshot, state: StealingState) -> tuple[Move, ...]:
        """Return moves from the longest queues to the workers that run dry first."""
        p = self.parameters
        tentative = Tentative(snapshot)
        starving = [tentative.worker(a) for a in snapshot.hungry]
        starving = [w for w in starving if is_starving(w, threshold_of(state, w.address, p))]
        starving.sort(key=lambda w: (w.starts_in, w.address))
        moves: list[Move] = []
        for thief in starving:
            moves += self._feed(thief.address, snapshot, state, tentative)
        return tuple(moves)

    def _feed(
        self, address: Address, snapshot: Snapshot, state: StealingState, tentative: Tentative
    ) -> list[Move]:
        """Return the moves to one thief, taken from the fullest victim first."""
        p = self.parameters
        moves: list[Move] = []
        victims = [tentative.worker(v) for v in snapshot.busiest if v != address]
        victims.sort(key=lambda w: (-w.starts_in, w.address))
        for first in victims:
            while True:
                thief, victim = tentative.worker(address), tentative.worker(first.address)
                if thief.busy >= thief.nthreads and thief.starts_in >= p.reach:
                    return moves
                found = self._best(thief, victim, tentative, threshold_of(state, victim.address, p))
                if found is None:
                    break
                task, gain, transfer = found
                tentative.move(task, victim, thief, transfer)
                moves.append(Move(task.key, victim.address, address, gain, transfer, task.bytes_on(thief)))
        return moves

    def _best(
        self, thief: Worker, victim: Worker, tentative: Tentative, soon: float
    ) -> tuple[TaskFacts, float, float] | None:
        """Return the best task to steal from the end of the victim's queue, its gain and its transfer seconds.

        A task that starts within `soon` seconds stays.
        """
        best: tuple[tuple[float, int], TaskFacts, float, float] | None = None
        tried = 0
        for place, task in enumerate(tentative.queue(victim.address)):
            if tried >= self.parameters.tries:
                break
            if not may(task, thief):
                continue
            seconds = task.seconds * victim.slowness
            # As the last in its queue it finishes when the queue does; earlier tasks could gain no more.
            waits = victim.starts_in - seconds / victim.nthreads
            # An overdue one is expected to wait as long again, whatever was projected; but a device that is much faster
            # keeps tasks that it will soon start.
            waits = max(waits, task.blocked, task.overdue if thief.device == victim.device else 0.0)
            if (victim.accepts and waits < soon) or self._stays(task, thief, victim, waits, 0.0):
                # It would stay even if its transfer took no time.
                continue
            tried += 1
            # The full transfer for each task, although readers of one input share it: charged once, large tiles moved
            # back and forth, and an iteration of GEMM took a fifth longer.
            latency, occupied = tentative.links.transfer(task.inputs, thief, tentative.hosts)
            transfer = latency + occupied
            if transfer and self._fetches(task, victim):
                # The transfers that take so long already would take as long to another worker.
                transfer = max(transfer, min(task.waited, self.parameters.patience))
            if self._stays(task, thief, victim, waits, transfer):
                continue
            ends = self._ends_at_thief(task, thief, transfer)
            if ends is None:
                continue
            stays = waits + seconds + (0.0 if victim.accepts else self.parameters.pause)
            gain = stays - ends - self.parameters.margin - self.parameters.burden * occupied
            if not task.wants(thief):  # its affinity is for others
                gain -= task.seconds
            if gain > 0 and (best is None or (transfer, place) < best[0]):
                best = ((transfer, place), task, gain, transfer)
        return best[1:] if best is not None else None

    def _ends_at_thief(self, task: TaskFacts, thief: Worker, transfer: float) -> float | None:
        """Return the seconds until the thief would have finished a task; None: unknown, or after the thief ends."""
        runs = task.on(thief)
        # Its duration on such a device is unknown.
        if runs is None:
            if max(task.blocked, task.overdue) < self._long(transfer):
                return None
            # It is only known that it does not start where it is.
            runs = task.seconds
        begins = max(thief.starts_in, transfer)
        if thief.ends_in < inf and task.known and not thief.has_time(begins, runs + self.parameters.spare):
            return None
        return begins + runs

    @staticmethod
    def _fetches(task: TaskFacts, victim: Worker) -> bool:
        """Whether a victim fetches inputs of a task."""
        return victim.accepts and not all(victim.address in held.holders for held in task.inputs)

    def _long(self, transfer: float) -> float:
        """Return the wait in seconds that is too long for a task, given the cost of its move."""
        return self.parameters.bears * (self.parameters.shortest + transfer)

    def _stays(self, task: TaskFacts, thief: Worker, victim: Worker, waits: float, transfer: float) -> bool:
        """Whether a task stays whatever it would gain: short, unknown or moved back, and no long wait."""
        p, long = self.parameters, self._long(transfer)
        if victim.accepts and task.seconds < p.shortest and waits < long:
            return True
        if not task.known or thief.address in task.origins:
            # Observed rather than projected seconds, doubled by each move, so that tasks do not move back and forth.
            return task.waited < min(p.patience, long) * 2.0 ** len(task.origins)
        return False
