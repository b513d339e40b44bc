"""Which worker is the home of a rank: by the plan's numbers where it has some, by the order of workers otherwise.

Workers are numbered in the order of their names.  A stage without numbers has the workers behind those of the stage
before it.  Where there are fewer than ranks, ranks share; so they do where a worker is gone that was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement


class Homes(NamedTuple):
    """Addresses of workers.

    Attributes
    ----------
    by_name : mapping of str or int to str
        All workers by address and number; none without a cluster, or while it has no worker.
    wanted : tuple of str or int
        Those that ranks have in turn where a plan numbers none.
    ranks : int
    """

    by_name: Mapping[str | int, str] = {}
    wanted: tuple[str | int, ...] = ()
    ranks: int = 1

    def of(self, rank: int, site: NodePlacement = UNPLACED) -> str:
        """Return the address of a rank's worker at a site; there is a worker."""
        if site.workers is not None:
            return self._address(site.workers[rank], rank)
        place = (site.stage or 0) * self.ranks + rank
        return self._address(self.wanted[place % len(self.wanted)], place)

    def _address(self, name: str | int, place: int) -> str:
        if name in self.by_name:
            return self.by_name[name]
        return self.by_name[place % (len(self.by_name) // 2)]


def homes(
    workers: Sequence[str | int] | None,
    ranks: int,
    sites: Iterable[NodePlacement],
    client: Any,
    *,
    known_before: bool = False,
) -> Homes:
    """Return the homes of ranks on a client's cluster.

    Parameters
    ----------
    workers : sequence of str or int, optional
        Address of each rank's worker, or its number; all workers if not given.
    ranks : int
    sites : iterable of NodePlacement
        Of all nodes.
    client : distributed.Client or None
    known_before : bool
        Whether all workers have been there; those that are not now died.

    Raises
    ------
    ConfigError
        There is no such worker.
    """
    if client is None:
        return Homes()
    known = client.scheduler_info(n_workers=-1)["workers"]
    order = sorted(known, key=lambda a: (isinstance(known[a]["name"], str), known[a]["name"]))
    by_name: dict[str | int, str] = {**dict(enumerate(order)), **{address: address for address in order}}
    wanted = tuple(range(len(order))) if workers is None else tuple(workers)
    numbers = dict.fromkeys(number for site in sites for number in site.workers or ())
    missing = [worker for worker in dict.fromkeys((*wanted, *numbers)) if worker not in by_name]
    if missing and not known_before:
        has = f"it has {order}, or 0 to {len(order) - 1}" if order else "it has none"
        raise ConfigError(
            f"workers: the cluster has no {missing}; {has}; start more, or number those that are there"
        )
    return Homes(by_name, wanted, ranks) if order else Homes()
