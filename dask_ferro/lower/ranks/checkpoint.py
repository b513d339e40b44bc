"""Cutting the lineage of parameters, so that a long training loop keeps few tasks.

Dask keeps the tasks that made a part, those of every step, batches included, and a worker's death after a thousand
steps would run a thousand steps again.  A cut gives each part another key, as data that no task made, on the worker
that holds it, and copies it to another worker (to the client, where there is no other worker).  Dask then forgets the
earlier tasks, and a part that is lost later is read from its copy.  A cut waits for the parts.  Part and copy are held
until the next cut.

    w of step 20  --registered-->  w'  on the worker that has w; the steps that follow read it
                  --registered-->  w'' on another one; read again if the first worker dies
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from concurrent.futures import CancelledError
from typing import Any, NamedTuple
from uuid import uuid4

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future, get_client, wait
from distributed.scheduler import TaskState

from dask_ferro.graph.sharding.parts import Port
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.lower.client import current_client
from dask_ferro.lower.inputs.shipping import sent
from dask_ferro.lower.layer import Feed, KeySeries
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.sharded import GONE, CallTasks, Made, Memo, ShardedArray, Written
from dask_ferro.lower.ranks.spmd_tasks import same
from dask_ferro.lower.upstream import Task, TaskRef


def cut(arrays: Mapping[str, ShardedArray], client: Client) -> dict[str, ShardedArray]:
    """Return arrays whose parts depend on no tasks, with the same values and the same tokens.

    Parameters
    ----------
    arrays : mapping of str to ShardedArray
        Persisted arrays; others are returned as they are.
    client : distributed.Client
        Not asynchronous.

    Notes
    -----
    If a worker dies meanwhile and a part is lost with it, all arrays are returned as they are.
    """
    parts: dict[Key, Any] = {}
    able = {
        name: value for name, value in arrays.items() if (held := value.held()) and not parts.update(held)
    }
    try:
        kept, copies = _registered(parts, client)
    except CancelledError:
        return dict(arrays)
    return {**arrays, **{name: _cut(value, kept, copies) for name, value in able.items()}}


def _registered(parts: Mapping[Key, Any], client: Client) -> tuple[dict[Key, Any], dict[Key, Any]]:
    """Return the future of each part as data, and its copy: a future on another worker, or an array of the client."""
    where = client.who_has(list(parts.values()))
    order = sorted(client.scheduler_info(n_workers=-1)["workers"])
    kept, copies = {}, {}
    for key, future in parts.items():
        holders = [address for address in where.get(key, ()) if address in order]
        kept[key] = _Registration(client, future, holders or order)
        if others := [address for address in order if address not in holders]:
            first = order.index(holders[0]) if holders else 0
            next_ = min(others, key=lambda address: (order.index(address) - first) % len(order))
            copies[key] = _Registration(client, future, [next_])
    registrations = [*kept.values(), *copies.values()]
    wait([one.task for one in registrations])
    if any(one.task.status != "finished" for one in registrations):
        raise CancelledError
    names = [one.name for one in registrations]
    held: dict[str, Any] = {name: Future(name, client=client) for name in names}
    # Dask drops data that no client holds, and the registering workers hold them no longer than their tasks' results.
    where = client.run_on_scheduler(desired, names, client.id)  # while the tasks' results still hold them
    if not all(where[one.name] for one in kept.values()):
        raise CancelledError
    # The scheduler may move a registration: parts whose copy is on the same worker are copied to the client.
    copies = {key: one for key, one in copies.items() if where[one.name] - where[kept[key].name]}
    data = {key: held[one.name] for key, one in kept.items()}
    arrays = client.gather({key: parts[key] for key in parts.keys() - copies.keys()})
    return data, {**{key: held[one.name] for key, one in copies.items()}, **arrays}


class _Registration:
    """A task that registers a part as data under a key of its own."""

    def __init__(self, client: Client, part: Any, workers: list[str]) -> None:
        self.name = f"spmd-kept-{uuid4().hex}"
        where: dict[str, Any] = {"workers": workers, "allow_other_workers": True, "pure": False}
        self.task = client.submit(registered, self.name, part, **where)


def registered(key: str, value: Any) -> Any:
    """Store a value on this worker as data that no task made; return its future, which holds it."""
    return get_client().scatter({key: value}, direct=True)[key]


def desired(names: list[str], client: str, dask_scheduler: Any) -> dict[str, set[str]]:
    """Let a client hold data that workers registered, and return their workers' addresses; runs on the scheduler."""
    dask_scheduler.client_desires_keys(names, client)
    return {name: _holders(dask_scheduler.tasks[name]) for name in names}


def _holders(ts: TaskState) -> set[str]:
    return {ws.address for ws in ts.who_has or ()}


class _Copied(NamedTuple):
    """An array whose lineage was cut, with the future and the copy of each part, by key."""

    port: Port
    mesh: Mesh
    token: Hashable
    keys: tuple[str, ...]
    items: tuple[int, ...]
    futures: Mapping[str, Any]
    copies: Mapping[str, Any]

    def on(self, graph: HighLevelGraph) -> ShardedArray:
        """Return the array with a graph that has its keys."""
        name = self.port.name
        tasks = CallTasks.of(Written(str(self.token), graph, {name: self.keys}, items={name: self.items}))
        return ShardedArray(self.port, self.mesh, tasks, self.token, Made(self.again, 0))

    def again(self, memo: Memo) -> ShardedArray:
        """Return the array with the parts that are still there, and with copies of the others."""
        lost = {key: copy for key, copy in self.copies.items() if self.futures[key].status in GONE}
        kept = {key: future for key, future in self.futures.items() if key not in lost}
        return self.on(_of_copies(kept, lost))


def _cut(value: ShardedArray, kept: Mapping[Key, Any], copies: Mapping[Key, Any]) -> ShardedArray:
    futures = {kept[key].key: kept[key] for key in value.keys}
    again = {kept[key].key: copies[key] for key in value.keys}
    keys = tuple(kept[key].key for key in value.keys)
    copied = _Copied(value.port, value.mesh, value.token, keys, value.items, futures, again)
    name = f"spmd-kept-{uuid4().hex}"
    return copied.on(HighLevelGraph.from_collections(name, futures, dependencies=[]))


def _of_copies(kept: Mapping[str, Any], copies: Mapping[str, Any]) -> HighLevelGraph:
    """Return a graph of parts that are still there, and of others that are read from their copies."""
    client = current_client()
    feeds = {key: _feed(key, copy, client) for key, copy in copies.items()}
    tasks = {key: Task(key, same, TaskRef(feed.source.at(0))) for key, feed in feeds.items()}
    name = f"spmd-again-{uuid4().hex}"
    layers: dict[str, Any] = {key: {key: future} for key, future in kept.items()}
    needs: dict[str, set[str]] = {key: set() for key in kept}
    for feed in feeds.values():
        layers |= feed.layers
        needs |= feed.dependencies
    return HighLevelGraph({**layers, name: MaterializedLayer(tasks)}, {**needs, name: set(layers)})


def _feed(key: str, copy: Any, client: Client) -> Feed:
    """Return the feed of a copy: a future as it is, an array sent to the workers."""
    if isinstance(copy, Future):
        name = str(copy.key)
        return Feed(KeySeries(one=name), {name: {name: copy}}, {name: set()}, name)
    return sent(f"{key}-again", copy, client)
