"""Choose the worker of each rank: the worker that the plan numbers, otherwise the next in the order of workers.

Workers are numbered in the order of their names.  A stage without numbers has the workers after the workers of the
previous stage.  If there are fewer workers than ranks, or a worker has left since, ranks share a worker and run on
its threads.

All tasks of ranks that a client submits together run as one flow: its members are the workers' threads, and each task
names its own (`flow.run.MEMBER`).  Without a client, or with an asynchronous one, Dask runs the tasks one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_ferro.errors import InputError
from dask_ferro.flow.run import MEMBER, MemberTask
from dask_ferro.flow.task_cost import FERRO
from dask_ferro.graph.sharding.node_placement import NodePlacement
from dask_ferro.lower.client import live_client
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.spmd_tasks import RankTasks
from dask_ferro.lower.stand_in import LACKS
from dask_ferro.trace import PART_ANNOTATION

if TYPE_CHECKING:
    from distributed import Client

# Seconds for which the workers of ranks are not looked up again: each look-up is a message to the scheduler, and Dask
# reads the graph of each input of a call to decide whether it is a collection.
LOOKED_UP_S = 0.1


class Homes(NamedTuple):
    """The ranks' workers on a client's cluster; none without a client, or while the cluster has no worker.

    `by_name` has their addresses by number, name and address, and `turn` the names that ranks get one after the other
    if a plan numbers none.  `ranks` is the number of ranks of a stage; `threads` are the threads of each worker.
    """

    order: tuple[str, ...] = ()
    by_name: Mapping[str | int, str] = {}
    turn: tuple[str | int, ...] = ()
    ranks: int = 1
    threads: Mapping[str, int] = {}
    client: str | None = None

    def member(self, rank: int, site: NodePlacement, order: int) -> MemberTask:
        """Return the member of a rank's task at a site, and the task's order there."""
        place = (site.stage or 0) * self.ranks + rank
        name = self.turn[place % len(self.turn)] if site.workers is None else site.workers[rank]
        address = self.by_name.get(name) or self.order[place % len(self.order)]
        lane = place // len(self.order) % self.threads[address]
        return MemberTask(address, f"{lane}{site.device or ''}", order)


def annotations_of(tasks: RankTasks, homes: Homes) -> dict[str, Callable[[Key], Any]]:
    """Return the annotations of tasks, which are functions of the key, as Dask expects them.

    Without workers, tasks run anywhere.
    """
    annotations: dict[str, Callable[[Key], Any]] = {PART_ANNOTATION: tasks.about.get}
    needs = {key: {"require": site.device} if site.device else {} for key, (_, site) in tasks.home.items()}
    if any(needs.values()):
        annotations[FERRO] = needs.__getitem__
    if homes.order:
        members = {key: homes.member(*home, tasks.order[key]) for key, home in tasks.home.items()}
        annotations[MEMBER] = members.__getitem__
    return annotations


class RankWorkers:
    """The workers of ranks on the current client's cluster, at most a moment old.

    `names` are the address, name or number of each rank's worker, in the order of stages; None: all workers.  `ranks`
    is the number of ranks of a stage, and `sites` are the placements of all nodes.  A flow whose worker has left
    since runs on others.
    """

    def __init__(
        self, names: Sequence[str | int] | None, ranks: int, sites: Iterable[NodePlacement] = ()
    ) -> None:
        self._names, self._ranks = names, ranks
        self._numbered = tuple(dict.fromkeys(chain.from_iterable(site.workers or () for site in sites)))
        self._were_there = False
        self._last: tuple[float, Homes] | None = None

    def __call__(self) -> Homes:
        """Return the workers.

        Raises `InputError` for a worker that the cluster never had; a worker that died since is not an error.
        """
        client, now = live_client(), time.monotonic()
        if client is None:
            return Homes()
        if self._last is None or self._last[1].client != client.id or now - self._last[0] >= LOOKED_UP_S:
            self._last = now, self._homes(client)
        return self._last[1]

    def _homes(self, client: Client) -> Homes:
        from dask_ferro.scheduler.bundling import enable_if_new

        enable_if_new(client)
        workers = workers_of(client)
        order = sorted(workers, key=lambda a: (isinstance(workers[a]["name"], str), workers[a]["name"]))
        by_name: dict[str | int, str] = {workers[address]["name"]: address for address in order}
        # A local cluster's names are numbers too, with gaps where workers were replaced.
        by_name |= dict(enumerate(order))
        by_name |= {address: address for address in order}
        turn = tuple(range(len(order))) if self._names is None else tuple(self._names)
        missing = [name for name in dict.fromkeys((*turn, *self._numbered)) if name not in by_name]
        if missing and not self._were_there:
            has = ", ".join(f"{workers[address]['name']!r} at {address}" for address in order)
            raise InputError(
                f"workers: the cluster has no {missing}, only {has or 'none'}; start more, or name others"
            )
        self._were_there = True
        threads = {address: workers[address]["nthreads"] for address in order}
        return Homes(tuple(order), by_name, turn, self._ranks, threads, client.id)


def workers_of(client: Client) -> dict[str, Any]:
    """Return Dask's facts of a client's workers by address, without those that lack dask_ferro."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {address: facts for address, facts in workers.items() if LACKS not in facts["metrics"]}
