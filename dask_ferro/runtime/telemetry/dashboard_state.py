"""The scheduler's state as plain values: what a page of the dashboard is given when it is open.

Nothing here keeps anything or draws anything; each function reads a moment.  Each picture is bounded: workers beyond
what a page has room for are left out and counted, and a graph of many tasks is one of groups.  Durations are seconds,
sizes bytes, times the scheduler's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

from distributed import Scheduler
from distributed.scheduler import WorkerState

from dask_ferro.policy.events import OUTCOMES, Settled
from dask_ferro.runtime.plugin.stealing import Stealing
from dask_ferro.runtime.site_jobs import MODES
from dask_ferro.runtime.telemetry.events import TOPIC, ClosedPool, ScaleEvent
from dask_ferro.runtime.telemetry.move_log import Sample, Second
from dask_ferro.runtime.upstream import metrics_of
from dask_ferro.runtime.worker.plugin import METRIC

# Workers that a page shows one by one: rows of it are 6 pixels high then.
SHOWN = 64
# Rows and columns of the flow matrix; what others moved is summed up.
PAIRED = 32
# Events that the elastic page looks at, and the topic under which they are published.
EVENTS = 500
# What is published of workers that go, and how it is told.
_DEPARTURES = {"leave": "begin to leave", "left": "left", "stayed": "stayed"}


class MoveFlow(NamedTuple):
    """The confirmed moves from one worker to another, by their labels."""

    victim: str
    thief: str
    moves: int
    gain: float
    cost: float


class Backlog(NamedTuple):
    """What a worker has to do, and the threshold under which it steals."""

    worker: str
    seconds: float
    threshold: float
    waiting: int


class StealingPicture(NamedTuple):
    """What the page of stealing shows.

    Attributes
    ----------
    policy : str
        By its name; "none" moves nothing.
    totals : mapping of str to float
        "confirmed", "refused", "stale", "worked" and "spent", since the plugin is on.
    flows : tuple of MoveFlow
        Of the moves that are kept.
    seconds : tuple of Second
    backlogs : tuple of Backlog
    unseen : int
        Workers that are not among the backlogs.
    thresholds : tuple of (time, least, median, most)
    waits : tuple of str
        Lines of tasks that wait although a worker has nothing to do, the longest first.
    """

    policy: str
    totals: Mapping[str, float]
    flows: tuple[MoveFlow, ...]
    seconds: tuple[Second, ...]
    backlogs: tuple[Backlog, ...]
    unseen: int
    thresholds: tuple[tuple[float, float, float, float], ...]
    waits: tuple[str, ...] = ()


class Closed(NamedTuple):
    """A pool of which no job is asked for: why, until when (epoch; 0: nobody knows), and its last job's last lines.

    `state` is "closed", "paused" or "being removed".
    """

    pool: str
    why: str
    until: float = 0.0
    output: str = ""
    state: str = "closed"


class ScalingDecision(NamedTuple):
    """One decision of the elastic controller."""

    time: float
    wanted: int
    jobs: Mapping[str, int]
    why: str
    actions: tuple[str, ...]
    node_seconds: float
    queue_wait: Mapping[str, float | None]
    closed: tuple[Closed, ...] = ()


class ElasticPicture(NamedTuple):
    """What the elastic page shows: decisions, oldest first; workers that left, and why; the load."""

    decisions: tuple[ScalingDecision, ...]
    departures: tuple[tuple[float, str], ...]
    samples: tuple[Sample, ...]


class HostMemory(NamedTuple):
    """A worker process's memory, as its operating system measured it; `limit` 0: none.

    `results` is the part of it that is known to be results of tasks.
    """

    worker: str
    results: int
    other: int
    spilled: int
    limit: int


class DeviceMemory(NamedTuple):
    """A device's memory, once, however many workers use it."""

    device: str
    workers: str
    used: int
    total: int


class MemoryPicture(NamedTuple):
    """What the page of memory shows, and how many workers it leaves out."""

    hosts: tuple[HostMemory, ...]
    devices: tuple[DeviceMemory, ...]
    unseen: int


def label(address: str, ws: WorkerState | None = None) -> str:
    """Return what a worker is called on a page: its name where it was given one, else its address."""
    short = address.partition("://")[2] or address
    name = "" if ws is None or ws.name is None else str(ws.name)
    return short if not name or name == address else name


# -- stealing ------------------------------------------------------------------------------------------------


def stealing_picture(scheduler: Scheduler, stealing: Stealing, now: float) -> StealingPicture:
    """Return what is stolen, and what every worker has to do.

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
    waits = tuple(wait.told() for wait in stealing.waits.now)
    seconds, thresholds = tuple(log.seconds), tuple(stealing.watch.thresholds)
    flows = _flows(scheduler, log.moves)
    return StealingPicture(
        stealing.settings.stealing, totals, flows, seconds, backlogs, unseen, thresholds, waits
    )


def _flows(scheduler: Scheduler, moves: Iterable[Settled]) -> tuple[MoveFlow, ...]:
    """The confirmed moves by pair; beyond some pairs of workers, those who moved little are "others"."""
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
    # Gains are of tasks that wait at once: their mean says something, their sum does not.
    return tuple(MoveFlow(*pair, int(n), gain / n, cost) for pair, (n, gain, cost) in sums.items())


def _backlogs(scheduler: Scheduler, stealing: Stealing, now: float) -> tuple[Backlog, ...]:
    """The workers in order of their addresses; of many, those with the most and with the least to do."""
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
    """Return what sorts names with numbers as people do.

    >>> sorted(["10", "9", "w-2"], key=natural)
    ['9', '10', 'w-2']
    """
    digits = text.isdecimal()
    return (not digits, int(text) if digits else 0, len(text), text)


# -- elastic -------------------------------------------------------------------------------------------------


def elastic_picture(
    scheduler: Scheduler, stealing: Stealing, newest: ScaleEvent | None = None
) -> ElasticPicture:
    """Return what the elastic controller told of its decisions, and the load of the same time.

    Parameters
    ----------
    newest : mapping, optional
        Its newest decision, for where Dask has dropped the event of it: it keeps 1,000 of all kinds.
    """
    told = [(at, message) for at, message in scheduler.get_events(TOPIC) if isinstance(message, dict)]
    scaled = [(at, cast(ScaleEvent, message)) for at, message in told if message.get("action") == "scale"]
    if newest and not scaled:
        scaled = [(newest.get("time", 0.0), newest)]
    went = [(at, message) for at, message in told if message.get("action") in _DEPARTURES]
    decisions = tuple(_decision(at, message) for at, message in scaled[-EVENTS:])
    departures = tuple((at, _departure(message)) for at, message in went[-EVENTS:])
    return ElasticPicture(decisions, departures, tuple(stealing.watch.samples))


def _decision(at: float, message: ScaleEvent) -> ScalingDecision:
    """A decision; one that another version of the controller published may lack some of it."""
    return ScalingDecision(
        message.get("time", at),
        sum((message.get("wanted") or {}).values()),
        message.get("jobs") or {},
        message.get("why") or "",
        tuple(message.get("actions") or ()),
        message.get("node_seconds") or 0.0,
        message.get("queue_wait") or {},
        tuple(_closed(str(pool), told) for pool, told in (message.get("closed") or {}).items()),
    )


def _closed(pool: str, told: ClosedPool) -> Closed:
    state = MODES.get(told.get("mode") or "", "closed")
    return Closed(pool, told.get("why") or "", told.get("until") or 0.0, told.get("output") or "", state)


def _departure(message: Mapping[str, Any]) -> str:
    workers = [label(str(address)) for address in message.get("workers") or ()]
    some = ", ".join(workers[:3]) + (f" and {len(workers) - 3} more" if len(workers) > 3 else "")
    held = f", {message['keys']:,} results have to move" if message.get("keys") else ""
    why = f": {message['why']}" if message.get("why") else ""
    return f"{some} {_DEPARTURES[message['action']]}{held}{why}"


# -- memory --------------------------------------------------------------------------------------------------


def memory_picture(scheduler: Scheduler) -> MemoryPicture:
    """Return the memory of hosts and of devices, by what workers measured at their last heartbeat."""
    workers = list(scheduler.workers.values())
    shown = sorted(workers, key=lambda ws: -ws.memory.process)[:SHOWN]
    hosts = [_host_memory(ws) for ws in shown]
    return MemoryPicture(
        tuple(sorted(hosts, key=lambda h: natural(h.worker))), _devices(workers), len(workers) - len(shown)
    )


def _host_memory(ws: WorkerState) -> HostMemory:
    """Results on a device count in what Dask calls managed, and are no part of the process: they are left out."""
    memory, gpu = ws.memory, (metrics_of(ws).get(METRIC) or {}).get("gpu") or {}
    results = min(max(memory.managed - int(gpu.get("own", 0)), 0), memory.process)
    return HostMemory(
        label(ws.address, ws), results, memory.process - results, memory.spilled, ws.memory_limit or 0
    )


def _devices(workers: Sequence[WorkerState]) -> tuple[DeviceMemory, ...]:
    """Each device once: by the identity that our worker plugin measures, or else by what Dask's own metric tells."""
    seen: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for ws in workers:
        if found := _device(ws):
            name, used, total = found
            seen.setdefault((ws.host, name), []).append((label(ws.address, ws), used, total))
    return tuple(
        DeviceMemory(
            f"{host}, {name}",
            ", ".join(sorted((w for w, _, _ in rows), key=natural)),
            max(used for _, used, _ in rows),
            max(total for _, _, total in rows),
        )
        for (host, name), rows in sorted(seen.items())
    )[:SHOWN]


def _device(ws: WorkerState) -> tuple[str, int, int] | None:
    """A worker's device: what it is called on its host, its bytes in use, and all of them."""
    metrics = metrics_of(ws)
    told = (metrics.get(METRIC) or {}).get("gpu")
    if told:
        return f"GPU {told['device']}", told["used"], told["total"]
    gpu, more = metrics.get("gpu"), (ws.extra or {}).get("gpu") or {}
    if not gpu or gpu.get("memory-used") is None:
        return None
    # Dask tells the model and no identity: one worker a device is how its GPU clusters are set up.
    name = f"{more.get('name', 'GPU')} of {label(ws.address, ws)}"
    return name, int(gpu["memory-used"]), int(more.get("memory-total") or 0)
