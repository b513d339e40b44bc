"""Counts of the results lost with workers that retire on an order, and their description."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from distributed.scheduler import WorkerState

from dask_ferro.runtime.scheduler_calls import LostCount
from dask_ferro.runtime.upstream import nbytes_of
from dask_ferro.words import size


def summed(lost: Iterable[LostCount]) -> LostCount:
    """Return the sum of several losses."""
    found: LostCount = {"results": 0, "nbytes": 0, "for_good": 0}
    for one in lost:
        found["results"] += one["results"]
        found["nbytes"] += one["nbytes"]
        found["for_good"] += one["for_good"]
    return found


def lost_with(workers: Iterable[WorkerState], going: set[WorkerState]) -> LostCount:
    """Return the results lost with some workers when all of `going`, which includes them, are gone."""
    held = set(chain.from_iterable((*ws.has_what, *ws.actors) for ws in workers))
    alone = {ts for ts in held if going.issuperset(ts.who_has or ())}
    for_good = sum(ts.run_spec is None or bool(ts.actor) for ts in alone)
    return {"results": len(alone), "nbytes": sum(map(nbytes_of, alone)), "for_good": for_good}


def told(lost: LostCount) -> str:
    """Return a description of a loss.

    >>> told({"results": 3, "nbytes": 2048, "for_good": 1})
    '3 results (2.00 kiB) held by no other worker are lost; 1 of them, scattered or an actor, for good'
    """
    text = f"{lost['results']} results ({size(lost['nbytes'])}) held by no other worker are lost"
    if lost["for_good"]:
        return f"{text}; {lost['for_good']} of them, scattered or an actor, for good"
    return f"{text}; Dask recomputes those that are needed"
