"""Sums of the plugin's actions: for events, for metrics, and by worker for views.

It is told of each move and of each decision of the elastic controller, and reads the workers' reports of transfers;
it makes no decisions.  Events of topic "ferro" summarise the time since the previous one: at most one of a kind in an
interval, and of bounded size, however many tasks there are.

    {"action": "steal", "requests": 40, "confirmed": 31, ..., "flows": [[victim, thief, 12], ...], "sample": [...]}
    {"action": "wait", "restricted": 2, "resources": 0, ..., "sample": ["('f', 3) waits at tcp://... for 1.5 s ..."]}
    {"action": "pool-closed", "pool": "default", "why": ..., "until": ..., "log": ..., "lines": [...]}
    {"action": "pool", "pool": "gpu", "order": "pause" | "resume"}
    {"action": "place", "holder": 900, "fetches": 80, "free": 16, "root": 400, "waits": 0, ...}

Durations are seconds, sizes bytes, times the scheduler's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NotRequired, TypedDict, cast, get_args

from distributed import Scheduler
from distributed.metrics import time
from tornado.ioloop import PeriodicCallback

from dask_ferro.policy.events import OUTCOMES, Arrived, Settled
from dask_ferro.policy.scaling.facts import Action
from dask_ferro.policy.waits import REASONS
from dask_ferro.runtime.plugin.stealing import Stealing
from dask_ferro.runtime.upstream import metrics_of
from dask_ferro.runtime.worker.plugin import LINKS, METRIC

TOPIC = "ferro"
# The elastic controller's actions by class; derived, so that new classes are counted as well.
KINDS: dict[type, str] = {kind: kind.__name__.lower() for kind in get_args(Action)}
SCALINGS = tuple(KINDS.values())
# The action of an event that reports a closed pool of batch jobs.
CLOSED = "pool-closed"
# The action of an event that reports a pool being paused or resumed by its user.
POOL = "pool"
# The most pairs of workers, with most moves between them, and the most single moves in one event: 2 kB.
_FLOWS = 16
_SAMPLE = 4
# The most pairs counted between two events; 1,000 workers have a million.
_PAIRS = 1024
# Seconds between two readings of the workers, and between two events of a kind: readers look that often.
EVERY = 5.0


class ActionEvent(TypedDict):
    """An action of the elastic controller: its kind and reason, its pool or jobs, and their number."""

    kind: str
    why: str
    count: int
    pool: NotRequired[str]
    jobs: NotRequired[list[str]]


class ClosedPool(TypedDict, total=False):
    """Why a pool is closed, its reopening (epoch; 0: unknown), its last job's last lines, and whether it is paused."""

    why: str
    until: float
    output: str
    paused: bool


class PendingJobs(TypedDict):
    """The pending jobs of a pool.

    `since` is when the oldest was submitted (epoch), `expected` the mean queue wait of the pool's jobs that have
    started, and `reasons` has the number of jobs by the batch system's reason.
    """

    jobs: int
    since: float
    expected: float
    reasons: dict[str, int]


class ScaleEvent(TypedDict, total=False):
    """A decision of the elastic controller, as in `docs/metrics.md`."""

    action: str
    time: float
    wanted: dict[str, int]
    why: str
    jobs: dict[str, int]
    reasons: dict[str, int]
    pending: dict[str, PendingJobs]
    node_seconds: float
    closed: dict[str, ClosedPool]
    queue_wait: dict[str, float]
    actions: list[str]
    done: list[ActionEvent]


class Events:
    """The sums of one scheduler since the plugin's installation.

    Parameters
    ----------
    scheduler : Scheduler
    stealing : Stealing
    placed : mapping of str to int
        Ready tasks by kind of placement.

    Attributes
    ----------
    received : dict of str to [int, int, float]
        Transfers, bytes and seconds by class of link, as measured by the receiving workers.
    scalings : Counter of str
        Actions of the elastic controller, by kind.
    elastic : ScaleEvent
        Its newest decision, as published; empty: none.
    """

    def __init__(self, scheduler: Scheduler, stealing: Stealing, placed: Mapping[str, int]) -> None:
        self.scheduler, self.stealing, self.placed = scheduler, stealing, placed
        self.received: dict[str, list[float]] = {link: [0, 0, 0.0] for link in LINKS}
        self.scalings: Counter[str] = Counter()
        self.elastic: ScaleEvent = {}
        self._since = time()
        # By worker and link: the totals when last read; by action: the counts up to its newest event.
        self._read: dict[tuple[str, str], tuple[int, int, float]] = {}
        self._published: dict[str, Mapping[str, float]] = {}
        self._flows: Counter[tuple[str, str]] = Counter()
        self._sample: list[dict[str, str]] = []
        self._ticks = PeriodicCallback(self.tick, EVERY * 1000)

    def start(self) -> None:
        """Start to publish.  An earlier decision of an active controller is read from the events."""
        for _, message in self.scheduler.get_events(TOPIC):
            if (decision := _decision(message)) is not None:
                self.elastic = decision
        self.stealing.moves.readers.append(self._moved)
        self._ticks.start()

    def stop(self) -> None:
        """Stop publishing.  Idempotent."""
        self._ticks.stop()
        if self._moved in self.stealing.moves.readers:
            self.stealing.moves.readers.remove(self._moved)

    # -- what happens --------------------------------------------------------------------------------------

    def heard(self, topic: str, message: object) -> None:
        """Process a message logged on the scheduler."""
        if topic == TOPIC and (decision := _decision(message)) is not None:
            self.elastic = decision
            kinds = [action.get("kind", "") for action in decision.get("done", ())]
            self.scalings.update(kinds)

    def left(self, worker: str) -> None:
        """Forget the totals of a worker."""
        for link in LINKS:
            self._read.pop((worker, link), None)

    def _moved(self, record: Settled | Arrived) -> None:
        if isinstance(record, Arrived) or record.outcome != "confirmed":
            return
        pair = record.victim, record.thief
        if len(self._flows) < _PAIRS or pair in self._flows:
            self._flows[pair] += 1
        if len(self._sample) < _SAMPLE:
            self._sample.append({"key": str(record.key), "victim": record.victim, "thief": record.thief})

    def read_workers(self) -> None:
        """Add the transfers received by workers since the last reading."""
        for address, ws in self.scheduler.workers.items():
            told = metrics_of(ws).get(METRIC)
            for link, now in (told or {}).get("received", {}).items():
                before = self._read.get((address, link), (0, 0, 0.0))
                # The counter restarted, as the worker's plugin was installed again.
                if now[0] < before[0]:
                    before = (0, 0, 0.0)
                total = self.received[link]
                self.received[link] = [t + n - b for t, n, b in zip(total, now, before, strict=True)]
                self._read[address, link] = now

    # -- what is published ---------------------------------------------------------------------------------

    def tick(self) -> None:
        """Read the workers, and publish changes."""
        self.read_workers()
        now = time()
        steals = {name: self.stealing.counts.get(name, 0) for name in ("requests", *OUTCOMES)}
        seconds = {
            f"seconds_{n}": self.stealing.counts.get(f"seconds {n}", 0.0) for n in ("worked", "moving")
        }
        flows = [[victim, thief, tasks] for (victim, thief), tasks in self._flows.most_common(_FLOWS)]
        self._publish("steal", now, {**steals, **seconds}, {"flows": flows, "sample": self._sample})
        self._publish("place", now, dict(self.placed))
        began = self.stealing.waits.began
        newest = [wait.told() for wait in self.stealing.waits.now[:_SAMPLE]]
        self._publish("wait", now, {reason: began[reason] for reason in REASONS}, {"sample": newest})
        self._since, self._sample = now, []
        self._flows.clear()

    def _publish(
        self, action: str, now: float, counts: Mapping[str, float], more: Mapping[str, object] | None = None
    ) -> None:
        before = self._published.get(action, {})
        new = {name: value - before.get(name, 0) for name, value in counts.items()}
        if not any(new.values()):
            return
        self._published[action] = counts
        message = {"action": action, "time": now, "seconds": now - self._since, **new, **(more or {})}
        self.scheduler.log_event(TOPIC, message)


def _decision(message: object) -> ScaleEvent | None:
    is_one = isinstance(message, Mapping) and message.get("action") == "scale"
    return cast(ScaleEvent, message) if is_one else None
