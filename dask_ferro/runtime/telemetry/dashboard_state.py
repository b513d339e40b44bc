"""The scheduler's state as plain values for the dashboard's open pages.

Nothing is stored or drawn here; each function reads the present state.  Each picture is bounded: workers beyond a
page's room are left out and counted.  Durations are seconds, sizes bytes, times the scheduler's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple, cast

from distributed import Scheduler
from distributed.scheduler import WorkerState

from dask_ferro.policy.events import OUTCOMES, Settled
from dask_ferro.runtime.plugin.stealing import Stealing
from dask_ferro.runtime.telemetry.events import TOPIC, ScaleEvent
from dask_ferro.runtime.telemetry.move_log import Sample, Second
from dask_ferro.words import few

# The most workers shown one by one: then each row is 6 pixels high.
SHOWN = 64
# Rows and columns of the flow matrix; moves between other workers are summed up.
PAIRED = 32
# The most events shown on the elastic page.
EVENTS = 500
# The words for published events of retiring workers.
_DEPARTURES = {"leave": "begin to leave", "left": "left", "stayed": "stayed"}


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
        "confirmed", "refused", "stale", "worked" and "spent", since the plugin was installed.
    flows : tuple of MoveFlow
        The moves that are kept, by pair.
    seconds : tuple of Second
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
    log = stealing.moves
    totals = {name: log.counts.get(name, 0) for name in OUTCOMES}
    totals["worked"] = log.counts.get("seconds worked", 0.0)
    totals["spent"] = log.counts.get("seconds moving", 0.0)
    backlogs = _backlogs(scheduler, stealing, now)
    unseen = len(stealing.ledger.rows) - len(backlogs)
    seconds, thresholds = tuple(log.seconds), tuple(stealing.watch.thresholds)
    flows = _flows(scheduler, log.moves)
    return StealingPicture(stealing.settings.stealing, totals, flows, seconds, backlogs, unseen, thresholds)


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


def natural(text: str) -> tuple[bool, int, int, str]:
    """Return a sort key that puts names with numbers in natural order.

    >>> sorted(["10", "9", "w-2"], key=natural)
    ['9', '10', 'w-2']
    """
    digits = text.isdecimal()
    return (not digits, int(text) if digits else 0, len(text), text)


# -- elastic -------------------------------------------------------------------------------------------------


def elastic_picture(
    scheduler: Scheduler, stealing: Stealing, newest: ScaleEvent | None = None
) -> ElasticPicture:
    """Return the elastic controller's published decisions, and the load over the same time.

    Parameters
    ----------
    newest : mapping, optional
        Its newest decision, in case Dask has dropped the event: it keeps 1,000 of all kinds.
    """
    told = [(at, message) for at, message in scheduler.get_events(TOPIC) if isinstance(message, dict)]
    scaled = [{"time": at, **message} for at, message in told if message.get("action") == "scale"]
    if newest and not scaled:
        scaled = [{"time": 0.0, **newest}]
    went = [(at, message) for at, message in told if message.get("action") in _DEPARTURES]
    decisions = tuple(cast(ScaleEvent, message) for message in scaled[-EVENTS:])
    departures = tuple((at, _departure(message)) for at, message in went[-EVENTS:])
    return ElasticPicture(decisions, departures, tuple(stealing.watch.samples))


def _departure(message: Mapping[str, Any]) -> str:
    some = few(label(str(address)) for address in message.get("workers") or ())
    held = f", {message['keys']:,} results have to move" if message.get("keys") else ""
    why = f": {message['why']}" if message.get("why") else ""
    return f"{some} {_DEPARTURES[message['action']]}{held}{why}"
