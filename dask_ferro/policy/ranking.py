"""The priority of ready tasks by upward rank: the longest remaining chain first, in graphs that chains bound.

Upward rank (Topcuoglu, Hariri and Wu, IEEE TPDS 13(3), 2002) is the seconds of a task and of the longest chain of
tasks that depend on it.  A graph that is much wider than the cluster is bound by its work, not by its chains, and
Dask's own depth-first order keeps its memory small, whereas ranks would run all roots first.  In a narrow graph at
most a few tasks a thread are ever alive, so memory is no concern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.policy.facts import Key


def upward_ranks(dependents: Mapping[Key, Sequence[Key]], seconds: Mapping[Key, float]) -> dict[Key, float]:
    """Return the upward rank of every task in seconds.

    Parameters
    ----------
    dependents : mapping of key to keys
        For every task, its dependents; keys that are not in the mapping are ignored.
    seconds : mapping of key to float
    """
    waiting = dict.fromkeys(dependents, 0)
    before: dict[Key, list[Key]] = {key: [] for key in dependents}
    for key, after in dependents.items():
        for dependent in after:
            if dependent in before:
                waiting[key] += 1
                before[dependent].append(key)
    ranks = {key: seconds[key] for key in dependents}
    ready = [key for key, count in waiting.items() if not count]
    while ready:
        key = ready.pop()
        rank = ranks[key]
        for dependency in before[key]:
            ranks[dependency] = max(ranks[dependency], rank + seconds[dependency])
            waiting[dependency] -= 1
            if not waiting[dependency]:
                ready.append(dependency)
    return ranks


def is_narrow(
    dependents: Mapping[Key, Sequence[Key]],
    ranks: Mapping[Key, float],
    seconds: Mapping[Key, float],
    threads: int,
    wide: float,
) -> bool:
    """Whether the graph is bound by its longest chain: its average width is at most `wide` tasks a thread.

    Both by seconds and by tasks: thousands of short tasks beside one long one are not narrow.
    """
    # By seconds first, which costs no second pass over the graph.
    room = wide * threads
    longest = max(ranks.values(), default=0.0)
    if sum(seconds[key] for key in ranks) > room * longest:
        return False
    # The same ranks with each task as 1: the number of tasks in the longest chain.
    depths = upward_ranks(dependents, dict.fromkeys(dependents, 1.0))
    return len(depths) <= room * max(depths.values(), default=0.0)


def order_by_rank(ranks: Mapping[Key, float], order: Mapping[Key, float]) -> dict[Key, int]:
    """Return the position of each task: higher rank first, ties in the previous order."""
    # The previous order breaks ties, since it keeps memory small.
    placed = sorted(ranks, key=lambda key: (-ranks[key], order[key]))
    return {key: place for place, key in enumerate(placed)}
