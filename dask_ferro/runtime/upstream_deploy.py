"""Access to Dask's clusters by names that are no public interface; `upstream_names` lists them.

A job of a cluster is an entry of its specification: one worker, or a group of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from distributed import Adaptive

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.upstream_names import CLUSTER, SCHEDULER, missing, remedy


class Adapting(Adaptive):  # type: ignore[misc]
    """Dask's base class of controllers, which says when it begins."""

    def _start(self) -> None:
        super()._start()
        self._began()

    @abstractmethod
    def _began(self) -> None:
        """Do what is to be done at once; the first interval begins now."""


def check(what: str, *parts: str) -> None:
    """Refuse to go on where the installed Dask lacks what the elastic part needs of it.

    Raises
    ------
    ConfigError
        Naming what is missing, the versions and the remedy.
    """
    if lacks := missing(CLUSTER, SCHEDULER, *parts):
        raise ConfigError(remedy(lacks, f"{what} cannot be used"))


def workers_of(cluster: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return the connected workers by address, each with its "name" and more."""
    found: Mapping[str, Mapping[str, Any]] = cluster.scheduler_info["workers"]
    return found


def names_of(cluster: Any) -> set[str]:
    """Return the names of the connected workers."""
    return {str(worker["name"]) for worker in workers_of(cluster).values()}


def scheduler_rpc(cluster: Any) -> Any:
    """Return the cluster's connection to its scheduler, whose methods are the scheduler's handlers."""
    return cluster.scheduler_comm


def scheduler_address(cluster: Any) -> str | None:
    """Return the address at which workers find the scheduler; None: it has none yet."""
    scheduler = cluster.scheduler
    return getattr(scheduler, "contact_address", None) or getattr(scheduler, "address", None)


def controller_of(cluster: Any) -> Any:
    """Return what `adapt` made last, or None."""
    return getattr(cluster, "_adaptive", None)


def forget_adapting(cluster: Any) -> None:
    """Drop the options of a cluster's earlier `adapt` calls, which Dask would give to the next one too."""
    vars(cluster).pop("_adaptive_options", None)


# -- the specification ---------------------------------------------------------------------------------------


def has_specification(cluster: Any) -> bool:
    """Whether a cluster starts its workers from a specification."""
    return bool(getattr(cluster, "new_spec", None)) and hasattr(cluster, "worker_spec")


def options_of_a_job(cluster: Any) -> Mapping[str, Any]:
    """Return the keywords of a job's class."""
    found: Mapping[str, Any] = cluster.new_spec.get("options", {})
    return found


def workers_of_a_job(cluster: Any) -> int:
    """Return how many workers a job has."""
    return len(cluster.new_spec.get("group", ("",)))


def wanted(cluster: Any) -> dict[Any, dict[str, Any]]:
    """Return the specifications of the jobs that there should be, by name; the cluster's own, to be changed."""
    found: dict[Any, dict[str, Any]] = cluster.worker_spec
    return found


def started(cluster: Any) -> dict[Any, Any]:
    """Return the jobs that were started, by name; the cluster's own, to be changed."""
    found: dict[Any, Any] = cluster.workers
    return found


def next_spec(cluster: Any) -> dict[Any, Any]:
    """Return the specification of the next job, under a name that none had before."""
    spec: dict[Any, Any] = cluster.new_worker_spec()
    cluster._i += 1
    return spec


def correct(cluster: Any) -> Any:
    """Let a cluster start and close what its specification says; awaitable."""
    return cluster._correct_state()
