"""A recording fed to a scheduling core again: the same events, the same answers to what it asks, the same instructions.

The core is made anew by the recording's head, and each event's instructions are compared with the recorded ones, byte
for byte.  The first difference ends it: from there on the core would be told of answers to what it never asked.
Another policy may look at the same moments: what it would move is told beside what was moved, and is not done.
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

# What a recording that is no such thing, or was changed by hand, may raise while it is read.
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


class Unanswered(LookupError):
    """The core asks what it did not ask when it was recorded."""


class RecordedFacts:
    """Answers as they were recorded, the newest to each question.

    Attributes
    ----------
    guesses : bool
        Whether a question without an answer is answered as if there were nothing: no task that may move, no bytes.
    """

    def __init__(self) -> None:
        self.guesses = False
        self._newest: dict[Question, Json] = {}

    def learn(self, facts: Iterable[Json]) -> None:
        """Take the answers that an event brings."""
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
        """Nothing: what is shown was recorded."""

    def waiting(self, entry: Entry, row: WorkerLoad) -> TaskFacts | None:
        """Return a task as it was shown."""
        found: TaskFacts | None = self._answer(None, "waiting", entry.key)
        return found

    def reserve(self, key: Key, victim: Address, thief: Address) -> bool:
        """Return whether a task could be asked for."""
        return bool(self._answer(False, "reserve", key, victim, thief))

    def unlocks(self, key: Key) -> bool:
        """Return whether others waited for a task alone."""
        return bool(self._answer(False, "unlocks", key))

    def live(self, address: Address) -> int:
        """Return a device's bytes in use."""
        return int(self._answer(0, "live", address))

    def holds(self, address: Address) -> int:
        """Return the bytes of a worker's results."""
        return int(self._answer(0, "holds", address))

    def unbound(self, entries: list[Entry]) -> list[Entry]:
        """Return which tasks could run on more than one worker."""
        return [entry for entry in entries if self._answer(False, "unbound", entry.key)]


class Difference(NamedTuple):
    """Where a replay differs from its recording.

    Attributes
    ----------
    number : int
        Of the event, from 1.
    at : float
        Its time, on the clock of the recording.
    event : Event
    recorded, now : str
        The instructions, as a recording has them; of an error, what it says.
    """

    number: int
    at: float
    event: Event
    recorded: str
    now: str


# The key, the victim and the thief of each.
Moves = tuple[tuple[Key, Address, Address], ...]


class StepDecisions(NamedTuple):
    """What two policies decide at one step."""

    at: float
    recorded: Moves
    other: Moves


class Replayed(NamedTuple):
    """A replay.

    Attributes
    ----------
    policy : str
    events, instructions : int
        That were the same; "events" has the one that differs, too.
    difference : Difference or None
        None: all is the same.
    cut : bool
        Whether the last line is not whole: who wrote it was killed, or its disk was full.
    ended : str
        Why the recording ends where it does, where it says so.
    decisions : tuple of StepDecisions
        Of the steps at which another policy was asked as well, those at which anybody moves anything.
    """

    policy: str
    events: int
    instructions: int
    difference: Difference | None = None
    cut: bool = False
    ended: str = ""
    decisions: tuple[StepDecisions, ...] = ()


class _BesideAnother(SchedulingCore):
    """A core that asks another policy at each step as well, and does nothing of what it says."""

    def beside(self, other: Policy, facts: RecordedFacts) -> None:
        """Ask that policy as well, by the facts that the core asks."""
        self.other, self.recorded_facts = other, facts
        self.decisions: list[StepDecisions] = []

    def _decide(self, thieves: Sequence[Address], now: float) -> tuple[Move, ...]:
        # First as it was, with the answers of then; what the other one asks besides, nobody can answer.
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
    """Return what comes of a recording's events now.

    Parameters
    ----------
    lines : iterable of str
        Of a recording, whole or cut behind any line.
    name : str
        Of the recording, for errors.
    policy, parameters : optional
        Another policy by name, and other parameters than the recorded ones: what it would have moved at each step.

    Raises
    ------
    ConfigError
        For what is no recording, of another version, or of a policy that is not there.
    """
    numbered = enumerate(lines, 1)
    number, line = next(numbered, (1, ""))
    facts = RecordedFacts()
    try:
        head = json.loads(line)
        core = _core_of(head, facts, policy, parameters)
    except _FAULTS as error:
        raise ConfigError(f"{name}, line {number}: no head of a recording: {_told(error)}") from error
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
            # Only who was stopped while he wrote leaves a line without its end.
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
    """Return what comes of an event as a recording has it, and how many instructions those are."""
    try:
        decided = core.handle(event, at)
    except Unanswered as error:
        return f"the core asks what it did not ask then: {error}", 0
    except Exception as error:  # noqa: BLE001 - whatever it was, it may have been recorded
        return text(out_of(error)), 0
    return text(out_of(decided)), len(decided)


def _core_of(
    head: Mapping[str, Json], facts: RecordedFacts, policy: str | None, others: Mapping[str, Json] | None
) -> SchedulingCore:
    """Return the core that a head describes, with another policy beside its own where one is wanted."""
    # By its head alone: what is set where it is replayed is no matter.
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
