"""The scheduler's state as plain values for the dashboard's open pages.

Nothing is stored or drawn here; each function reads the present state.  Each picture is bounded: workers beyond a
page's room are left out and counted.  Durations are seconds, sizes bytes, times the scheduler's clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

from distributed import Scheduler
from distributed.scheduler import WorkerState

from dask_ferro.policy.events import OUTCOMES, Arrived, Settled
from dask_ferro.runtime.plugin.stealing import Stealing
from dask_ferro.runtime.telemetry.events import DEPARTURES, ScaleEvent
from dask_ferro.runtime.telemetry.log import Log, Sample
from dask_ferro.words import few, natural

# The most workers shown one by one: then each row is 6 pixels high.
SHOWN = 64
# Rows and columns of the flow matrix; moves between other workers are summed up.
PAIRED = 32
# Seconds of the charts of moves.
SECONDS = 60


class Second(NamedTuple):
    """The moves in one second of the clock, and the work of stolen tasks that ended in it."""

    second: int
    confirmed: int = 0
    refused: int = 0
    stale: int = 0
    worked: float = 0.0
    spent: float = 0.0


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
        The last `SECONDS` up to the newest move, of the moves that are kept.
    backlogs : tuple of Backlog
    unseen : int
        Workers that are not among the backlogs.
    thresholds : tuple of (time, least, median, most)
    """

    policy: str
    totals: Mapping[str, float]
    flows: tuple[MoveFlow, ...]
    seconds: tuple[Second, ...]
    backlogs: tuple[Backlog, ...]
    unseen: int
    thresholds: tuple[tuple[float, float, float, float], ...]


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
    (moves, _), (stolen, _), (loads, _) = log.moves.since(), log.stolen.since(), log.loads.since()
    return StealingPicture(
        stealing.settings.stealing,
        dict(log.counts["steal"]),
        _flows(scheduler, moves),
        _seconds(moves, stolen),
        backlogs,
        len(stealing.ledger.rows) - len(backlogs),
        tuple((load.time, *load.thresholds) for load in loads if load.thresholds),
    )


def _seconds(moves: Sequence[Settled], stolen: Sequence[Arrived]) -> tuple[Second, ...]:
    """Return the seconds with a move or the end of a stolen task, of the last `SECONDS` before the newest of them."""
    ends = [one.requested + one.delay + one.worked for one in stolen]
    least = max([*ends[-1:], *(move.at for move in moves[-1:])], default=0.0) - SECONDS
    rows: defaultdict[int, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0, 0.0])
    for move in moves:
        if move.at > least:
            row = rows[int(move.at)]
            row[OUTCOMES.index(move.outcome)] += 1
            row[4] += move.cost if move.outcome == "confirmed" else 0.0
    for end, one in zip(ends, stolen, strict=True):
        if end > least:
            rows[int(end)][3] += one.worked
    return tuple(Second(second, *map(int, row[:3]), *row[3:]) for second, row in sorted(rows.items()))


def _flows(scheduler: Scheduler, moves: Iterable[Settled]) -> tuple[MoveFlow, ...]:
    """Return the confirmed moves by pair; workers with few moves are combined as "others"."""
    confirmed = [move for move in moves if move.outcome == "confirmed"]
    busy = Counter(chain.from_iterable((move.victim, move.thief) for move in confirmed))
    names = {a: label(a, scheduler.workers.get(a)) for a, _ in busy.most_common(PAIRED)}
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
    if len(shown) > SHOWN:
        ordered = sorted(seconds, key=lambda a: (-seconds[a], a))
        shown = ordered[: SHOWN // 2] + ordered[-SHOWN // 2 :]
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
    some = few(label(str(address)) for address in message.get("workers") or ())
    held = f", {message['keys']:,} results have to move" if message.get("keys") else ""
    why = f": {message['why']}" if message.get("why") else ""
    return f"{some} {DEPARTURES[message['action']]}{held}{why}"
