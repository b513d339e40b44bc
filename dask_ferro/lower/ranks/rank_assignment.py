"""The worker of each rank: the plan's number where it names one, else the next in the order of workers.

Workers are numbered in the order of their names.  A stage without numbers has the workers after those of the stage
before it.  Where there are fewer workers than ranks, or a worker has left since, ranks share a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from distributed import Client

from dask_ferro.errors import ConfigError
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement
from dask_ferro.lower.client import client_name
from dask_ferro.lower.ranks.stage_workers import workers_of

# Seconds for which the workers of ranks are not looked up again: each time is a message to the scheduler, and Dask asks
# for the graph of each input of a call to see whether it is a collection.
LOOKED_UP_S = 0.1


class Homes(NamedTuple):
    """The addresses of the ranks' workers.

    Attributes
    ----------
    by_name : mapping of str or int to str
        All workers by address and number; none without a cluster, or while it has no worker.
    wanted : tuple of str or int
        The workers that ranks get in turn where a plan numbers none.
    ranks : int
    """

    by_name: Mapping[str | int, str] = {}
    wanted: tuple[str | int, ...] = ()
    ranks: int = 1

    def of(self, rank: int, site: NodePlacement = UNPLACED) -> str:
        """Return the address of a rank's worker at a site; requires at least one worker."""
        if site.workers is not None:
            return self._address(site.workers[rank], rank)
        place = (site.stage or 0) * self.ranks + rank
        return self._address(self.wanted[place % len(self.wanted)], place)

    def _address(self, name: str | int, place: int) -> str:
        if name in self.by_name:
            return self.by_name[name]
        # Each worker is listed twice, by number and by address.
        return self.by_name[place % (len(self.by_name) // 2)]


def homes(
    workers: Sequence[str | int] | None,
    ranks: int,
    sites: Iterable[NodePlacement],
    client: Client | None,
    *,
    known_before: bool = False,
) -> Homes:
    """Return the workers of ranks on a client's cluster.

    Parameters
    ----------
    workers : sequence of str or int, optional
        Address of each rank's worker, or its number; all workers if not given.
    ranks : int
    sites : iterable of NodePlacement
        The placements of all nodes.
    client : distributed.Client or None
    known_before : bool
        Whether all workers were connected before; a missing one then has died, and is no error.

    Raises
    ------
    ConfigError
        A worker that the cluster does not have.
    """
    if client is None:
        return Homes()
    known = workers_of(client)
    order = sorted(known, key=lambda a: (isinstance(known[a]["name"], str), known[a]["name"]))
    by_name: dict[str | int, str] = {**dict(enumerate(order)), **{address: address for address in order}}
    wanted = tuple(range(len(order))) if workers is None else tuple(workers)
    numbers = dict.fromkeys(chain.from_iterable(site.workers or () for site in sites))
    missing = [worker for worker in dict.fromkeys((*wanted, *numbers)) if worker not in by_name]
    if missing and not known_before:
        has = f"it has {order}, or 0 to {len(order) - 1}" if order else "it has none"
        raise ConfigError(
            f"workers: the cluster has no {missing}; {has}; start more, or number those that are there"
        )
    return Homes(by_name, wanted, ranks) if order else Homes()


class Lookup:
    """The workers of ranks on the current client's cluster, as they were a moment ago.

    The scheduler gives tasks of workers that left since to others (`stage_workers`).

    Parameters
    ----------
    where : callable
        Looks them up.
    """

    def __init__(self, where: Callable[[], Homes | None]) -> None:
        self._where = where
        self._found: tuple[str | None, float, Homes | None] | None = None

    def __call__(self) -> Homes | None:
        client, now = client_name(), time.monotonic()
        if self._found is None or self._found[0] != client or now - self._found[1] >= LOOKED_UP_S:
            self._found = client, now, self._where()
        return self._found[2]

    def forget(self) -> None:
        """Look them up again next time."""
        self._found = None
