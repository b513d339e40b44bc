"""The data of `dask ferro top`: a snapshot of a scheduler, and the call that fetches it.

A snapshot runs on the scheduler and takes 7 us for an idle worker.  It works with or without the plugin; thresholds,
steals, devices and elastic state need the plugin.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, cast

import dask.config
from dask.utils import key_split
from distributed import Scheduler, Security, rpc
from distributed.comm import registry
from distributed.comm.addressing import parse_address
from distributed.metrics import time
from distributed.protocol.pickle import dumps
from distributed.scheduler import WorkerState

from dask_ferro.errors import InputError
from dask_ferro.observe.snapshot import snapshot
from dask_ferro.observe.summary import overview, state_of
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.events import ScaleEvent
from dask_ferro.scheduler.stealing import Stealing, stealing_of
from dask_ferro.scheduler.worker_plugin import METRIC

# The number of a worker's tasks that are sampled for the mix of prefixes.
_MIX = 64
# The most prefixes named for the cluster and for a worker.
_CLUSTER_PREFIXES, _WORKER_PREFIXES = 8, 3
# Seconds to connect; a running scheduler accepts at once.
_CONNECT = 3.0
# Seconds for an answer, which a scheduler that reads a graph of 100,000 tasks may need.
_PATIENCE = 15.0


# ---- on the scheduler --------------------------------------------------------------------------------------


# The facts of a worker: its tasks, its memory, its backlog, and moves.  "backlog" is the seconds until a task that
# joined its queue would start; without the plugin it is Dask's occupancy divided by the threads.  "in" and "out" count
# the tasks that it stole and that others stole from it, among the newest steals of the log.
WorkerLook = TypedDict(
    "WorkerLook",
    {
        "address": str, "name": str, "state": str, "threads": int, "cpu": float, "running": list[str], "tasks": int,
        "ops": list[list[str | int]], "memory": int, "memory_limit": int, "spilled": int, "device": str,
        "backlog": float, "threshold": float | None, "in": int | None, "out": int | None,
    },
)  # fmt: skip


class SchedulerSnapshot(TypedDict):
    """A snapshot of a scheduler.

    `ferro` is whether the plugin is installed, `stealing` its policy; `tasks` are counts by state; `ops` are prefixes
    being processed, the most frequent first, as [name, tasks]; `steals` are the plugin's counts; `elastic` is the
    newest decision of the controller; `overview` is the first page of the dashboard (`summary.Overview`).
    """

    address: str
    time: float
    ferro: bool
    stealing: str | None
    tasks: dict[str, int]
    ops: list[list[str | int]]
    steals: dict[str, float]
    elastic: ScaleEvent
    overview: dict[str, Any]
    workers: list[WorkerLook]


def take_snapshot(dask_scheduler: Scheduler) -> SchedulerSnapshot:
    """Return a snapshot, in types that msgpack supports."""
    stealing, now = stealing_of(dask_scheduler), time()
    elastic = cast(ScaleEvent, stealing.records.decisions.newest or {}) if stealing else {}
    facts = snapshot(dask_scheduler)
    ops: Counter[str] = Counter()
    for prefix in dask_scheduler.task_prefixes.values():
        ops[prefix.name] += prefix.states["processing"]
    moved: Counter[tuple[str, str]] = Counter()
    for move in stealing.records.moves.since()[0] if stealing else ():
        if move.outcome == "confirmed":
            moved["in", move.thief] += 1
            moved["out", move.victim] += 1
    return {
        "address": dask_scheduler.address,
        "time": now,
        "ferro": stealing is not None,
        "stealing": facts.stealing or None,
        "tasks": dict(facts.tasks),
        "ops": [[name, count] for name, count in ops.most_common(_CLUSTER_PREFIXES) if count],
        "steals": dict(facts.counts),
        "elastic": elastic,
        "overview": asdict(overview(facts)),
        "workers": [_row(ws, stealing, moved, now) for ws in list(dask_scheduler.workers.values())],
    }


def _row(
    ws: WorkerState, stealing: Stealing | None, moved: Mapping[tuple[str, str], int], now: float
) -> WorkerLook:
    metrics = upstream.metrics_of(ws)
    beat = metrics.get(METRIC) or {}
    mix = Counter(ts.prefix.name for ts in islice(ws.processing, _MIX))
    row = stealing.ledger.rows.get(ws.address) if stealing is not None else None
    # Without the plugin, as of the worker's last heartbeat.
    running = row.running if row is not None else [ts.key for ts in ws.executing if ts in ws.processing]
    return {
        "address": ws.address,
        "name": str(ws.name),
        "state": state_of(ws.status.name, len(ws.processing)),
        "threads": ws.nthreads,
        "cpu": metrics.get("cpu", 0.0),
        "running": [_label(key) for key in islice(running, _WORKER_PREFIXES)],
        "tasks": len(ws.processing),
        "ops": [[name, count] for name, count in mix.most_common(_WORKER_PREFIXES)],
        "memory": ws.memory.process,
        "memory_limit": ws.memory_limit,
        "spilled": ws.memory.spilled,
        "device": row.device if row is not None else beat.get("device", "-"),
        "backlog": row.starts_in(now) if row is not None else ws.occupancy / max(ws.nthreads, 1),
        "threshold": stealing.core.threshold(ws.address) if row is not None and stealing else None,
        "in": moved["in", ws.address] if row is not None else None,
        "out": moved["out", ws.address] if row is not None else None,
    }


def _label(key: Hashable) -> str:
    """Return a short form of a key: its prefix, and the numbers of bundle and chunk."""
    numbers = ",".join(str(part) for part in key[1:3]) if isinstance(key, tuple) else ""
    return f"{key_split(key)} {numbers}".strip()


# ---- from here ---------------------------------------------------------------------------------------------


def address_source(address: str | None = None, scheduler_file: str | Path | None = None) -> Callable[[], str]:
    """Return a function that returns the scheduler's address; a file is read at each call.

    Parameters
    ----------
    address : str, optional
        Default: from the configuration, which DASK_SCHEDULER_ADDRESS sets.
    scheduler_file : path, optional
        A file written by ``dask scheduler --scheduler-file``, which also finds a scheduler that restarts elsewhere.

    Raises
    ------
    InputError
        For an invalid address, or if none is given.
    """
    if address and scheduler_file:
        raise InputError("give either --scheduler or --scheduler-file")
    if scheduler_file:
        return lambda: _from_file(Path(scheduler_file))
    found = address or dask.config.get("scheduler-address", None)
    if not found:
        raise InputError(
            "no scheduler: give --scheduler ADDRESS such as tcp://host:8786, --scheduler-file, or set"
            " DASK_SCHEDULER_ADDRESS"
        )
    try:
        registry.get_backend(parse_address(found)[0])
        if ":" not in found.rpartition("://")[2]:
            raise ValueError("no port")
    except ValueError as error:
        raise InputError(f"scheduler {found!r}: {error}; wanted for instance tcp://host:8786") from None
    return lambda: found


def _from_file(path: Path) -> str:
    try:
        return str(json.loads(path.read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OSError(f"scheduler file {str(path)!r}: {error}") from None


async def ask(where: Callable[[], str], function: Callable[..., Any], **words: object) -> Any:
    """Run a function of this package, such as `take_snapshot`, on the scheduler, and return its result.

    Parameters
    ----------
    where : callable () -> str
        Returns the scheduler's address.

    Raises
    ------
    OSError
        If the scheduler does not answer; a later call may find it again.
    InputError
        If the scheduler does not have dask_ferro.
    """
    address, security = where(), Security().get_connection_args("client")
    try:
        async with rpc(address, timeout=_CONNECT, connection_args=security) as scheduler:
            call = scheduler.run_function(function=dumps(function), kwargs=dumps(words))
            answer = await asyncio.wait_for(call, _PATIENCE)
    except ModuleNotFoundError as error:
        raise InputError(
            f"the scheduler cannot import dask_ferro ({error}): install it in the scheduler's environment too"
        ) from error
    if answer["status"] != "OK":
        raise RuntimeError(f"scheduler {address}: {answer.get('exception')!r}")
    return answer["result"]
