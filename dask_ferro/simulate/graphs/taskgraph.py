"""A graph of tasks by what they cost: what the simulator runs, and what a workload generator makes.

Durations are seconds on a worker of speed 1, sizes bytes.  Tasks stand in an order in which they could run.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

Key = Hashable


class TaskSpec(NamedTuple):
    """One task.

    Attributes
    ----------
    key : str, or tuple of str and ints
        As Dask has them.
    prefix, group : str
        What Dask learns durations by, and what it takes for one family of tasks.
    seconds : float
        What it takes.
    nbytes : int
        Size of its result.
    dependencies : tuple of keys
    annotated : float, optional
        The seconds that the graph itself says it takes; None: nobody knows before it ran.
    kernel : str
        What it does where it is run for real: "sleep", or the name of a kernel of its workload.
    """

    key: Key
    prefix: str
    group: str
    seconds: float
    nbytes: int = 0
    dependencies: tuple[Key, ...] = ()
    annotated: float | None = None
    kernel: str = "sleep"


@dataclass(frozen=True)
class TaskGraph:
    """Tasks and the bounds of what any scheduler can do with them.

    Attributes
    ----------
    name : str
    tasks : tuple of TaskSpec
        Each after its dependencies.
    pinned : str
        Where roots start: "" anywhere, "one" all on one worker.
    phases : tuple of int
        So many of the tasks, in order, are submitted together, and the next ones when those are done: what a client
        does that iterates.  A phase's results are kept until the next one is done.  Empty: all are one phase.
    """

    name: str
    tasks: tuple[TaskSpec, ...]
    pinned: str = ""
    phases: tuple[int, ...] = ()

    @property
    def stops(self) -> tuple[int, ...]:
        """For each phase, the number of tasks in it and in those before it."""
        return tuple(accumulate(self.phases)) or (len(self.tasks),)

    @cached_property
    def by_key(self) -> dict[Key, TaskSpec]:
        """The tasks by key."""
        return {task.key: task for task in self.tasks}

    @cached_property
    def dependents(self) -> dict[Key, tuple[Key, ...]]:
        """For every task, those that wait for it."""
        found: dict[Key, list[Key]] = {task.key: [] for task in self.tasks}
        for task in self.tasks:
            for dependency in task.dependencies:
                found[dependency].append(task.key)
        return {key: tuple(after) for key, after in found.items()}

    @cached_property
    def work(self) -> float:
        """Seconds of all tasks."""
        return sum(task.seconds for task in self.tasks)

    @cached_property
    def critical_path(self) -> float:
        """Seconds of the longest chain."""
        ends: dict[Key, float] = {}
        for task in self.tasks:
            ends[task.key] = task.seconds + max((ends[d] for d in task.dependencies), default=0.0)
        return max(ends.values(), default=0.0)

    def lower_bound(self, threads: int) -> float:
        """Return the seconds below which no schedule on so many threads of speed 1 can get."""
        return max(self.critical_path, self.work / threads)
