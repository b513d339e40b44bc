"""The log of the scheduler plugin: counts since its installation, and the newest records, in a ring for each kind.

Whoever sees something happen writes it here once.  Traces, events, metrics, pages and `dask ferro top` read it when
they are asked, and nobody is called back.  A reader that follows a kind remembers how many records it has read, and
is told how many it missed.  Each kind has its own ring and its own numbers: thousands of finished tasks a second
neither push out the rare decisions of scaling, nor hide whether one of those was missed.

What must be exact however rarely it is read is counted as it happens.  Times are the scheduler's clock, durations
seconds, sizes bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from dask_ferro.policy.events import RequestSettled, StealCompleted
from dask_ferro.policy.scaling.facts import Action
from dask_ferro.policy.waits import REASONS
from dask_ferro.scheduler.worker_plugin import LINKS, Heartbeat
from dask_ferro.trace import Key

_Record = TypeVar("_Record")

# The most settled requests: 1 MB; a page sums them up in 2 ms.
_MOVES = 5_000
# Samples of the load: ten minutes, as much as the pages draw.
_SAMPLES = 600
# Decisions of the elastic controller, and reports of workers that retire.
_SCALINGS = 500

# Kinds of placement of a ready task: on a worker that holds all its inputs, on one that has to fetch some, anywhere
# (it has no inputs), by Dask's rule for root-like tasks (many similar ones without large inputs), or nowhere yet.
PLACES = ("local", "remote", "no_inputs", "root", "held_back")
# What workers report of their transfers, in this order.
TRANSFER_FIELDS = ("transfers", "bytes", "seconds")
# The elastic controller's actions by class; derived, so that new classes are counted as well.
ACTIONS: dict[type, str] = {kind: kind.__name__.lower() for kind in get_args(Action)}


class Fetch(NamedTuple):
    """A transfer of inputs for a task."""

    start: float
    stop: float
    nbytes: int
    source: str


class TaskRun(NamedTuple):
    """A finished task, its worker with the number of its threads, and what the worker fetched for it."""

    key: Key
    prefix: str
    group: str
    worker: str
    nthreads: int
    thread: object
    start: float
    stop: float
    nbytes: int
    dependencies: tuple[Key, ...]
    fetches: tuple[Fetch, ...]
    priority: tuple[float, ...] = ()
    about: tuple[Any, ...] | None = None


class Sample(NamedTuple):
    """The load at one moment: tasks that run, wait at a worker, or wait at the scheduler."""

    time: float
    workers: int
    threads: int
    running: int
    waiting: int
    queued: int


class Ring(Generic[_Record]):
    """The newest records of a kind.

    Parameters
    ----------
    length : int
        The most records kept; with 0, none is kept or counted.

    Attributes
    ----------
    total : int
        The number of records so far: the position of a reader that has read all.
    """

    def __init__(self, length: int) -> None:
        self.length, self.total = length, 0
        self._records: deque[_Record] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: _Record) -> None:
        """Add a record; the oldest is dropped if the ring is full."""
        if self.length:
            self.total += 1
            self._records.append(record)

    def since(self, position: int = 0) -> tuple[list[_Record], int]:
        """Return the records since a position, oldest first, and the number of dropped ones."""
        records, new = list(self._records), self.total - position
        return records[max(len(records) - new, 0) :], max(new - len(records), 0)

    @property
    def newest(self) -> _Record | None:
        """The newest record; None: there is none."""
        return self._records[-1] if self._records else None

    def resize(self, length: int) -> None:
        """Keep so many records from now on, of the present ones the newest."""
        self.length = length
        self._records = deque(self._records, length)


class Log:
    """The log of one scheduler.

    Parameters
    ----------
    steals : dict of str to float
        The core's counts of requests, outcomes and seconds.

    Attributes
    ----------
    counts : dict of str to dict of str to float
        Counts since the plugin's installation: "steal" has the core's, "place" kinds of placement, "wait" the tasks
        that began to wait beside an idle worker, by reason, "scale" actions of the elastic controller;
        "received_transfers", "received_bytes" and "received_seconds" have the workers' transfers by class of link.
    tasks : Ring of TaskRun
        Finished tasks, as many as the `recordings` ask for.
    moves : Ring of RequestSettled
        Requests with a known outcome.
    stolen : Ring of StealCompleted
        Stolen tasks that are done, as many as finished ones.
    loads : Ring of Sample
        About one a second.
    decisions, departures : Ring of mapping
        Events of topic "ferro" from the elastic controller and from retiring workers, each with its "time".
    recordings : dict of str to int
        By recording, the number of tasks that it asks for.
    """

    def __init__(self, steals: dict[str, float]) -> None:
        self.counts: dict[str, dict[str, float]] = {
            "steal": steals,
            "place": dict.fromkeys(PLACES, 0),
            "wait": dict.fromkeys(REASONS, 0),
            "scale": dict.fromkeys(ACTIONS.values(), 0),
            **{f"received_{what}": dict.fromkeys(LINKS, 0) for what in TRANSFER_FIELDS},
        }
        self.tasks: Ring[TaskRun] = Ring(0)
        self.moves: Ring[RequestSettled] = Ring(_MOVES)
        self.stolen: Ring[StealCompleted] = Ring(0)
        self.loads: Ring[Sample] = Ring(_SAMPLES)
        self.decisions: Ring[Mapping[str, Any]] = Ring(_SCALINGS)
        self.departures: Ring[Mapping[str, Any]] = Ring(_SCALINGS)
        self.recordings: dict[str, int] = {}

    def received(self, now: Heartbeat, before: Heartbeat | None) -> None:
        """Count the transfers that a worker received between two of its heartbeats."""
        for link, totals in now["received"].items():
            counted = before["received"][link] if before is not None else (0, 0, 0.0)
            # The worker's counts restarted, as its plugin was installed again.
            if totals[0] < counted[0]:
                counted = (0, 0, 0.0)
            for what, total, past in zip(TRANSFER_FIELDS, totals, counted, strict=True):
                self.counts[f"received_{what}"][link] += total - past

    def record_for(self, who: str, tasks: int) -> None:
        """Keep at least so many tasks and stolen tasks until `stop_for` with the same name; present records stay."""
        self.recordings[who] = tasks
        self._resize()

    def stop_for(self, who: str) -> None:
        """End a recording.  Idempotent."""
        if self.recordings.pop(who, None) is not None:
            self._resize()

    def _resize(self) -> None:
        most = max(self.recordings.values(), default=0)
        self.tasks.resize(most)
        self.stolen.resize(most)
