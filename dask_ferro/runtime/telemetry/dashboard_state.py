"""The scheduler's state as plain values for the dashboard's open pages.

Nothing is stored or drawn here; each function reads the present state.  Each picture is bounded: workers beyond a
page's room are left out and counted, and a graph of many tasks is shown by groups.  Durations are seconds, sizes
bytes, times the scheduler's clock.
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
from dask_ferro.runtime.telemetry.events import TOPIC, ClosedPool, ScaleEvent
from dask_ferro.runtime.telemetry.move_log import Sample, Second
from dask_ferro.runtime.upstream import metrics_of
from dask_ferro.runtime.worker.plugin import METRIC

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
    waits : tuple of str
        Sentences about tasks that wait although a worker is idle, the longest wait first.
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
    """A closed pool: the reason, the time of its reopening (epoch; 0: unknown), and its last job's last lines."""

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
    """The content of the elastic page: decisions, oldest first; retired workers with reasons; the load."""

    decisions: tuple[ScalingDecision, ...]
    departures: tuple[tuple[float, str], ...]
    samples: tuple[Sample, ...]


class HostMemory(NamedTuple):
    """A worker process's memory, as reported by its operating system; `limit` 0: none.

    `results` is the part of it that consists of results of tasks.
    """

    worker: str
    results: int
    other: int
    spilled: int
    limit: int


class DeviceMemory(NamedTuple):
    """A device's memory, counted once for all workers that use it."""

    device: str
    workers: str
    used: int
    total: int


class MemoryPicture(NamedTuple):
    """The content of the page of memory, and the number of workers left out."""

    hosts: tuple[HostMemory, ...]
    devices: tuple[DeviceMemory, ...]
    unseen: int


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
    waits = tuple(wait.told() for wait in stealing.waits.now)
    seconds, thresholds = tuple(log.seconds), tuple(stealing.watch.thresholds)
    flows = _flows(scheduler, log.moves)
    return StealingPicture(
        stealing.settings.stealing, totals, flows, seconds, backlogs, unseen, thresholds, waits
    )


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
    scaled = [(at, cast(ScaleEvent, message)) for at, message in told if message.get("action") == "scale"]
    if newest and not scaled:
        scaled = [(newest.get("time", 0.0), newest)]
    went = [(at, message) for at, message in told if message.get("action") in _DEPARTURES]
    decisions = tuple(_decision(at, message) for at, message in scaled[-EVENTS:])
    departures = tuple((at, _departure(message)) for at, message in went[-EVENTS:])
    return ElasticPicture(decisions, departures, tuple(stealing.watch.samples))


def _decision(at: float, message: ScaleEvent) -> ScalingDecision:
    """Return a decision; fields missing in another version's event get defaults."""
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
    state = "paused" if told.get("paused") else "closed"
    return Closed(pool, told.get("why") or "", told.get("until") or 0.0, told.get("output") or "", state)


def _departure(message: Mapping[str, Any]) -> str:
    workers = [label(str(address)) for address in message.get("workers") or ()]
    some = ", ".join(workers[:3]) + (f" and {len(workers) - 3} more" if len(workers) > 3 else "")
    held = f", {message['keys']:,} results have to move" if message.get("keys") else ""
    why = f": {message['why']}" if message.get("why") else ""
    return f"{some} {_DEPARTURES[message['action']]}{held}{why}"


# -- memory --------------------------------------------------------------------------------------------------


def memory_picture(scheduler: Scheduler) -> MemoryPicture:
    """Return the memory of hosts and devices, as of the workers' last heartbeats."""
    workers = list(scheduler.workers.values())
    shown = sorted(workers, key=lambda ws: -ws.memory.process)[:SHOWN]
    hosts = [host_memory(ws) for ws in shown]
    return MemoryPicture(
        tuple(sorted(hosts, key=lambda h: natural(h.worker))), _devices(workers), len(workers) - len(shown)
    )


def host_memory(ws: WorkerState) -> HostMemory:
    """Return a worker's memory; results on a device, which Dask counts as managed, are not part of the process."""
    memory, gpu = ws.memory, (metrics_of(ws).get(METRIC) or {}).get("gpu") or {}
    results = min(max(memory.managed - int(gpu.get("own", 0)), 0), memory.process)
    return HostMemory(
        label(ws.address, ws), results, memory.process - results, memory.spilled, ws.memory_limit or 0
    )


def _devices(workers: Sequence[WorkerState]) -> tuple[DeviceMemory, ...]:
    """Return each device once: by the identity that our worker plugin reports, or else by Dask's own metric."""
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
    """Return a worker's device: its name on the host, its bytes in use, and its total bytes."""
    metrics = metrics_of(ws)
    told = (metrics.get(METRIC) or {}).get("gpu")
    if told:
        return f"GPU {told['device']}", told["used"], told["total"]
    gpu, more = metrics.get("gpu"), (ws.extra or {}).get("gpu") or {}
    if not gpu or gpu.get("memory-used") is None:
        return None
    # Dask reports the model but no identity; its GPU clusters usually have one worker per device.
    name = f"{more.get('name', 'GPU')} of {label(ws.address, ws)}"
    return name, int(gpu["memory-used"]), int(more.get("memory-total") or 0)
