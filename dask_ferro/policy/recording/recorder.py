"""A recorder around a scheduling core: its events, the facts that it asks for meanwhile, and its instructions.

    recorder = Recorder(core, "informed")
    recorder.add(sink)
    recorder.handle(event, now)        # instead of core.handle

It stores nothing: each sink is given a head, from which the same core can be made, and a `Record` per event.
`Lines` turns records into lines of text, possibly later and elsewhere: each line has the event, the answers that
differ from the last ones to the same questions, and the instructions.

    {"at":1.5,"event":{"is":"Tick"},"facts":[["waiting","x",{...}]],"out":[{"is":"Ask",...}]}

A question has one answer while an event is handled.  Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol, TypeVar

from dask_ferro.policy.estimates import Learning
from dask_ferro.policy.events import Event, Finished, Instruction, Restarted
from dask_ferro.policy.facts import Address, Key, TaskFacts
from dask_ferro.policy.recording.state import state_of
from dask_ferro.policy.recording.values import Json, encode, text
from dask_ferro.policy.scheduling_core import SchedulingCore
from dask_ferro.policy.stealing.informed import StealingParameters
from dask_ferro.policy.stealing.snapshot import Facts
from dask_ferro.policy.worker_load import Entry, WorkerLoad

T = TypeVar("T")

# The head's first key, and the version of the format; other versions cannot be replayed.
FORM, VERSION = "ferro-events", 1
# The name of a method of `Facts`, and its arguments.
Question = tuple[Any, ...]
# A question and its answer.
Note = tuple[Question, Any]
# Questions whose answers are remembered for as long as the task exists.
_OF_TASKS = ("waiting", "unlocks", "unbound")


class Record(NamedTuple):
    """One event: its time, the facts asked for, and the instructions or the error that it ended with."""

    at: float
    event: Event
    asked: list[Note]
    out: list[Instruction] | Exception


class RecordSink(Protocol):
    """A receiver of records; it must be fast, as the scheduler waits for it."""

    def begin(self, head: dict[str, Json]) -> None:
        """Take the head."""

    def put(self, record: Record) -> bool:
        """Take a record; return whether more are wanted."""
        ...


class AskedFacts:
    """A wrapper of `Facts` that notes the answers given while an event is handled."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.notes: list[Note] | None = None  # None: no event is handled

    def _note(self, answer: T, *question: object) -> T:
        if self.notes is not None:
            self.notes.append((question, answer))
        return answer

    def begin(self, thieves: Sequence[Address]) -> None:
        """Forward to the wrapped facts."""
        self.facts.begin(thieves)

    def waiting(self, entry: Entry, row: WorkerLoad) -> TaskFacts | None:
        """Note the facts of a queued task."""
        return self._note(self.facts.waiting(entry, row), "waiting", entry.key)

    def reserve(self, key: Key, victim: Address, thief: Address) -> bool:
        """Note whether a task could be requested."""
        return self._note(self.facts.reserve(key, victim, thief), "reserve", key, victim, thief)

    def unlocks(self, key: Key) -> bool:
        """Note whether a task was the last missing input of another."""
        return self._note(self.facts.unlocks(key), "unlocks", key)

    def live(self, address: Address) -> int:
        """Note the device bytes in use."""
        return self._note(self.facts.live(address), "live", address)

    def holds(self, address: Address) -> int:
        """Note the bytes of a worker's results."""
        return self._note(self.facts.holds(address), "holds", address)

    def unbound(self, entries: list[Entry]) -> list[Entry]:
        """Note which tasks may run on more than one worker."""
        found = self.facts.unbound(entries)
        if self.notes is not None:
            free = {entry.key for entry in found}
            self.notes += [(("unbound", entry.key), entry.key in free) for entry in entries]
        return found


class Recorder:
    """A core whose events are recorded.

    Parameters
    ----------
    core : SchedulingCore
    policy : str
        The name of its policy, for `policies.named`.
    when_over : callable ()
        Called when no sink is left.
    """

    def __init__(
        self, core: SchedulingCore, policy: str, when_over: Callable[[], None] = lambda: None
    ) -> None:
        self.core = core
        self.sinks: list[RecordSink] = []
        self._policy = policy
        self._when_over = when_over
        self._asked = AskedFacts(core.facts)

    def add(self, sink: RecordSink, *, fresh: bool = False) -> None:
        """Record for a sink from now on.

        Parameters
        ----------
        fresh : bool
            Whether the core has handled no event yet: otherwise its state is copied, 10 us for each assigned task.
        """
        sink.begin(head_of(self.core, self._policy, fresh=fresh))
        self.sinks.append(sink)
        self.core.ask_of(self._asked)

    def remove(self, sink: RecordSink) -> None:
        """Stop recording for a sink; without any, the core is used unwrapped again."""
        self.sinks = [other for other in self.sinks if other is not sink]
        if not self.sinks:
            self.core.ask_of(self._asked.facts)
            self._when_over()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Let the core handle an event, and pass the record to the sinks."""
        notes: list[Note] = []
        # Between events placement asks the same facts, which a replay does not do.
        self._asked.notes = notes
        try:
            decided = self.core.handle(event, now)
        # The event counts as handled even if the core fails; the caller deals with the error.
        except Exception as error:
            self._pass_on(Record(now, event, notes, error))
            raise
        finally:
            self._asked.notes = None
        self._pass_on(Record(now, event, notes, decided))
        return decided

    def _pass_on(self, record: Record) -> None:
        for sink in self.sinks:
            if not sink.put(record):
                self.remove(sink)


def head_of(core: SchedulingCore, policy: str, *, fresh: bool) -> dict[str, Json]:
    """Return the head of a recording, which comes before the first event."""
    return {
        FORM: VERSION,
        "policy": policy,
        "seed": core.policy.seed,
        "parameters": _named(core.policy.parameters),
        "learning": _named(core.ledger.durations.learning),
        "coalesce": core.coalesce,
        "tick": core.tick,
        "core": None if fresh else state_of(core),
    }


def _named(parameters: StealingParameters | Learning) -> dict[str, Json]:
    return {one.name: encode(getattr(parameters, one.name)) for one in fields(parameters)}


class Lines:
    """A converter of records to lines of text; each line has only the answers that changed."""

    def __init__(self) -> None:
        self._newest: dict[Question, object] = {}

    def line(self, record: Record) -> str:
        """Return the next line, without its end.

        Raises
        ------
        TypeError
            For a value of a class that recordings do not support.
        """
        at, event, asked, out = record
        told: dict[str, Json] = {"at": encode(at), "event": encode(event)}
        if new := [[*encode(question), encode(answer)] for question, answer in self._new(asked)]:
            told["facts"] = new
        told["out"] = out_of(out)
        self._forget(event)
        return text(told)

    def _new(self, asked: list[Note]) -> list[Note]:
        """Return the answers that differ from the previous ones; those to reservations always."""
        new = []
        for question, answer in asked:
            # A task is rarely requested twice for the same move, so these answers are not remembered.
            if question[0] == "reserve":
                new.append((question, answer))
            elif self._newest.get(question, _NOTHING) != answer:
                self._newest[question] = answer
                new.append((question, answer))
        return new

    # A replay keeps the old answers, which costs it only memory.
    def _forget(self, event: Event) -> None:
        if type(event) is Finished:
            for name in _OF_TASKS:
                self._newest.pop((name, event.key), None)
        elif type(event) is Restarted:
            self._newest.clear()


_NOTHING = object()


def out_of(out: list[Instruction] | Exception) -> Json:
    """Return the instructions or the error of an event as JSON."""
    return {"error": type(out).__name__} if isinstance(out, Exception) else encode(tuple(out))
