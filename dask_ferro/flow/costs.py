"""The costs of tasks: measured seconds and bytes, by prefix and group of the key.

A group is one operation of one collection (`sum-6f3c...`): its tasks are alike, and a collection that is computed
again has the same groups.  Calls of a model have one group for bundles of the same operators, FLOPs and bytes; its
name is the part of their names before `CALL`.  The cost of a group that was never measured, such as a group of Dask's
next call with its fresh names, is a guess: the median of the newest groups of its prefix.  The maximum of that guess
is the longest of these groups, or ten times the median if there is only one, and at least 1 ms.  A task whose prefix
was never measured has its declared cost, if any (`task_cost`).

Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite, nan
from statistics import median
from typing import Any, NamedTuple

from dask.typing import Key
from dask.utils import key_split
from distributed.utils import key_split_group

from dask_ferro.flow.task_cost import CALL, MAX_ERROR, TRIAL_S, TaskCost
from dask_ferro.policy.estimates import Mean

# Groups stored for one prefix, and prefixes in all: at most 15 MB.  One program has a dozen slices.
GROUPS, PREFIXES = 64, 1024
# The newest groups, whose median projects a group that was never measured, and how many of them suffice for its
# maximum.
_NEWEST, _ENOUGH = 8, 2
# If tasks change their duration, an estimate has covered 7/8 of the change after this many tasks.
_MAX_TASKS = 20
# The bytes of an array's operation are the mean of up to this many tasks.
_SIZE_SAMPLES = 1000


class MeasuredTasks(NamedTuple):
    """Tasks of one group: how many ran, their total seconds, and the mean bytes of a result; nan: not measured."""

    prefix: str
    group: str
    tasks: int
    seconds: float
    nbytes: float


def merge_tasks(a: MeasuredTasks, b: MeasuredTasks) -> MeasuredTasks:
    """Return two measurements of a group as one."""
    sized = [one for one in (a, b) if isfinite(one.nbytes)]
    tasks = sum(one.tasks for one in sized)
    nbytes = sum(one.nbytes * one.tasks for one in sized) / tasks if tasks else nan
    return MeasuredTasks(a.prefix, a.group, a.tasks + b.tasks, a.seconds + b.seconds, nbytes)


@dataclass(slots=True)
class _GroupCost:
    """The cost of a group's tasks: the newest seconds, and bytes of many, since the last chunks are often smaller."""

    most: int
    seconds: Mean = field(default_factory=Mean)
    nbytes: float = 0.0
    sized: int = 0

    def size(self, nbytes: float, tasks: int) -> None:
        self.sized = min(self.sized + tasks, self.most)
        self.nbytes += (nbytes - self.nbytes) * min(tasks / self.sized, 1.0)


def names_of(key: Key) -> tuple[str, str]:
    """Return the prefix and the group of a key, as Dask's scheduler names them."""
    # All keys of an array's operation begin with one string, so it is looked up once.
    if isinstance(key, tuple) and key and isinstance(key[0], str):
        return _prefix(key[0]), key[0].partition(CALL)[0]
    return key_split(key), str(key_split_group(key))


_prefix = lru_cache(maxsize=4096)(key_split)


class Costs:
    """Measured costs; the least recently measured prefixes and groups are forgotten first."""

    def __init__(self, measured: Iterable[MeasuredTasks] = ()) -> None:
        self._prefixes: dict[str, dict[str, _GroupCost]] = {}
        # By prefix and group, the costs that were returned since the last change: all tasks of a group cost the same.
        self._returned: dict[tuple[str, str], TaskCost | None] = {}
        # The scheduler's event loop adds costs while another thread writes out a graph.
        self._lock = threading.Lock()
        self.changes = 0
        for one in measured:
            self.add(one)

    def add(self, measured: MeasuredTasks) -> None:
        """Learn from tasks that ran."""
        mean = measured.seconds / max(measured.tasks, 1)
        if not (isfinite(mean) and mean >= 0.0):
            return
        # A group with the name of its prefix has all calls of a function, of any size.
        is_mixed = measured.group == measured.prefix
        with self._lock:
            groups = self._prefixes[measured.prefix] = self._prefixes.pop(measured.prefix, {})
            group = groups.pop(measured.group, None) or _GroupCost(_MAX_TASKS if is_mixed else _SIZE_SAMPLES)
            groups[measured.group] = group
            # Once for each task, until the mean has forgotten the previous values.
            for _ in range(min(max(measured.tasks, 1), _MAX_TASKS)):
                group.seconds.add(mean)
            if isfinite(measured.nbytes) and measured.nbytes >= 0:
                group.size(measured.nbytes, max(measured.tasks, 1))
            for oldest in list(groups)[:-GROUPS]:
                del groups[oldest]
            if len(self._prefixes) > PREFIXES:
                del self._prefixes[next(iter(self._prefixes))]
            self.changes += 1
            self._returned = {}

    def of(self, key: Key) -> TaskCost | None:
        """Return the projected cost of a task by its key, or None if none of its prefix was ever measured."""
        names, returned = names_of(key), self._returned
        if names not in returned:
            returned[names] = self._of_group(*names)
        return returned[names]

    def _of_group(self, prefix: str, name: str) -> TaskCost | None:
        with self._lock:
            groups = dict(self._prefixes.get(prefix, {}))
        if not groups:
            return None
        # A group with the name of its prefix has all calls of a function, of any size.
        group = groups.get(name) if name != prefix else None
        if group is not None:
            return TaskCost(group.seconds.value, group.nbytes)
        among = tuple(groups.values())[-_NEWEST:]
        seconds = [g.seconds.value for g in among]
        usual = median(seconds)
        most = max(seconds) if len(among) >= _ENOUGH else MAX_ERROR * usual
        return TaskCost(usual, max(g.nbytes for g in among), max(most, TRIAL_S))

    def all(self) -> Iterator[MeasuredTasks]:
        """Yield the costs, the least recently measured first; `Costs.add` restores them in this order."""
        with self._lock:
            known = [(prefix, dict(groups)) for prefix, groups in self._prefixes.items()]
        for prefix, groups in known:
            for name, group in groups.items():
                nbytes = group.nbytes if group.sized else nan
                yield MeasuredTasks(prefix, name, 1, group.seconds.value, nbytes)


def to_measured(record: Mapping[str, Any]) -> MeasuredTasks | None:
    """Return a measurement from its record in a file or a message, or None if another release wrote the record."""
    try:
        return MeasuredTasks(**record)
    except TypeError:
        return None
