"""Access to Dask's clusters by names that are no public interface; `upstream_names` lists them.

A job of a cluster is an entry of its specification: one worker, or a group of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypedDict

from distributed import Adaptive, SpecCluster

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.upstream_names import CLUSTER, SCHEDULER, missing, remedy


class JobSpec(TypedDict, total=False):
    """A job in a cluster's specification: its class, its keywords, and the ends of its workers' names."""

    cls: type
    options: dict[str, object]
    group: Sequence[str]


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
    """Return what `adapt` made last, or None."""
    return getattr(cluster, "_adaptive", None)


def forget_adapting(cluster: object) -> None:
    """Drop the options of a cluster's earlier `adapt` calls, which Dask would give to the next one too."""
    vars(cluster).pop("_adaptive_options", None)


# -- the specification ---------------------------------------------------------------------------------------


def has_specification(cluster: object) -> bool:
    """Whether a cluster starts its workers from a specification."""
    # A `SpecCluster` may be made without a kind of worker: then nothing can be added to it.
    return bool(getattr(cluster, "new_spec", None)) and hasattr(cluster, "worker_spec")


def options_of_a_job(cluster: SpecCluster) -> Mapping[str, Any]:
    """Return the keywords of a job's class."""
    return cluster.new_spec.get("options", {})


def workers_of_a_job(cluster: SpecCluster) -> int:
    """Return how many workers a job has."""
    return len(cluster.new_spec.get("group", ("",)))


def wanted(cluster: SpecCluster) -> dict[object, JobSpec]:
    """Return the specifications of the jobs that there should be, by name; the cluster's own, to be changed."""
    return cluster.worker_spec


def started(cluster: SpecCluster) -> dict[object, object]:
    """Return the jobs that were started, by name; the cluster's own, to be changed."""
    return cluster.workers


def next_spec(cluster: SpecCluster) -> dict[object, JobSpec]:
    """Return the specification of the next job, under a name that none had before."""
    spec: dict[object, JobSpec] = cluster.new_worker_spec()
    cluster._i += 1
    return spec


def correct(cluster: SpecCluster) -> Awaitable[None]:
    """Let a cluster start and close what its specification says; awaitable."""
    return cluster._correct_state()
