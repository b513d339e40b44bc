"""The one log of stealing: what became of each request, and of each stolen task, written once as the core tells it.

Counters, events, metrics, pages, traces and Dask's own log are read off these records, or hear of them as readers.
What happened often is kept by the second, what is looked at one by one is kept as it was.  Beside it are samples of the
cluster's load.  After eight hours all of it is as large as after half an hour, 2 MB at most.

Times are the scheduler's clock, durations seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from distributed import Scheduler

from dask_ferro.policy.events import Arrived, Settled
from dask_ferro.policy.ledger import Ledger

# Moves that are kept one by one: 1 MB; counting their pairs takes a page 1 ms.
_MOVES = 5_000
# Seconds that are kept as sums, and samples of what waits and runs: ten minutes, and half an hour.
_SECONDS = 600
_SAMPLES = 1_800
# Between two samples: the plugin's slow tick comes twice a second.
_SAMPLED = 0.9


class Second(NamedTuple):
    """The moves of one second of the clock, and the work in stolen tasks that ended in it; confirmed ones cost."""

    second: int
    confirmed: int = 0
    refused: int = 0
    stale: int = 0
    worked: float = 0.0
    spent: float = 0.0

    def plus(self, record: Settled | Arrived) -> Second:
        """Return the second with a record more."""
        if isinstance(record, Arrived):
            return self._replace(worked=self.worked + record.worked)
        if record.outcome == "confirmed":
            return self._replace(confirmed=self.confirmed + 1, spent=self.spent + record.cost)
        return self._replace(**{record.outcome: getattr(self, record.outcome) + 1})


class MoveLog:
    """The records of one scheduler.

    Parameters
    ----------
    counts : dict of str to float
        The core's, of requests and outcomes; the seconds are added here.

    Attributes
    ----------
    counts : dict of str to float
        "requests", "confirmed", "refused", "stale"; "seconds moving", projected, of the confirmed ones; "seconds
        worked": measured, by workers in tasks that they stole.  No thread works at two at a time, so this is time
        that was filled; seconds by which tasks finish earlier are no such thing, for many wait at once.
    moves : deque of Settled
        The newest requests whose outcome is known, oldest first.
    seconds : deque of Second
        Those in which something moved, or a stolen task ended, oldest first.
    stolen_in, stolen_out : Counter of address
        Tasks that a worker took from others, and that others took from it; of workers that are there.
    readers : list of callable (record)
        Told of each record as it is written.
    """

    def __init__(self, counts: dict[str, float]) -> None:
        self.counts = counts
        self.moves: deque[Settled] = deque(maxlen=_MOVES)
        self.seconds: deque[Second] = deque(maxlen=_SECONDS)
        self.stolen_in: Counter[str] = Counter()
        self.stolen_out: Counter[str] = Counter()
        self.readers: list[Callable[[Settled | Arrived], None]] = []

    def write(self, record: Settled | Arrived, now: float) -> None:
        """Add a record."""
        if isinstance(record, Arrived):
            self.counts["seconds worked"] += record.worked
        else:
            self.moves.append(record)
            if record.outcome == "confirmed":
                self.counts["seconds moving"] += record.cost
                self.stolen_out[record.victim] += 1
                self.stolen_in[record.thief] += 1
        if not self.seconds or self.seconds[-1].second != int(now):
            self.seconds.append(Second(int(now)))
        self.seconds[-1] = self.seconds[-1].plus(record)
        for reader in self.readers:
            reader(record)

    def left(self, worker: str) -> None:
        """Forget what is counted of a worker."""
        self.stolen_in.pop(worker, None)
        self.stolen_out.pop(worker, None)


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
    samples : deque of Sample
        About one a second.
    thresholds : deque of (time, least, median, most)
        Of all workers, at the moments of the samples; the seconds of backlog under which they steal.
    """

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self.thresholds: deque[tuple[float, float, float, float]] = deque(maxlen=_SAMPLES)

    def sampled(
        self, now: float, scheduler: Scheduler, ledger: Ledger, threshold: Callable[[str], float]
    ) -> None:
        """Note the moment, unless one was noted a moment ago.

        Parameters
        ----------
        threshold : callable (address) -> float
            Of a worker, learned or the one that it begins with; of 1,000 workers they take 0.3 ms.
        """
        if self.samples and 0 <= now - self.samples[-1].time < _SAMPLED:
            return
        waiting, running = ledger.waiting, len(ledger.entries) - ledger.waiting
        workers, threads, queued = len(scheduler.workers), scheduler.total_nthreads, len(scheduler.queued)
        self.samples.append(Sample(now, workers, threads, running, waiting, queued))
        if ordered := sorted(map(threshold, ledger.rows)):
            self.thresholds.append((now, ordered[0], ordered[len(ordered) // 2], ordered[-1]))
