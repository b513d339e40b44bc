"""Access to private or undocumented names of Dask's clusters."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Mapping
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import Adaptive, SpecCluster


class Adapting(Adaptive):  # type: ignore[misc]
    """Dask's base class of controllers, with a hook for its start."""

    def _start(self) -> None:
        super()._start()
        self._began()

    @abstractmethod
    def _began(self) -> None:
        """React to the start; the first interval begins now."""


class KeepsRestartedWorkers(SpecCluster):  # type: ignore[misc]
    """A cluster that gives a worker up only if it stays away for `lost-worker-timeout` after its latest loss.

    Dask's own also does if the worker was lost again shortly before that time had passed since an earlier loss: the
    nanny that is just starting it again is closed, and the cluster is smaller for good.
    """

    def _update_worker_status(self, op: str, msg: object) -> None:
        if op != "remove":
            super()._update_worker_status(op, msg)
            return
        name = workers_of(self)[str(msg)]["name"]
        # Not by its address: it may come back there.
        loss = vars(self).setdefault("_losses", {})[name] = object()
        # Past `SpecCluster`, whose timer this one replaces.
        super(SpecCluster, self)._update_worker_status(op, msg)
        delay = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
        asyncio.get_running_loop().call_later(delay, self._give_up, name, loss)

    def _give_up(self, name: object, loss: object) -> None:
        """Close a worker that has not come back since a loss, if that is its latest."""
        if vars(self)["_losses"].get(name) is not loss:
            return
        del vars(self)["_losses"][name]
        if str(name) not in names_of(self) and name in self.workers:
            self._futures.add(asyncio.ensure_future(self.workers.pop(name).close()))


def workers_of(cluster: SpecCluster) -> Mapping[str, Mapping[str, object]]:
    """Return the connected workers by address, each with its "name" and more."""
    return cluster.scheduler_info["workers"]


def names_of(cluster: SpecCluster) -> set[str]:
    """Return the names of the connected workers."""
    return {str(worker["name"]) for worker in workers_of(cluster).values()}


def scheduler_rpc(cluster: SpecCluster) -> Any:
    """Return the cluster's connection to its scheduler, whose methods are the scheduler's handlers."""
    return cluster.scheduler_comm


def scheduler_address(cluster: SpecCluster) -> str | None:
    """Return the address at which workers find the scheduler; None: it has none yet."""
    scheduler = cluster.scheduler
    return getattr(scheduler, "contact_address", None) or getattr(scheduler, "address", None)


def controller_of(cluster: object) -> Adapting | None:
    """Return the controller made by the last `adapt`, or None."""
    return getattr(cluster, "_adaptive", None)


def forget_adapting(cluster: object) -> None:
    """Drop the options of a cluster's earlier `adapt` calls, which Dask would pass to the next one too."""
    vars(cluster).pop("_adaptive_options", None)


def next_spec(cluster: SpecCluster) -> dict[object, dict[str, Any]]:
    """Return the specification of the next job, under an unused name."""
    spec: dict[object, dict[str, Any]] = cluster.new_worker_spec()
    cluster._i += 1
    return spec


def correct(cluster: SpecCluster) -> Awaitable[None]:
    """Return an awaitable that starts and closes jobs according to the specification."""
    return cluster._correct_state()
