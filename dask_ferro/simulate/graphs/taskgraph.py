"""A graph of tasks with their costs: input of the simulator, output of workload generators.

Durations are seconds on a worker of speed 1, sizes bytes.  Tasks are listed in an order in which they could run.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

Key = Hashable


class TaskSpec(NamedTuple):
    """A task with its costs.

    Attributes
    ----------
    key : str, or tuple of str and ints
        As in Dask.
    prefix, group : str
        The names by which Dask learns durations, and groups tasks.
    seconds : float
        Duration of the task.
    nbytes : int
        Size of its result.
    dependencies : tuple of keys
    annotated : float, optional
        The seconds that the graph itself states; None: unknown before the task has run.
    kernel : str
        Its computation when it is really run: "sleep", or the name of one of its workload's kernels.
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
    """Tasks with their dependencies, and lower bounds of their run time.

    Attributes
    ----------
    name : str
    tasks : tuple of TaskSpec
        Each after its dependencies.
    pinned : str
        The workers that roots start on: "" any, "one" all on one worker.
    phases : tuple of int
        Numbers of tasks, in order, that are submitted together; the next phase is submitted when these are done, as
        an iterating client does.  A phase's results are kept until the next one is done.  Empty: one phase.
    """

    name: str
    tasks: tuple[TaskSpec, ...]
    pinned: str = ""
    phases: tuple[int, ...] = ()

    @property
    def stops(self) -> tuple[int, ...]:
        """For each phase, the number of tasks in it and in earlier ones."""
        return tuple(accumulate(self.phases)) or (len(self.tasks),)

    @cached_property
    def by_key(self) -> dict[Key, TaskSpec]:
        """The tasks by key."""
        return {task.key: task for task in self.tasks}

    @cached_property
    def dependents(self) -> dict[Key, tuple[Key, ...]]:
        """For every task, those that depend on it."""
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
        """Seconds of the longest chain of dependencies."""
        ends: dict[Key, float] = {}
        for task in self.tasks:
            ends[task.key] = task.seconds + max((ends[d] for d in task.dependencies), default=0.0)
        return max(ends.values(), default=0.0)

    def lower_bound(self, threads: int) -> float:
        """Return a lower bound of the makespan of any schedule on that many threads of speed 1."""
        return max(self.critical_path, self.work / threads)
