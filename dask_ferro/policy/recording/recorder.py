"""A recorder beside a scheduling core: what it hears, what it asks meanwhile, and what it decides, as they are.

    recorder = Recorder(core, "informed")
    recorder.add(sink)
    recorder.handle(event, now)        in the place of core.handle

It keeps nothing itself: each sink is given a head, by which the same core can be made, and a `Record` an event.
`Lines` makes lines of text of those, when and where there is time for it: each with the event, those answers that
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

# The head's first key, and the form of what follows: another one cannot be replayed.
FORM, VERSION = "ferro-events", 1
# A name, and a key or addresses.
Question = tuple[Any, ...]
# A question, and its answer.
Note = tuple[Question, Any]
# Questions whose answer is remembered as long as there is the task.
_OF_TASKS = ("waiting", "unlocks", "unbound")


class Record(NamedTuple):
    """One event: when it came, what was asked meanwhile, and what was decided, or the error that it ended with."""

    at: float
    event: Event
    asked: list[Note]
    out: list[Instruction] | Exception


class RecordSink(Protocol):
    """What takes records, quickly: the scheduler waits for it."""

    def begin(self, head: dict[str, Json]) -> None:
        """Take the head."""

    def put(self, record: Record) -> bool:
        """Take a record; return whether more are wanted."""
        ...


class AskedFacts:
    """Facts that note what they answer while an event is handled."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.notes: list[Note] | None = None  # None: no event is handled

    def _note(self, answer: T, *question: object) -> T:
        if self.notes is not None:
            self.notes.append((question, answer))
        return answer

    def begin(self, thieves: Sequence[Address]) -> None:
        """Begin a look at tasks, for some thieves."""
        self.facts.begin(thieves)

    def waiting(self, entry: Entry, row: WorkerLoad) -> TaskFacts | None:
        """Note a task as it was shown."""
        return self._note(self.facts.waiting(entry, row), "waiting", entry.key)

    def reserve(self, key: Key, victim: Address, thief: Address) -> bool:
        """Note whether a task could be asked for."""
        return self._note(self.facts.reserve(key, victim, thief), "reserve", key, victim, thief)

    def unlocks(self, key: Key) -> bool:
        """Note whether others waited for a task alone."""
        return self._note(self.facts.unlocks(key), "unlocks", key)

    def live(self, address: Address) -> int:
        """Note a device's bytes in use."""
        return self._note(self.facts.live(address), "live", address)

    def holds(self, address: Address) -> int:
        """Note the bytes of a worker's results."""
        return self._note(self.facts.holds(address), "holds", address)

    def unbound(self, entries: list[Entry]) -> list[Entry]:
        """Note which tasks could run on more than one worker."""
        found = self.facts.unbound(entries)
        if self.notes is not None:
            free = {entry.key for entry in found}
            self.notes += [(("unbound", entry.key), entry.key in free) for entry in entries]
        return found


class Recorder:
    """A core that is recorded.

    Parameters
    ----------
    core : SchedulingCore
    policy : str
        Its policy's name, by which `policies.named` makes it again.
    when_over : callable ()
        Called when no sink wants more.
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
            Whether the core has heard of nothing: otherwise its state is copied, 10 us for each task at a worker.
        """
        sink.begin(head_of(self.core, self._policy, fresh=fresh))
        self.sinks.append(sink)
        self.core.ask_of(self._asked)

    def remove(self, sink: RecordSink) -> None:
        """Record no more for a sink; without any, the core is as it was before."""
        self.sinks = [other for other in self.sinks if other is not sink]
        if not self.sinks:
            self.core.ask_of(self._asked.facts)
            self._when_over()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Let the core handle an event, and pass on what it asked and decided."""
        notes: list[Note] = []
        # Placement asks the same facts of the same ledger between two events, which no replay does.
        self._asked.notes = notes
        try:
            decided = self.core.handle(event, now)
        # What the caller does about it is its own matter; the event was heard.
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
    """Return what stands before the first event."""
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
    """Records as lines of text, one after the other: a line says what differs from those before."""

    def __init__(self) -> None:
        self._newest: dict[Question, object] = {}

    def line(self, record: Record) -> str:
        """Return the next line, without its end.

        Raises
        ------
        TypeError
            For a value that no recording has.
        """
        at, event, asked, out = record
        told: dict[str, Json] = {"at": encode(at), "event": encode(event)}
        if new := [[*encode(question), encode(answer)] for question, answer in self._new(asked)]:
            told["facts"] = new
        told["out"] = out_of(out)
        self._forget(event)
        return text(told)

    def _new(self, asked: list[Note]) -> list[Note]:
        """Return the answers that are other ones than before; of a reservation, always: tasks have one, mostly."""
        new = []
        for question, answer in asked:
            # The same task is rarely asked for twice, from one worker to another.
            if question[0] == "reserve":
                new.append((question, answer))
            elif self._newest.get(question, _NOTHING) != answer:
                self._newest[question] = answer
                new.append((question, answer))
        return new

    # A replay keeps the old answers: all that this costs there is memory.
    def _forget(self, event: Event) -> None:
        if type(event) is Finished:
            for name in _OF_TASKS:
                self._newest.pop((name, event.key), None)
        elif type(event) is Restarted:
            self._newest.clear()


_NOTHING = object()


def out_of(out: list[Instruction] | Exception) -> Json:
    """Return what came of an event as JSON has it."""
    return {"error": type(out).__name__} if isinstance(out, Exception) else encode(tuple(out))
