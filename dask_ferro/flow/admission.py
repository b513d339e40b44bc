"""The fate of a flow: whether it runs, runs again or fails, and where its members run; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

# Runs of a flow that are void although all of its workers are there, after which it fails.
_VOIDS = 5

Step = Literal["wait", "admit", "again", "fail", "lose", "unreachable"]


def next_step(members: int, states: Sequence[str], has_failed: bool, voids: int) -> Step:
    """Return what is done with a flow that does not run.

    `states` are Dask's of the members that the scheduler knows: one that is ready and held is in "no-worker".
    `has_failed` says so of a member or an input of one.  `voids` counts the newest runs that were void, although all of
    their workers were there.
    """
    if "no-worker" not in states:
        # All are needed where one is: its inputs, of other flows, would else be computed again for the next one.
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
    """A worker's address, its threads, those that members of flows have, and the tasks that it was given."""

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

    No flow overtakes one that waits for threads.  One that requires what no worker has is not waited for.
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
    chosen = _placed(claims, workers, takes_turns=False)
    if chosen is None and not any(one.taken for one in workers):
        # There are no more threads, as where workers were lost: several members of one take turns.
        chosen = _placed(claims, workers, takes_turns=True)
    return chosen


def _placed(claims: Sequence[Claim], workers: Sequence[Threads], takes_turns: bool) -> list[str] | None:
    free = {one.worker: one.threads - one.taken for one in workers}
    chosen = [""] * len(claims)

    def choice(claim: Claim, one: Threads) -> tuple[float, ...]:
        is_home, left = one.worker == claim.home, free[one.worker]
        held = claim.held.get(one.worker, 0)
        return left > 0, is_home, held, left / one.threads, -one.tasks / one.threads

    # Who can run on few workers comes first, then who has a home: the others go where there is room.
    for i in sorted(range(len(claims)), key=lambda i: (claims[i].able is None, claims[i].home not in free)):
        able = [one for one in workers if claims[i].able is None or one.worker in (claims[i].able or ())]
        best = max(able, key=lambda one: choice(claims[i], one), default=None)
        if best is None or (free[best.worker] <= 0 and not takes_turns):
            return None
        free[best.worker] -= 1
        chosen[i] = best.worker
    return chosen
