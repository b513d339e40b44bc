"""The events of topic "ferro", as messages, and what the plugin publishes of its own log.

Its events summarise the time since the previous one: at most one of a kind in an interval, and of bounded size,
however many tasks there are.  Those of the elastic controller, and of retiring workers, go to the log.

    {"action": "steal", "requests": 40, "confirmed": 31, ..., "flows": [[victim, thief, 12], ...], "sample": [...]}
    {"action": "wait", "restricted": 2, "resources": 0, ..., "sample": ["('f', 3) waits at tcp://... for 1.5 s ..."]}
    {"action": "pool-closed", "pool": "default", "why": ..., "until": ..., "log": ..., "lines": [...]}
    {"action": "place", "local": 900, "remote": 80, "no_inputs": 16, "root": 400, "held_back": 0, ...}

Durations are seconds, sizes bytes, times the scheduler's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from distributed import Scheduler
from distributed.metrics import time
from tornado.ioloop import PeriodicCallback

from dask_ferro.scheduler.stealing import Stealing

TOPIC = "ferro"
# The words for the actions of events that retiring workers publish.
DEPARTURES = {"retiring": "begin to retire", "retired": "retired", "retire_failed": "did not retire"}
# The action of an event that reports a closed pool of batch jobs.
POOL_CLOSED = "pool-closed"
# The most pairs of workers, with most moves between them, and the most single moves in one event: 2 kB.
_FLOWS = 16
_SAMPLE = 4
# Seconds between two events of a kind.
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
    """What the plugin of one scheduler publishes."""

    def __init__(self, scheduler: Scheduler, stealing: Stealing) -> None:
        self.scheduler, self.stealing, self.log = scheduler, stealing, stealing.records
        self._published: dict[str, Mapping[str, float]] = {}  # by action: the counts up to its newest event
        self._since, self._moves = time(), 0
        self._ticks = PeriodicCallback(self.tick, EVERY * 1000)
        # Earlier decisions of an active controller are kept, and not counted.
        for at, message in scheduler.get_events(TOPIC):
            if isinstance(message, Mapping):
                self._keep(at, message)

    def start(self) -> None:
        """Start to publish."""
        self._ticks.start()

    def stop(self) -> None:
        """Stop publishing.  Idempotent."""
        self._ticks.stop()

    # -- what happens --------------------------------------------------------------------------------------

    def logged(self, topic: str, message: object) -> None:
        """Keep the decisions of the elastic controller, and the reports of retiring workers, that are published."""
        if topic == TOPIC and isinstance(message, Mapping):
            self._keep(time(), message)
            counts = self.log.counts["scale"]
            for action in message.get("done", ()):
                # Other kinds are those of a controller of another version.
                if action.get("kind") in counts:
                    counts[action["kind"]] += 1

    def _keep(self, at: float, message: Mapping[str, Any]) -> None:
        if message.get("action") == "scale":
            self.log.decisions.append({"time": at, **message})
        elif message.get("action") in DEPARTURES:
            self.log.departures.append({"time": at, **message})

    # -- what is published ---------------------------------------------------------------------------------

    def tick(self) -> None:
        """Publish what has changed since the previous events."""
        now = time()
        new, _ = self.log.moves.since(self._moves)
        confirmed = [move for move in new if move.outcome == "confirmed"]
        flows = Counter((move.victim, move.thief) for move in confirmed).most_common(_FLOWS)
        sample = [
            {"key": str(move.key), "victim": move.victim, "thief": move.thief} for move in confirmed[:_SAMPLE]
        ]
        self._publish("steal", now, flows=[[*pair, tasks] for pair, tasks in flows], sample=sample)
        self._publish("place", now)
        self._publish("wait", now, sample=[wait.sentence() for wait in self.stealing.waits.now[:_SAMPLE]])
        self._since, self._moves = now, self.log.moves.total

    def _publish(self, action: str, now: float, **more: object) -> None:
        counts, before = dict(self.log.counts[action]), self._published.get(action, {})
        new = {name: value - before.get(name, 0) for name, value in counts.items()}
        if any(new.values()):
            self._published[action] = counts
            message = {"action": action, "time": now, "seconds": now - self._since, **new, **more}
            self.scheduler.log_event(TOPIC, message)
