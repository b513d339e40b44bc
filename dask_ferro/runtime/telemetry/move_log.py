"""The log of stealing: the outcome of each request and of each stolen task, written once as the core reports it.

Counters, events, metrics, pages, traces and Dask's own log are derived from these records, or receive them as
readers. Frequent facts are kept as sums per second, single moves as they were.  Beside them are samples of the
cluster's load. The log is bounded: after half an hour it grows no more, 2 MB at most.

Times are the scheduler's clock, durations seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from distributed import Scheduler

from dask_ferro.policy.events import Arrived, Settled
from dask_ferro.policy.ledger import Ledger

# The most single moves kept: 1 MB; counting their pairs takes a page 1 ms.
_MOVES = 5_000
# The most seconds kept as sums, and the most samples of the load: ten minutes, and half an hour.
_SECONDS = 600
_SAMPLES = 1_800
# The least seconds between two samples; the plugin's slow tick comes twice a second.
_SAMPLED = 0.9


class Second(NamedTuple):
    """The moves in one second of the clock, and the work of stolen tasks that ended in it."""

    second: int
    confirmed: int = 0
    refused: int = 0
    stale: int = 0
    worked: float = 0.0
    spent: float = 0.0

    def plus(self, record: Settled | Arrived) -> Second:
        """Return the sums with a record added."""
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
        The core's counts of requests and outcomes; the seconds are added here.

    Attributes
    ----------
    counts : dict of str to float
        "requests", "confirmed", "refused", "stale"; "seconds moving": the projected costs of confirmed moves;
        "seconds worked": the measured durations of stolen tasks.  A thread works on one task at a time, so the latter
        is time that was filled; gains cannot be added up, since many tasks wait at the same time.
    moves : deque of Settled
        The newest requests with known outcome, oldest first.
    seconds : deque of Second
        Seconds with a move or the end of a stolen task, oldest first.
    stolen_in, stolen_out : Counter of address
        Tasks that a present worker took from others, and that others took from it.
    readers : list of callable (record)
        Called with each record as it is written.
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
        """Forget the counts of a worker."""
        self.stolen_in.pop(worker, None)
        self.stolen_out.pop(worker, None)


class Sample(NamedTuple):
    """The load at one moment: tasks that run, wait at a worker, or wait at the scheduler."""

    time: float
    workers: int
    threads: int
    running: int
    waiting: int
    queued: int


class Watch:
    """Samples of the load and of the thresholds.

    Attributes
    ----------
    samples : deque of Sample
        About one a second.
    thresholds : deque of (time, least, median, most)
        Over all workers at the samples: the seconds of backlog below which they steal.
    """

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=_SAMPLES)
        self.thresholds: deque[tuple[float, float, float, float]] = deque(maxlen=_SAMPLES)

    def sampled(
        self, now: float, scheduler: Scheduler, ledger: Ledger, threshold: Callable[[str], float]
    ) -> None:
        """Add a sample, unless there is one from a moment ago.

        Parameters
        ----------
        threshold : callable (address) -> float
            Returns a worker's threshold, learned or initial; 1,000 workers take 0.3 ms.
        """
        if self.samples and 0 <= now - self.samples[-1].time < _SAMPLED:
            return
        waiting, running = ledger.waiting, len(ledger.entries) - ledger.waiting
        workers, threads, queued = len(scheduler.workers), scheduler.total_nthreads, len(scheduler.queued)
        self.samples.append(Sample(now, workers, threads, running, waiting, queued))
        if ordered := sorted(map(threshold, ledger.rows)):
            self.thresholds.append((now, ordered[0], ordered[len(ordered) // 2], ordered[-1]))
