"""What is lost with workers that are ordered to leave, and how that is said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from dask.utils import format_bytes
from distributed.scheduler import WorkerState

from dask_ferro.runtime.scheduler_calls import LostCount
from dask_ferro.runtime.upstream import nbytes_of


@dataclass
class Lost:
    """Results that nobody holds any more: how many, of how many bytes, and those that nothing computes again."""

    results: int = 0
    nbytes: int = 0
    for_good: int = 0

    @property
    def count(self) -> LostCount:
        """As it travels."""
        return {"results": self.results, "nbytes": self.nbytes, "for_good": self.for_good}

    def add(self, other: LostCount) -> None:
        """Add what another one counts."""
        self.results += other["results"]
        self.nbytes += other["nbytes"]
        self.for_good += other["for_good"]

    def clear(self) -> None:
        """Count anew."""
        self.results = self.nbytes = self.for_good = 0


def lost_with(workers: Iterable[WorkerState], going: set[WorkerState]) -> Lost:
    """Return what is lost with workers when all of `going`, which they are among, are gone."""
    held = set(chain.from_iterable((*ws.has_what, *ws.actors) for ws in workers))
    alone = {ts for ts in held if going.issuperset(ts.who_has or ())}
    for_good = sum(ts.run_spec is None or bool(ts.actor) for ts in alone)
    return Lost(len(alone), sum(nbytes_of(ts) for ts in alone), for_good)


def told(lost: Lost) -> str:
    """Return it in words.

    >>> told(Lost(3, 2048, 1))
    '3 results (2.00 kiB) that only they held are lost; 1 of them, scattered or an actor, for good'
    """
    text = f"{lost.results} results ({format_bytes(lost.nbytes)}) that only they held are lost"
    if lost.for_good:
        return f"{text}; {lost.for_good} of them, scattered or an actor, for good"
    return f"{text}; Dask computes again what somebody needs"
