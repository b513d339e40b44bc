"""The scheduler's state as plain values for the dashboard's open pages.

Nothing is stored or drawn here; each function reads the present state.  Each picture is bounded: workers beyond a
page's room are left out and counted.  Durations are seconds, sizes bytes, times the scheduler's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

from distributed import Scheduler
from distributed.scheduler import WorkerState

from dask_ferro.policy.events import RequestSettled
from dask_ferro.scheduler.events import DEPARTURES, ScaleEvent
from dask_ferro.scheduler.log import Log, Sample
from dask_ferro.scheduler.stealing import Stealing
from dask_ferro.words import list_names, natural

# The most workers shown one by one: then each row is 6 pixels high.
MAX_WORKERS = 64
# Rows and columns of the flow matrix; moves between other workers are summed up.
MATRIX_SIZE = 32
# Seconds of the chart of moves.
SECONDS = 60


class MovesPerSecond(NamedTuple):
    """The outcomes of requests in one second of the clock."""

    second: int
    confirmed: int = 0
    refused: int = 0
    stale: int = 0


class MoveFlow(NamedTuple):
    """The confirmed moves from one worker to another, by their labels."""

    victim: str
    thief: str
    moves: int
    gain: float
    cost: float


class Backlog(NamedTuple):
    """A worker's projected backlog, and the threshold below which it steals."""

    worker: str
    seconds: float
    threshold: float
    waiting: int


class StealingPicture(NamedTuple):
    """The content of the page of stealing.

    Attributes
    ----------
    policy : str
        The policy's name; "none" moves nothing.
    totals : mapping of str to float
        The log's counts of steals.
    flows : tuple of MoveFlow
        The moves that are kept, by pair.
    seconds : tuple of Second
        The last `SECONDS` up to the newest move; none before the first one.
    backlogs : tuple of Backlog
    unseen : int
        Workers that are not among the backlogs.
    """

    policy: str
    totals: Mapping[str, float]
    flows: tuple[MoveFlow, ...]
    seconds: tuple[MovesPerSecond, ...]
    backlogs: tuple[Backlog, ...]
    unseen: int


class ElasticPicture(NamedTuple):
    """The content of the elastic page: decisions, oldest first; retired workers with reasons; the load."""

    decisions: tuple[ScaleEvent, ...]
    departures: tuple[tuple[float, str], ...]
    samples: tuple[Sample, ...]


def label(address: str, ws: WorkerState | None = None) -> str:
    """Return a worker's label on a page: its name if it has one, else its address."""
    short = address.partition("://")[2] or address
    name = "" if ws is None or ws.name is None else str(ws.name)
    return short if not name or name == address else name


# -- stealing ------------------------------------------------------------------------------------------------


def stealing_picture(scheduler: Scheduler, stealing: Stealing, now: float) -> StealingPicture:
    """Return the state of stealing, with every worker's backlog.

    Parameters
    ----------
    scheduler : Scheduler
    stealing : Stealing
    now : float
    """
    log, backlogs = stealing.records, _backlogs(scheduler, stealing, now)
    moves, _ = log.moves.since()
    unseen = len(stealing.ledger.rows) - len(backlogs)
    flows, seconds = _flows(scheduler, moves), _seconds(moves)
    return StealingPicture(
        stealing.settings.stealing, dict(log.counts["steal"]), flows, seconds, backlogs, unseen
    )


def _seconds(moves: Sequence[RequestSettled]) -> tuple[MovesPerSecond, ...]:
    if not moves:
        return ()
    counts = Counter((int(move.at), move.outcome) for move in moves)
    newest = int(moves[-1].at)
    return tuple(
        MovesPerSecond(second, *(counts[second, outcome] for outcome in ("confirmed", "refused", "stale")))
        for second in range(newest - SECONDS + 1, newest + 1)
    )


def _flows(scheduler: Scheduler, moves: Iterable[RequestSettled]) -> tuple[MoveFlow, ...]:
    """Return the confirmed moves by pair; workers with few moves are combined as "others"."""
    confirmed = [move for move in moves if move.outcome == "confirmed"]
    busy = Counter(chain.from_iterable((move.victim, move.thief) for move in confirmed))
    names = {a: label(a, scheduler.workers.get(a)) for a, _ in busy.most_common(MATRIX_SIZE)}
    sums: dict[tuple[str, str], list[float]] = {}
    for move in confirmed:
        total = sums.setdefault(
            (names.get(move.victim, "others"), names.get(move.thief, "others")), [0, 0.0, 0.0]
        )
        total[0] += 1
        total[1] += move.gain
        total[2] += move.cost
    # Gains of tasks that wait at the same time overlap, so their mean is meaningful, but not their sum.
    return tuple(MoveFlow(*pair, int(n), gain / n, cost) for pair, (n, gain, cost) in sums.items())


def _backlogs(scheduler: Scheduler, stealing: Stealing, now: float) -> tuple[Backlog, ...]:
    """Return the workers' backlogs in order of their addresses; of many, the largest and the smallest."""
    rows = stealing.ledger.rows
    seconds = {address: row.starts_in(now) for address, row in rows.items()}
    shown = list(seconds)
    if len(shown) > MAX_WORKERS:
        ordered = sorted(seconds, key=lambda a: (-seconds[a], a))
        shown = ordered[: MAX_WORKERS // 2] + ordered[-MAX_WORKERS // 2 :]
    threshold, workers = stealing.core.threshold, scheduler.workers
    found = [Backlog(label(a, workers.get(a)), seconds[a], threshold(a), len(rows[a].queue)) for a in shown]
    return tuple(sorted(found, key=lambda b: natural(b.worker)))


# -- elastic -------------------------------------------------------------------------------------------------


def elastic_picture(log: Log) -> ElasticPicture:
    """Return the elastic controller's decisions, the workers that retired, and the load, of the last minutes."""
    decisions, departures = log.decisions.since()[0], log.departures.since()[0]
    return ElasticPicture(
        tuple(cast(ScaleEvent, decision) for decision in decisions),
        tuple((message["time"], _departure(message)) for message in departures),
        tuple(log.loads.since()[0]),
    )


def _departure(message: Mapping[str, Any]) -> str:
    some = list_names(label(str(address)) for address in message.get("workers") or ())
    held = f", {message['keys']:,} results have to move" if message.get("keys") else ""
    why = f": {message['why']}" if message.get("why") else ""
    return f"{some} {DEPARTURES[message['action']]}{held}{why}"
