"""The replay of a recording: the same events and the same facts have to give the same instructions.

The core is made from the recording's head, and the instructions of each event are compared with the recorded ones,
byte for byte.  The replay ends at the first difference: after that the core would ask questions without recorded
answers.  Another policy may be evaluated at the same moments: its moves are reported beside the recorded ones and
not carried out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.policy.estimates import Learning
from dask_ferro.policy.events import Event
from dask_ferro.policy.facts import Address, Key, Move, TaskFacts
from dask_ferro.policy.recording.recorder import FORM, VERSION, Question, out_of
from dask_ferro.policy.recording.state import restore
from dask_ferro.policy.recording.values import Json, decode, text
from dask_ferro.policy.scheduling_core import SchedulingCore
from dask_ferro.policy.stealing.informed import Policy, StealingParameters
from dask_ferro.policy.stealing.policies import named
from dask_ferro.policy.worker_load import Entry, WorkerLoad

# Errors that reading a damaged or foreign file may raise.
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


class Unanswered(LookupError):
    """A question of the core that has no recorded answer."""


class RecordedFacts:
    """The recorded facts, with the newest answer to each question.

    Attributes
    ----------
    guesses : bool
        Whether an unanswered question gets a neutral answer: the task may not move, no bytes.
    """

    def __init__(self) -> None:
        self.guesses = False
        self._newest: dict[Question, Json] = {}

    def learn(self, facts: Iterable[Json]) -> None:
        """Store the answers that come with an event."""
        for fact in facts:
            *question, answer = map(decode, fact)
            self._newest[tuple(question)] = answer

    def _answer(self, nothing: object, *question: object) -> Json:
        if question not in self._newest:
            if self.guesses:
                return nothing
            raise Unanswered(f"{question[0]}({', '.join(map(repr, question[1:]))}) was not asked")
        return self._newest[question]

    def begin(self, thieves: Sequence[Address]) -> None:
        """Do nothing: the tasks were described when they were recorded."""

    def waiting(self, entry: Entry, row: WorkerLoad) -> TaskFacts | None:
        """Return the recorded facts of a queued task."""
        found: TaskFacts | None = self._answer(None, "waiting", entry.key)
        return found

    def reserve(self, key: Key, victim: Address, thief: Address) -> bool:
        """Return whether a task could be requested."""
        return bool(self._answer(False, "reserve", key, victim, thief))

    def unlocks(self, key: Key) -> bool:
        """Return whether a task was the last missing input of another."""
        return bool(self._answer(False, "unlocks", key))

    def live(self, address: Address) -> int:
        """Return the device bytes that were in use."""
        return int(self._answer(0, "live", address))

    def holds(self, address: Address) -> int:
        """Return the bytes of a worker's results."""
        return int(self._answer(0, "holds", address))

    def unbound(self, entries: list[Entry]) -> list[Entry]:
        """Return the tasks that could run on more than one worker."""
        return [entry for entry in entries if self._answer(False, "unbound", entry.key)]


class Difference(NamedTuple):
    """The first event at which a replay differs from its recording.

    Attributes
    ----------
    number : int
        The event's number, from 1.
    at : float
        Its time, on the clock of the recording.
    event : Event
    recorded, now : str
        The instructions in the recording's format; for an error, its message.
    """

    number: int
    at: float
    event: Event
    recorded: str
    now: str


# The key, the victim and the thief of each move.
Moves = tuple[tuple[Key, Address, Address], ...]


class StepDecisions(NamedTuple):
    """The moves of two policies at one step."""

    at: float
    recorded: Moves
    other: Moves


class Replayed(NamedTuple):
    """The result of a replay.

    Attributes
    ----------
    policy : str
    events, instructions : int
        Numbers of those that were the same; "events" includes the one that differs.
    difference : Difference or None
        None: there is no difference.
    cut : bool
        Whether the last line is incomplete, since its writer was killed or the disk was full.
    ended : str
        Why the recording ended, where it says so.
    decisions : tuple of StepDecisions
        The steps at which another policy was evaluated and either policy moved a task.
    """

    policy: str
    events: int
    instructions: int
    difference: Difference | None = None
    cut: bool = False
    ended: str = ""
    decisions: tuple[StepDecisions, ...] = ()


class _BesideAnother(SchedulingCore):
    """A core that also evaluates another policy at each step, without carrying out its moves."""

    def beside(self, other: Policy, facts: RecordedFacts) -> None:
        """Set the other policy and the facts that both use."""
        self.other, self.recorded_facts = other, facts
        self.decisions: list[StepDecisions] = []

    def _decide(self, thieves: Sequence[Address], now: float) -> tuple[Move, ...]:
        # The core's own policy goes first, with the recorded answers; the other may ask questions that have none.
        before, policy, facts = (self.state, self.steps), self.policy, self.recorded_facts
        moves = super()._decide(thieves, now)
        after = self.state, self.steps
        facts.guesses, self.policy, (self.state, self.steps) = True, self.other, before
        try:
            others = super()._decide(thieves, now)
        finally:
            facts.guesses, self.policy, (self.state, self.steps) = False, policy, after
        if moves or others:
            self.decisions.append(StepDecisions(now, _who(moves), _who(others)))
        return moves


def _who(moves: Iterable[Move]) -> Moves:
    return tuple((move.key, move.victim, move.thief) for move in moves)


def replay(
    lines: Iterable[str],
    name: str = "events",
    *,
    policy: str | None = None,
    parameters: Mapping[str, Json] | None = None,
) -> Replayed:
    """Replay a recording and return the result.

    Parameters
    ----------
    lines : iterable of str
        Lines of a recording, complete or cut after any line.
    name : str
        The recording's name, for errors.
    policy, parameters : optional
        Another policy by name, and parameters that differ from the recorded ones: their moves at each step are
        reported.

    Raises
    ------
    ConfigError
        For a file that is no recording, has another version, or names an unknown policy.
    """
    numbered = enumerate(lines, 1)
    number, line = next(numbered, (1, ""))
    facts = RecordedFacts()
    try:
        head = json.loads(line)
        core = _core_of(head, facts, policy, parameters)
    except _FAULTS as error:
        raise ConfigError(f"{name}, line {number}: not the head of a recording: {_told(error)}") from error
    found = Replayed(head["policy"], 0, 0)
    for number, line in numbered:
        try:
            read = json.loads(line)
            if "end" in read:
                return _over(core, found._replace(ended=str(read["end"])))
            at, event = decode(read["at"]), decode(read["event"])
            facts.learn(read.get("facts", ()))
            recorded = text(read["out"])
        except _FAULTS as error:
            # Only a writer that was stopped leaves a line without a line feed.
            if isinstance(error, ValueError) and not line.endswith("\n"):
                return _over(core, found._replace(cut=True))
            raise ConfigError(f"{name}, line {number}: {_told(error)}") from error
        now, count = _handled(core, event, at)
        found = found._replace(events=found.events + 1)
        if now != recorded:
            found = found._replace(difference=Difference(found.events, at, event, recorded, now))
            break
        found = found._replace(instructions=found.instructions + count)
    return _over(core, found)


def _over(core: SchedulingCore, found: Replayed) -> Replayed:
    return found._replace(decisions=tuple(core.decisions)) if isinstance(core, _BesideAnother) else found


def _handled(core: SchedulingCore, event: Event, at: float) -> tuple[str, int]:
    """Return the outcome of an event as a recording has it, and the number of instructions."""
    try:
        decided = core.handle(event, at)
    except Unanswered as error:
        return f"the core asks a question that has no recorded answer: {error}", 0
    except Exception as error:  # noqa: BLE001 - whatever it was, it may have been recorded
        return text(out_of(error)), 0
    return text(out_of(decided)), len(decided)


def _core_of(
    head: Mapping[str, Json], facts: RecordedFacts, policy: str | None, others: Mapping[str, Json] | None
) -> SchedulingCore:
    """Return the core that a head describes; with another policy beside its own if one is given."""
    # Only the head counts, whatever the configuration of this process.
    if head.get(FORM) != VERSION:
        raise ValueError(f"got a head of form {head.get(FORM)!r}, wanted {FORM!r}: {VERSION}")
    parameters = StealingParameters(**{name: decode(read) for name, read in head["parameters"].items()})
    learning = Learning(**{name: decode(read) for name, read in head["learning"].items()})
    seed, coalesce, tick = int(head["seed"]), float(head["coalesce"]), float(head["tick"])
    own = named(head["policy"], parameters, seed)
    make = SchedulingCore if policy is None and not others else _BesideAnother
    core = make(facts, own, coalesce=coalesce, tick=tick, learning=learning)
    if isinstance(core, _BesideAnother):
        core.beside(named(policy or head["policy"], replace(parameters, **(others or {})), seed), facts)
    if head["core"] is not None:
        restore(core, head["core"])
    return core


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
