"""Which replicas of a result Dask's active memory manager may drop, where several rules have a say.

Dask's policy `ReduceReplicas` keeps one replica of each result, and takes all of them as equal.  Rules narrow its
choice.  One policy applies them all, since of two that each replace Dask's the later one finds nothing to replace.

A worker's retirement copies what it holds, and ends when all of it is elsewhere: until then no rule has a say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from distributed import Status
from distributed.active_memory_manager import ActiveMemoryManagerExtension, ReduceReplicas, Suggestion

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.active_memory_manager import SuggestionGenerator
    from distributed.scheduler import TaskState, WorkerState

# From a result and its holders to those that may drop it.
ReplicaRule: TypeAlias = Callable[["TaskState", set["WorkerState"]], set["WorkerState"]]


class RuledReplicas(ReduceReplicas):
    """Dask's policy, whose suggestions pass through rules, by the names of those who put them.

    What it replaced is restored once there are no rules.
    """

    def __init__(self, replaced: set[ReduceReplicas]) -> None:
        self.replaced = replaced
        self.rules: dict[str, Callable[[], ReplicaRule]] = {}

    def run(self) -> SuggestionGenerator:
        """Yield Dask's suggestions for the holders that may drop a result."""
        rules = [begin() for begin in self.rules.values()]
        for found in super().run():
            ts = Suggestion(*found).ts
            holders = set(ts.who_has or ()) - self.manager.pending.get(ts, (set(), set()))[1]
            if may := may_drop(ts, holders, rules):
                yield Suggestion("drop", ts, may)


def may_drop(ts: TaskState, holders: set[WorkerState], rules: Iterable[ReplicaRule]) -> set[WorkerState]:
    """Return the holders that every rule lets drop a result; none while one of them is being retired."""
    if any(ws.status == Status.closing_gracefully for ws in holders):
        return set()
    return holders.intersection(*(rule(ts, holders) for rule in rules))


def put_rule(scheduler: Scheduler, name: str, begin: Callable[[], ReplicaRule]) -> None:
    """Add a rule, which `begin` returns for each run of the memory manager; nothing where Dask's policy is off."""
    manager, ours = _found(scheduler)
    if manager is None:
        return
    if ours is None:
        replaced = {p for p in manager.policies if type(p) is ReduceReplicas}
        if not replaced:
            return
        manager.policies -= replaced
        ours = RuledReplicas(replaced)
        manager.add_policy(ours)
    ours.rules[name] = begin


def remove_rule(scheduler: Scheduler, name: str) -> None:
    """Remove a rule, and with the last one restore Dask's policy.  Idempotent."""
    manager, ours = _found(scheduler)
    if manager is None or ours is None:
        return
    ours.rules.pop(name, None)
    if not ours.rules:
        manager.policies.discard(ours)
        manager.policies |= ours.replaced


def _found(scheduler: Scheduler) -> tuple[ActiveMemoryManagerExtension | None, RuledReplicas | None]:
    """Return the memory manager and our policy, where they are there."""
    manager = scheduler.extensions.get("amm")
    if not isinstance(manager, ActiveMemoryManagerExtension):
        return None, None
    return manager, next((policy for policy in manager.policies if isinstance(policy, RuledReplicas)), None)
