"""Recorded scientific workflows as task graphs: WfCommons' JSON (WfFormat), https://wfcommons.org/format.

Two forms are read.  Since version 1.5 a workflow has a specification (tasks, files) and an execution (measured
seconds); before, each task lists its own files and seconds.  Parents become dependencies; a result is as large as all
files that the task writes.  Files that no task writes, machines and commands are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard
from zlib import crc32

from dask_ferro.errors import ConfigError
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from dask_ferro.trace import MOST_SECONDS
from dask_ferro.words import short

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


def load(path: str | PathLike[str]) -> TaskGraph:
    """Return the task graph of a WfCommons instance.

    Parameters
    ----------
    path : path
        A JSON file in WfFormat 1.5 or later, or of the form before it.

    Returns
    -------
    TaskGraph
        Named like the instance; prefixes are the tasks' names without numbers.

    Raises
    ------
    ConfigError
        If the file cannot be read, or is not such an instance.
    """
    where = fspath(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"workflow {where!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"workflow {where!r} is not JSON: {error}") from error
    # A file of a few kilobytes can nest that deeply.
    except RecursionError as error:
        raise ConfigError(
            f"workflow {where!r}: its lists nest too deeply to be read; it is damaged"
        ) from error
    workflow = content.get("workflow") if isinstance(content, Mapping) else None
    if not isinstance(workflow, Mapping):
        raise ConfigError(f'workflow {where!r}: no "workflow" in it; wanted a WfCommons instance')
    try:
        order = _ordered(_WorkflowReader(workflow).tasks())
    except _Invalid as error:
        raise ConfigError(f"workflow {where!r}: {error}") from None
    name = content.get("name")
    return _graph(name if isinstance(name, str) and name else Path(where).stem, order)


class _Invalid(ValueError):
    """A part of the file that is no such instance."""


class _WorkflowReader:
    """A workflow of either form."""

    def __init__(self, workflow: Mapping[str, Any]) -> None:
        specification = workflow.get("specification")
        self._split = isinstance(specification, Mapping)
        part: Mapping[str, Any] = specification if isinstance(specification, Mapping) else workflow
        execution = workflow.get("execution")
        measured = execution.get("tasks") if isinstance(execution, Mapping) else None
        self._rows = self._list(part, "tasks", "the workflow")
        self._files = {str(f.get("id")): f.get("sizeInBytes") for f in _mappings(part.get("files"))}
        self._measured = {str(t.get("id")): t for t in _mappings(measured)}

    def tasks(self) -> dict[str, _Task]:
        """Return the tasks by id, in the order of the file."""
        found: dict[str, _Task] = {}
        names: dict[str, str] = {}
        # All names are read before any reference to one: a child may be listed before its parent.
        rows = [(self._id(row), row) for row in self._rows]
        for task_id, _ in rows:
            if task_id in names:
                raise _Invalid(f"task {task_id}: occurs twice")
            names[task_id] = task_id
        # Before 1.5, parents are given by name.
        for task_id, row in rows:
            names.setdefault(str(row.get("name")), task_id)
        children: dict[str, set[str]] = {}
        for task_id, row in rows:
            for child in self._ids(row, "children", task_id, names):
                children.setdefault(child, set()).add(task_id)
        for task_id, row in rows:
            parents = {*self._ids(row, "parents", task_id, names), *children.get(task_id, ())}
            name = str(row.get("name") or task_id)
            costs = self._seconds(task_id, row), self._written(task_id, row)
            found[task_id] = _Task(_kind(name), *costs, frozenset(parents))
        if not rows:
            raise _Invalid("it has no tasks")
        return found

    def _id(self, row: Mapping[str, Any]) -> str:
        return str(row.get("id") or row.get("name"))

    def _list(self, part: Mapping[str, Any], name: str, what: str) -> list[Mapping[str, Any]]:
        value = part.get(name, [])
        if not isinstance(value, list) or any(not isinstance(item, Mapping) for item in value):
            raise _Invalid(f"{what}: {name} is not a list of objects")
        return value

    def _ids(
        self, row: Mapping[str, Any], name: str, task_id: str, names: Mapping[str, str]
    ) -> Iterable[str]:
        for other in self._listed(row, name, task_id):
            if not isinstance(other, str) or other not in names:
                raise _Invalid(f"task {task_id}: {name} has {other!r}, which is no task")
            yield names[other]

    def _listed(self, row: Mapping[str, Any], name: str, task_id: str) -> list[Any]:
        value = row.get(name)
        if value is not None and not isinstance(value, list):
            raise _Invalid(f"task {task_id}: {name} is {value!r}, wanted a list")
        return value or []

    def _seconds(self, task_id: str, row: Mapping[str, Any]) -> float:
        # Since 1.5, measurements are separate from the specification.
        source = self._measured.get(task_id, {}) if self._split else row
        value = source.get("runtimeInSeconds", source.get("runtime"))
        if value is None:
            raise _Invalid(f"task {task_id}: no runtimeInSeconds")
        if not _is_amount(value, MOST_SECONDS):
            raise _Invalid(
                f"task {task_id}: runtimeInSeconds is {short(repr(value), 40)}, wanted seconds >= 0, at most"
                f" {MOST_SECONDS:g}"
            )
        return float(value)

    def _written(self, task_id: str, row: Mapping[str, Any]) -> int:
        sizes: list[tuple[Any, Any]]
        if self._split:
            names = [name for name in self._listed(row, "outputFiles", task_id) if isinstance(name, str)]
            # A task's inputs are others' outputs, or existed before: only outputs are results here.
            sizes = [(name, self._files.get(name)) for name in names]
        else:
            outputs = [f for f in _mappings(row.get("files")) if f.get("link") == "output"]
            sizes = [(f.get("name"), f.get("sizeInBytes", f.get("size"))) for f in outputs]
        total = 0
        for name, size in sizes:
            if not _is_amount(size, _MOST_FILE):
                raise _Invalid(
                    f"task {task_id}: file {name!r} has size {short(repr(size), 40)}, wanted bytes >= 0, at most"
                    f" {_MOST_FILE}"
                )
            total += int(size)
        return total


def _is_amount(value: Any, most: float) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= most


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _kind(name: str) -> str:
    """Return a task's name without its number, from which Dask derives the same prefix."""
    return _NO_LETTER.sub("-", _NUMBER.sub("", name)).strip("-").lower() or "task"


def _ordered(tasks: Mapping[str, _Task]) -> list[tuple[str, _Task]]:
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
