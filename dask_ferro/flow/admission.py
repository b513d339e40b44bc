"""What becomes of a flow: whether it runs, runs again or fails, and where its members run; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

# Runs of a flow that are void although all of its workers are there, after which it fails.
_VOIDS = 5

Step = Literal["wait", "admit", "again", "fail", "unreachable"]


def next_step(members: int, states: Sequence[str], has_failed: bool, voids: int) -> Step:
    """Return what is done with a flow that does not run.

    Parameters
    ----------
    members : int
        How many it has.
    states : sequence of str
        Dask's states of those that the scheduler knows; a member that is ready and held is in "no-worker".
    has_failed : bool
        Whether a member or an input of one has failed.
    voids : int
        Its last runs that were void, although all of their workers were there.
    """
    if "no-worker" not in states:
        return "wait"
    if has_failed or len(states) < members:
        return "fail"
    if voids >= _VOIDS:
        return "unreachable"
    return "admit" if set(states) == {"no-worker"} else "again"


class Threads(NamedTuple):
    """A worker's address, its threads, those that members of flows have, and the tasks that it was given."""

    worker: str
    threads: int
    taken: int
    tasks: int


def placed(held: Sequence[Mapping[str, int]], workers: Sequence[Threads]) -> list[str] | None:
    """Return the workers of members; None: there are too few threads now.

    Parameters
    ----------
    held : sequence of mapping
        For each member, the bytes of its inputs on each worker.
    workers : sequence of Threads
    """
    free = {one.worker: one.threads - one.taken for one in workers}
    if workers and not any(one.taken for one in workers) and sum(one.threads for one in workers) < len(held):
        # Workers were lost: several members of one take turns.
        each, more = divmod(len(held), len(workers))
        free = {one.worker: each + (i < more) for i, one in enumerate(workers)}
    if sum(max(count, 0) for count in free.values()) < len(held):
        return None
    chosen = []
    for nbytes in held:
        able = [one for one in workers if free[one.worker] > 0]
        best = max(
            able,
            key=lambda one: (
                nbytes.get(one.worker, 0),
                free[one.worker] / one.threads,
                -one.tasks / one.threads,
            ),
        )
        free[best.worker] -= 1
        chosen.append(best.worker)
    return chosen
