"""What the plugin writes down for those who look later: ring buffers, a few microseconds a move and a second.

It judges nothing and draws nothing.  What happened often is kept by the second, what is looked at one by one is kept
as it was, and each log has its length: after eight hours it is as large as after ten minutes, 2 MB at most.  Tasks
are no matter of this module (they are `recorder`'s, and recorded while somebody looks).

Times are the scheduler's clock, durations seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import log2
from typing import Any, NamedTuple

from distributed import Scheduler

OUTCOMES = ("confirmed", "refused", "stale")

# Moves that are kept one by one: 1 MB; counting their pairs takes a page 1 ms.
_MOVES = 5_000
# Seconds that are kept as sums, and samples of what waits and runs: ten minutes, and half an hour.
_SECONDS = 600
_SAMPLES = 1_800
# Between two samples: the plugin's slow tick comes twice a second.
_SAMPLED = 0.9
# Dask's dashboard colours requests by the ratio of their transfer to their duration: 15 levels.
_LEVELS = 15


class Moved(NamedTuple):
    """A move that was requested, when its outcome was known.

    Projected: by how many seconds the task would finish earlier, and what its transfer costs.  The gains of tasks that
    wait at once overlap, and have no sum that means anything.
    """

    time: float
    key: Any
    victim: str
    thief: str
    outcome: str
    gain: float
    cost: float


class Second(NamedTuple):
    """The moves of one second of the clock, and the work in stolen tasks that ended in it; confirmed ones cost."""

    second: int
    confirmed: int = 0
    refused: int = 0
    stale: int = 0
    worked: float = 0.0
    spent: float = 0.0

    def plus(self, outcome: str, cost: float) -> Second:
        """Return the second with a move more."""
        if outcome != "confirmed":
            return self._replace(**{outcome: getattr(self, outcome) + 1})
        return self._replace(confirmed=self.confirmed + 1, spent=self.spent + cost)


class Sample(NamedTuple):
    """The cluster at a moment: tasks that run, wait at a worker, or wait at the scheduler."""

    time: float
    workers: int
    threads: int
    running: int
    waiting: int
    queued: int


class Watch:
    """The logs.

    Attributes
    ----------
    moves : deque of Moved
    seconds : deque of Second
        Those in which something moved, or a stolen task ended, oldest first.
    samples : deque of Sample
        About one a second.
    thresholds : deque of (time, least, median, most)
        Of all workers, at the moments of the samples; the seconds of backlog under which they steal.
    totals : Counter of str
        Of all moves ever: the outcomes, "worked" and "spent", as in `Second`.
    """

    def __init__(self) -> None:
        self.moves: deque[Moved] = deque(maxlen=_MOVES)
        self.seconds: deque[Second] = deque(maxlen=_SECONDS)
        self.samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self.thresholds: deque[tuple[float, float, float, float]] = deque(maxlen=_SAMPLES)
        self.totals: Counter[str] = Counter()

    def moved(self, now: float, key: Any, request: Mapping[str, Any], outcome: str) -> None:
        """Note what became of a request.

        Parameters
        ----------
        request : mapping
            "victim" and "thief", which have an `address`; "gain" and "cost" in projected seconds.
        outcome : str
            "confirmed", "refused" or "stale".
        """
        gain, cost = request.get("gain", 0.0), request.get("cost", 0.0)
        self.moves.append(
            Moved(now, key, request["victim"].address, request["thief"].address, outcome, gain, cost)
        )
        self.totals[outcome] += 1
        if outcome == "confirmed":
            self.totals["spent"] += cost
        self._open(now)
        self.seconds[-1] = self.seconds[-1].plus(outcome, cost)

    def worked(self, now: float, seconds: float) -> None:
        """Note that a thief is done with a stolen task, in which it worked for so many seconds."""
        self.totals["worked"] += seconds  # type: ignore[assignment]
        self._open(now)
        self.seconds[-1] = self.seconds[-1]._replace(worked=self.seconds[-1].worked + seconds)

    def _open(self, now: float) -> None:
        if not self.seconds or self.seconds[-1].second != int(now):
            self.seconds.append(Second(int(now)))

    def sampled(
        self, now: float, scheduler: Scheduler, ledger: Any, threshold: Callable[[str], float]
    ) -> None:
        """Note the moment, unless one was noted a moment ago.

        Parameters
        ----------
        threshold : callable (address) -> float
            Of a worker, learned or the one that it begins with; of 1,000 workers they take 0.3 ms.
        """
        if self.samples and 0 <= now - self.samples[-1].time < _SAMPLED:
            return
        waiting = ledger.waiting
        self.samples.append(
            Sample(
                now,
                len(scheduler.workers),
                scheduler.total_nthreads,
                len(ledger.entries) - waiting,
                waiting,
                len(scheduler.queued),
            )
        )
        if ordered := sorted(map(threshold, ledger.rows)):
            self.thresholds.append((now, ordered[0], ordered[len(ordered) // 2], ordered[-1]))


def level_of(cost: float, seconds: float) -> int:
    """Return the level under which Dask's pages show a request: 0 without a transfer, else by its share."""
    if cost <= 0 or seconds <= 0:
        return 0
    return min(max(round(log2(cost / seconds) + 6), 1), _LEVELS - 1)
