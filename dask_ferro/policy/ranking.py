"""Which ready task goes first: the one with the longest way to the end, where that decides anything.

Upward rank (Topcuoglu, Hariri and Wu, IEEE TPDS 13(3), 2002): the seconds of a task and of the longest chain of
tasks that wait for it.  A graph that is much wider than the cluster is bound by its work, not by its chains, and
Dask's own order, depth first, keeps its memory small: there, ranks would make all roots first.  A narrow graph has
no room for that: at most a few tasks a thread are ever alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.policy.facts import Key


def upward_ranks(dependents: Mapping[Key, Sequence[Key]], seconds: Mapping[Key, float]) -> dict[Key, float]:
    """Return the upward rank of every task in seconds.

    Parameters
    ----------
    dependents : mapping of key to keys
        For every task, those that wait for it; keys that are not in the mapping are left out.
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
    """Whether the longest chain bounds the graph: its average width is at most `wide` tasks a thread.

    In seconds, and in tasks: beside one long task, thousands of short ones are not narrow.
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
    """Return the place of each task: higher rank first, then the order that it had."""
    # The order that it had breaks ties: it is the one that keeps memory small.
    placed = sorted(ranks, key=lambda key: (-ranks[key], order[key]))
    return {key: place for place, key in enumerate(placed)}
