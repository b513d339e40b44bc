"""The task of a member: what Dask runs on a worker for its share of a flow."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from distributed import Reschedule, get_worker, secede

from dask_ferro.flow.hub import Home, Void, hub_of
from dask_ferro.flow.run import Share
from dask_ferro.flow.times import TaskTimes

# The annotation by which the scheduler says where the members of a run are.
PLACES = "ferro-flow"


class Places(NamedTuple):
    """A run of a flow: its name, where each member runs, and whether a worker has more of them than threads."""

    run: str
    homes: tuple[Home, ...]
    is_crowded: bool


def run_member(share: Share, keys: tuple[Hashable, ...], *arguments: Any) -> tuple[Any, ...]:
    """Return the results of a member's tasks; a `Failed` where one raised an error, or read what did."""
    worker = get_worker()
    own = worker.get_current_task()
    places = places_of(worker.state.tasks[own].annotations[PLACES])
    if places.is_crowded:
        secede()
    times = TaskTimes()
    try:
        return hub_of(worker.address).run(
            places.run, share, dict(zip(keys, arguments, strict=True)), places.homes, times
        )
    except Void:
        raise Reschedule from None
    finally:
        times.tell()


def places_of(record: Any) -> Places:
    """Return places from an annotation, whose tuples may have become lists on the way."""
    run, homes, is_crowded = record
    return Places(run, tuple(Home(*home) for home in homes), is_crowded)


def is_member(spec: object) -> bool:
    """Return whether a task of a graph is a member of a flow."""
    return getattr(spec, "func", None) is run_member
