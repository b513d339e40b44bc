"""Recorded scientific workflows as task graphs: WfCommons' JSON (WfFormat 1.5), https://wfcommons.org/format.

A workflow has a specification (tasks, files) and an execution (measured seconds).  Parents become dependencies; a
result is as large as all files that the task writes.  Files that no task writes, machines and commands are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from dask_ferro.errors import InputError
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from dask_ferro.trace import MOST_SECONDS
from dask_ferro.words import shorten

# The numbers that tell apart the tasks of a kind: blastall_ID000002, cpuhog_forkjoin_00000001.
_NUMBER = re.compile(r"[_-](ID)?\d+$")
_NO_LETTER = re.compile(r"[^A-Za-z]+")
# The sum of thousands of such files still fits in 63 bits.
_MOST_FILE = 1 << 50


class _Task(NamedTuple):
    kind: str
    seconds: float
    nbytes: int
    parents: frozenset[str]


class _Invalid(ValueError):
    """A part of the file that is not as it should be."""


def load(path: str | PathLike[str]) -> TaskGraph:
    """Return the task graph of a WfCommons instance.

    Parameters
    ----------
    path : path
        A JSON file in WfFormat 1.5 or later.

    Returns
    -------
    TaskGraph
        Named like the instance; prefixes are the tasks' names without numbers.

    Raises
    ------
    InputError
        If the file cannot be read, or is not such an instance.
    """
    where = fspath(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        workflow = content["workflow"]
        order = _sort_tasks(_tasks(workflow["specification"], workflow["execution"]["tasks"]))
        name = content.get("name")
    except OSError as error:
        raise InputError(f"workflow {where!r} cannot be read: {error.strerror}") from error
    except _Invalid as error:
        raise InputError(f"workflow {where!r}: {error}") from None
    # No JSON, another kind of JSON, or one that nests too deeply.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        told = f"{type(error).__name__}: {shorten(error)}"
        raise InputError(
            f"workflow {where!r}: wanted a WfCommons instance of version 1.5 ({told})"
        ) from error
    return _graph(name if isinstance(name, str) and name else Path(where).stem, order)


def _tasks(specification: Mapping[str, Any], measured: Iterable[Mapping[str, Any]]) -> dict[str, _Task]:
    """Return the tasks by id, in the order of the file."""
    rows = {str(row["id"]): row for row in specification["tasks"]}
    if len(rows) < len(specification["tasks"]):
        raise _Invalid("an id of a task occurs twice")
    if not rows:
        raise _Invalid("it has no tasks")
    sizes = {str(file["id"]): file["sizeInBytes"] for file in specification.get("files", ())}
    seconds = {str(task["id"]): task.get("runtimeInSeconds") for task in measured}
    parents: dict[str, set[str]] = {task_id: set() for task_id in rows}
    for task_id, row in rows.items():
        parents[task_id].update(_check_ids(row.get("parents"), task_id, rows))
        for child in _check_ids(row.get("children"), task_id, rows):
            parents[child].add(task_id)
    return {
        task_id: _Task(
            _kind(str(row.get("name") or task_id)),
            _amount(seconds.get(task_id), MOST_SECONDS, f"task {task_id}: runtimeInSeconds"),
            # A task's inputs are others' outputs, or existed before.
            sum(
                int(_amount(sizes.get(file), _MOST_FILE, f"task {task_id}: size of file {file!r}"))
                for file in row.get("outputFiles") or ()
            ),
            frozenset(parents[task_id]),
        )
        for task_id, row in rows.items()
    }


def _check_ids(ids: Iterable[str] | None, task_id: str, rows: Mapping[str, object]) -> list[str]:
    found = list(ids or ())
    if unknown := [other for other in found if other not in rows]:
        raise _Invalid(f"task {task_id}: parents or children have {unknown[0]!r}, which is no task")
    return found


def _amount(value: Any, most: float, what: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise _Invalid(f"{what} is {shorten(repr(value), 40)}, wanted a number from 0 to {most:g}")
    return float(value)


def _kind(name: str) -> str:
    """Return a task's name without its number, from which Dask derives the same prefix."""
    return _NO_LETTER.sub("-", _NUMBER.sub("", name)).strip("-").lower() or "task"


def _sort_tasks(tasks: Mapping[str, _Task]) -> list[tuple[str, _Task]]:
    """Return the tasks, each after its parents."""
    sorter = TopologicalSorter({key: sorted(task.parents) for key, task in tasks.items()})
    try:
        return [(key, tasks[key]) for key in sorter.static_order()]
    except CycleError as error:
        raise _Invalid(f"tasks wait for each other: {' -> '.join(error.args[1])}") from error


def _graph(name: str, order: Sequence[tuple[str, _Task]]) -> TaskGraph:
    # The token is in all keys: two workflows on one cluster have tasks with the same names.
    token = f"{crc32(name.encode()):08x}"
    keys: dict[str, tuple[str, int]] = {}
    counts: dict[str, int] = {}
    specs = []
    for task_id, task in order:
        group, index = f"{task.kind}-{token}", counts.get(task.kind, 0)
        counts[task.kind] = index + 1
        keys[task_id] = (group, index)
        # Sorted: the order of a set of strings differs between processes.
        after = tuple(keys[parent] for parent in sorted(task.parents))
        specs.append(TaskSpec(keys[task_id], task.kind, group, task.seconds, task.nbytes, after))
    return TaskGraph(name, tuple(specs))
