"""Which waiting tasks move to which workers: `step(snapshot, state) -> moves`.

Rules, of every policy:
- a thief accepts tasks and is not the victim; it is one of the tasks' allowed workers, and none that they came from,
  unless they have waited since for several times what moving them costs;
- no task moves to a device that has no room for what it takes there, inputs included;
- what is in a queue may move, what runs does not; the last to start moves first, the cheapest among those.
And of `Informed`, which knows enough for it:
- a victim is not left under its own threshold, unless it is paused and starts nothing;
- a task moves when it is projected to finish earlier by a margin; one that is shorter than its move, or of a duration
  that nobody knows, when it is sure to wait for several times what the move costs.  Sure is what is known of those
  before it, and what was seen: that nothing started there for so long (as long again is to be expected).  So nothing
  waits for more than a small multiple of its move beside a worker that has nothing to do, and what would wait for less
  stays.
- no task of known seconds moves to a worker that ends before it would; one that waits where it will not be done in
  time leaves first, and whatever it costs;
- a thief that is a device asks the victims of its own host first.

A threshold is seconds of backlog: a worker with less is a thief, one with more may be a victim.  It follows the
measured seconds from a request to the stolen task's start, so that the task comes just when the thief runs dry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from dask_ferro import options
from dask_ferro.policy.estimates import SPARE
from dask_ferro.policy.facts import Address, Move, Outcome, TaskFacts, Worker
from dask_ferro.policy.stealing.snapshot import Snapshot
from dask_ferro.policy.stealing.tentative import Tentative, is_far, keeps, may, shared

# For each thief, whom it would ask, in order.
Asked = Mapping[Address, tuple[Address, ...]]


@dataclass(frozen=True)
class StealingParameters:
    """Parameters of stealing: options, in seconds, tasks and shares."""

    threshold: float = options.seconds(
        "5ms",
        "Seconds of backlog under which a worker steals, at first. It follows the measured time from a steal's"
        " request to the stolen task's start.",
    )
    threshold_least: float = options.seconds("1ms", "The least that the threshold adapts to.")
    threshold_most: float = options.seconds("250ms", "The most that the threshold adapts to.")
    reserve: float = options.number(
        1.5, "The threshold as a multiple of the measured time from request to start.", unit="times"
    )
    threshold_follow: float = options.number(
        0.25,
        "The share by which the mean of that time, and the threshold, follow each new measurement.",
        most=1.0,
    )
    threshold_dry: float = options.number(
        1.25,
        "What the threshold is multiplied by when a stolen task came to a worker that had run dry.",
        unit="times",
    )
    threshold_refused: float = options.number(
        0.8, "What the threshold is multiplied by when a steal was refused, or came too late.", unit="times"
    )
    chunk: float = options.number(0.5, "Of a victim's surplus, the share that one step may take.", most=1.0)
    reach: float = options.seconds(
        "100ms", "Seconds of work that one step gives a thief, at most; but always one task."
    )
    margin: float = options.seconds("2ms", "A task moves when it is projected to finish so much earlier.")
    transfer_margin: float = options.number(
        0.5, "And earlier by this share of its transfer, too; moving twice then never pays."
    )
    shortest: float = options.seconds(
        "2ms",
        "What a move costs the scheduler and two workers beside the transfer. A task projected to be shorter moves"
        " only when it is sure to wait for `bears` times what its move costs.",
    )
    bears: float = options.number(
        10.0,
        "How long a task may wait, in costs of its move, transfer included. A task that moves when it has waited"
        " for as long as moving costs pays twice at most (renting skis); some more, as moves are refused and delay"
        " others.",
        unit="times",
    )
    guesses: int = options.count(
        2, "Queue from which tasks of unknown duration may be taken.", unit="tasks a thread", least=0
    )
    patience: float = options.seconds(
        "500ms",
        "After so long they may be taken from a shorter queue, whatever their moves cost; and a task that has"
        " waited for so long counts as overdue: no projection holds it where it is any more. A task waits as long"
        " for room on a device.",
    )
    doubt: float = options.number(
        0.25,
        "Share of the time that an overdue task has waited for which it is expected to wait on, where only a"
        " worker of another device class could take it, and its own goes on to start tasks.",
    )
    tries: int = options.count(8, "Tasks of a queue that are weighed for one move.", unit="tasks")
    quick: int = options.count(
        16,
        "Tasks that the first look of a step shows for each thread of a thief, and for one more: a thread takes"
        " `reach` seconds of work, mostly a few tasks. Where none of them moves, a second look shows 640.",
        unit="tasks a thread",
    )
    plenty: float = options.seconds(
        "10ms",
        "Seconds of queue a thread from which a worker does not notice that its messages are gathered for 5 ms, as"
        " Dask does; to one that has less they leave within `scheduler-sends`.",
    )
    saturated: float = options.number(
        0.9,
        "Share of the time that the scheduler's loop is busy, or waits for a core, from which messages to all"
        " workers are gathered for 5 ms: it has no time for more of them, and each takes some 0.1 ms.",
    )
    pause: float = options.seconds(
        "1s",
        "How long a paused worker is projected to stay paused. Dask looks at a worker's memory ten times a second,"
        " and what filled it takes longer than that to spill or to be used up.",
    )
    spare: float = options.seconds(
        f"{SPARE:g}s",
        "The time between the end of a task and that of its worker, where that is known, at least.",
    )


class StealingState(NamedTuple):
    """What a policy remembers.

    Attributes
    ----------
    thresholds : mapping of address to seconds
    victims : mapping of address to address
        The last worker from which each stole with success.
    delays : mapping of address to seconds
        Mean of the measured seconds from request to start.
    turns : int
        Steps so far: what chance is drawn from.
    """

    thresholds: Mapping[Address, float] = {}
    victims: Mapping[Address, Address] = {}
    delays: Mapping[Address, float] = {}
    turns: int = 0


@dataclass(frozen=True)
class Policy(ABC):
    """A stealing policy: a value, that decides by what it is shown and by what is remembered.

    Attributes
    ----------
    parameters : StealingParameters
    seed : int
        Of what it leaves to chance.
    projects : bool
        Whether its steps look at projected seconds; otherwise whatever waits beside an idle worker is overdue.
    """

    parameters: StealingParameters = StealingParameters()
    seed: int = 0
    projects: ClassVar[bool] = True

    def asks(
        self, thieves: Sequence[Address], everyone: Sequence[Address], state: StealingState
    ) -> Asked | None:
        """Return whose queues a step wants to see for each thief; None: the longest ones.

        Parameters
        ----------
        everyone : sequence of addresses
            All workers, sorted.
        """
        return None

    @abstractmethod
    def step(self, snapshot: Snapshot, state: StealingState) -> tuple[Move, ...]:
        """Return the moves to make now."""


def threshold_of(state: StealingState, worker: Address, parameters: StealingParameters) -> float:
    """Return a worker's threshold in seconds of backlog."""
    return state.thresholds.get(worker, parameters.threshold)


def adapted(
    state: StealingState, outcomes: Iterable[Outcome], parameters: StealingParameters
) -> StealingState:
    """Return the state after what became of earlier moves."""
    outcomes = tuple(outcomes)
    if not outcomes:
        return state
    p = parameters
    thresholds, delays, victims = dict(state.thresholds), dict(state.delays), dict(state.victims)
    for outcome in outcomes:
        thief = outcome.thief
        value = thresholds.get(thief, p.threshold)
        if outcome.kind == "started":
            victims[thief] = outcome.victim
            mean = delays.get(thief, outcome.seconds)
            mean = delays[thief] = mean + p.threshold_follow * (outcome.seconds - mean)
            value += p.threshold_follow * (p.reserve * mean - value)
            if outcome.dry:
                value *= p.threshold_dry
        else:
            victims.pop(thief, None)
            value *= p.threshold_refused
        thresholds[thief] = min(max(value, p.threshold_least), p.threshold_most)
    return state._replace(thresholds=thresholds, delays=delays, victims=victims)


def without(state: StealingState, worker: Address) -> StealingState:
    """Return the state without a worker that is gone."""
    kept = {k: v for k, v in state.victims.items() if worker not in (k, v)}
    thresholds = {k: v for k, v in state.thresholds.items() if k != worker}
    delays = {k: v for k, v in state.delays.items() if k != worker}
    return state._replace(thresholds=thresholds, victims=kept, delays=delays)


def is_starving(worker: Worker, threshold: float) -> bool:
    """Whether a worker should look for work elsewhere.

    One that is about to finish what others wait for is about to have work: it looks when it has none.
    """
    if not worker.accepts or (worker.waiting and worker.busy >= worker.nthreads):
        return False
    return worker.starts_in <= 0 or (worker.starts_in < threshold and not worker.unlocks)


class Informed(Policy):
    """Looks at the longest queues of the cluster, and moves what gains."""

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
        """Return the moves to one thief: from the fullest victim, then the next one."""
        p = self.parameters
        moves: list[Move] = []
        for_whom = tentative.worker(address)
        near = (a for a in snapshot.near if tentative.worker(a).host == for_whom.host)
        asked = dict.fromkeys((*snapshot.outlasted, *snapshot.busiest, *near))
        victims = sorted(
            (tentative.worker(v) for v in asked if v != address),
            key=lambda w: (w.starts_in <= w.ends_in, is_far(w, for_whom), -w.starts_in, w.address),
        )
        for first in victims:
            surplus = first.starts_in - threshold_of(state, first.address, p)
            share = p.chunk * surplus * first.nthreads
            while True:
                thief, victim = tentative.worker(address), tentative.worker(first.address)
                if thief.busy >= thief.nthreads and thief.starts_in >= p.reach:
                    return moves
                found = self._best(thief, victim, tentative, threshold_of(state, victim.address, p))
                if found is None:
                    break
                task, gain, transfer = found
                share -= task.seconds * victim.slowness
                if moves and moves[-1].victim == victim.address and share < 0:
                    break
                nbytes = tentative.at(address, task).bytes_on(thief)
                tentative.move(task, victim, thief, transfer)
                moves.append(Move(task.key, victim.address, address, gain, transfer, nbytes))
        return moves

    def _best(
        self, thief: Worker, victim: Worker, tentative: Tentative, reserve: float
    ) -> tuple[TaskFacts, float, float] | None:
        """Return the task to move next with its gain and its transfer, of the last ones of the victim's queue."""
        best: tuple[tuple[float, int], TaskFacts, float, float] | None = None
        tried = 0
        for place, task in enumerate(tentative.queue(victim.address)):
            if tried >= self.parameters.tries:
                break
            if not may(tentative.at(thief.address, task), thief):
                continue
            here = self._at_victim(task, victim)
            if self._stays(task, thief, victim, here, 0.0):
                # Even if its transfer took no time.
                continue
            tried += 1
            # In full for each, though the second reader of an input waits for it no longer than the first one does:
            # charged once, large tiles went to and fro, and an iteration of GEMM took a fifth longer.
            transfer = tentative.links.seconds(task.inputs, thief, tentative.hosts)
            # As the last of its queue it finishes when the queue does; one before it could gain no more.
            waits = max(victim.starts_in - here.adds, task.blocked, self._doubted(task, victim, thief))
            if (here.is_held and waits < reserve) or self._stays(task, thief, victim, here, transfer):
                continue
            ends = self._ends_at_thief(task, thief, victim, here, transfer)
            if ends is None:
                continue
            stays = waits + here.seconds + (0.0 if victim.accepts else self.parameters.pause)
            readers = shared(task, thief, tentative.readers(victim.address)) if transfer else 1
            gain = self._gain(task, thief, here, stays - ends, transfer, readers)
            if gain > 0 and (best is None or (transfer, place) < best[0]):
                best = ((transfer, place), task, gain, transfer)
        return best[1:] if best is not None else None

    def _at_victim(self, task: TaskFacts, victim: Worker) -> _AtVictim:
        seconds = task.seconds * victim.slowness
        adds = seconds / victim.nthreads
        # Where it is now it would be lost, and run again from its beginning.
        spare = self.parameters.spare
        lost = victim.ends_in < inf and not victim.has_time(victim.starts_in - adds, seconds + spare)
        return _AtVictim(seconds, adds, lost, victim.accepts and not lost, _surely_waits(task, victim))

    def _ends_at_thief(
        self, task: TaskFacts, thief: Worker, victim: Worker, here: _AtVictim, transfer: float
    ) -> float | None:
        """Return in how many seconds the thief would be done with a task; None: it cannot be told, or is too late."""
        p = self.parameters
        runs = task.on(thief)
        # Nobody knows what it takes on such a device.
        if runs is None:
            if here.sure < self._long(transfer):
                return None
            # But that it does not start where it is.
            runs = task.seconds
        if task.overdue and not task.known and thief.device == victim.device:
            # A guess, times the slowness seen in a few short tasks, holds nothing back.
            runs = min(runs, here.seconds)
        begins = max(thief.starts_in, transfer)
        if thief.ends_in < inf and task.known and not thief.has_time(begins, runs + p.spare):
            return None
        return begins + runs

    def _gain(
        self, task: TaskFacts, thief: Worker, here: _AtVictim, earlier: float, transfer: float, readers: int
    ) -> float:
        """Return the seconds that a move gains.

        Parameters
        ----------
        earlier : float
            Seconds by which the task is projected to be done earlier.
        transfer : float
            Seconds that its inputs take, for so many tasks of the queue at once.
        """
        p = self.parameters
        gain = earlier - p.margin - p.transfer_margin * transfer / readers
        if keeps(task, thief):
            gain -= task.seconds
        return max(gain, here.seconds) if here.lost else gain

    def _long(self, transfer: float) -> float:
        """Return the seconds that are long for a task to wait, for what its move costs."""
        return self.parameters.bears * (self.parameters.shortest + transfer)

    def _doubted(self, task: TaskFacts, victim: Worker, thief: Worker) -> float:
        """Return the seconds that an overdue task is expected to wait on, whatever is projected.

        As long again as it has waited.  For a thief of another device class as long as the queue has stood still, or a
        share of what it has waited: a device that is twenty times faster keeps what it will soon get to.
        """
        if not task.overdue or thief.device == victim.device:
            return task.overdue
        return max(victim.stalled_for, self.parameters.doubt * task.overdue)

    def _stays(
        self, task: TaskFacts, thief: Worker, victim: Worker, here: _AtVictim, transfer: float
    ) -> bool:
        """Whether a task stays, whatever it gains: short, a guess, or moved before, and not sure to wait long."""
        p, long = self.parameters, self._long(transfer)
        if here.is_held and task.seconds < p.shortest and here.sure < long:
            return True
        if here.is_held and not task.known:
            few = victim.unknown < p.guesses * victim.nthreads
            if few and here.sure < min(p.patience, long):
                return True
        if task.origins and (not task.known or thief.address in task.origins):
            # Seen, not projected, and twice as long each time: what moved is not to go to and fro.
            seen = max(victim.stalled_for, task.overdue)
            return seen < min(p.patience, long) * 2.0 ** len(task.origins)
        return False


class _AtVictim(NamedTuple):
    """A task where it waits: the seconds that it takes, and adds to the queue, and is sure to wait.

    `lost`: it would not be done before its worker ends; `is_held`: its worker would start it, and be there until it is
    done.
    """

    seconds: float
    adds: float
    lost: bool
    is_held: bool
    sure: float


def _surely_waits(task: TaskFacts, victim: Worker) -> float:
    """Return the seconds that the last task of a queue is sure to wait, as far as anything is."""
    own = task.seconds * victim.slowness / victim.nthreads if task.known else 0.0
    return max(victim.surely_in - own, victim.stalled_for, task.blocked, task.overdue)
