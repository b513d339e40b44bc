"""Decide whether a flow waits, runs, runs again or fails, and on which workers its members run; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

# A flow fails after this many void runs although all of its workers were present.
_VOIDS = 5

Step = Literal["wait", "admit", "again", "fail", "lose", "unreachable"]


def next_step(members: int, states: Sequence[str], has_failed: bool, voids: int) -> Step:
    """Return the next step of a flow that does not run.

    `states` are Dask's states of the members that the scheduler knows; a ready member that is held is in "no-worker".
    `has_failed` means that a member or an input of a member failed.  `voids` counts the newest void runs whose
    workers were all present.
    """
    if "no-worker" not in states:
        # If one member is needed, all are: its inputs, from other flows, would otherwise be computed again for the
        # next one.
        is_idle = len(states) == members and {"memory", "released"} & set(states)
        return "again" if is_idle and "waiting" in states else "wait"
    if has_failed:
        return "fail"
    # A member whose inputs were lost for good is forgotten.
    if len(states) < members:
        return "lose"
    if voids >= _VOIDS:
        return "unreachable"
    return "admit" if set(states) == {"no-worker"} else "again"


class Threads(NamedTuple):
    """A worker: its address, its threads, the threads that run members of flows, and the number of its tasks."""

    worker: str
    threads: int
    taken: int
    tasks: int


class Claim(NamedTuple):
    """The requirements of a member."""

    # The bytes of its inputs on each worker.
    held: Mapping[str, int]
    # The address of the worker on which it runs, if that has a free thread; "": any.
    home: str = ""
    # The workers on which it can run; None: all.
    able: Collection[str] | None = None

    @property
    def can_run(self) -> bool:
        return self.able is None or bool(self.able)


def admit(flows: Sequence[Sequence[Claim]], workers: Sequence[Threads]) -> list[list[str] | None]:
    """Return the workers of the members of each flow, in the order of the flows; None: the flow waits.

    No flow overtakes a flow that waits for threads, except if no worker meets the requirements of the waiting flow.
    """
    places: list[list[str] | None] = []
    is_full = False
    for claims in flows:
        chosen = None
        if not is_full and all(claim.can_run for claim in claims):
            chosen = place(claims, workers)
            is_full = chosen is None
        if chosen is not None:
            counts = Counter(chosen)
            workers = [
                one._replace(taken=one.taken + counts[one.worker], tasks=one.tasks + counts[one.worker])
                for one in workers
            ]
        places.append(chosen)
    return places


def place(claims: Sequence[Claim], workers: Sequence[Threads]) -> list[str] | None:
    """Return the workers of members; None: there are too few threads now."""
    chosen = _place_members(claims, workers, takes_turns=False)
    if chosen is None and not any(one.taken for one in workers):
        # There are not enough threads, for example because workers were lost: several members share a worker's thread.
        chosen = _place_members(claims, workers, takes_turns=True)
    return chosen


def _place_members(
    claims: Sequence[Claim], workers: Sequence[Threads], takes_turns: bool
) -> list[str] | None:
    free = {one.worker: one.threads - one.taken for one in workers}
    chosen = [""] * len(claims)

    def choice(claim: Claim, one: Threads) -> tuple[float, ...]:
        is_home, left = one.worker == claim.home, free[one.worker]
        held = claim.held.get(one.worker, 0)
        return left > 0, is_home, held, left / one.threads, -one.tasks / one.threads

    # Members that can run on few workers come first, then members with a home; the others take the remaining threads.
    for i in sorted(range(len(claims)), key=lambda i: (claims[i].able is None, claims[i].home not in free)):
        able = [one for one in workers if claims[i].able is None or one.worker in (claims[i].able or ())]
        best = max(able, key=lambda one: choice(claims[i], one), default=None)
        if best is None or (free[best.worker] <= 0 and not takes_turns):
            return None
        free[best.worker] -= 1
        chosen[i] = best.worker
    return chosen
