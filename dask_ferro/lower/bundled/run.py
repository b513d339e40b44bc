"""A bundle of Dask tasks as one task: what a worker runs.

A value is dropped as soon as no task of the bundle reads it any more, unless it is an output.  An error is the task's
own, with a note that names the task.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

from dask.typing import Key

from dask_ferro.flow.member import is_member
from dask_ferro.flow.run import Failed
from dask_ferro.flow.times import TaskTimes
from dask_ferro.flow.upstream import rejoin_after_secede
from dask_ferro.lower.upstream import GraphNode


class Read(NamedTuple):
    """Where a bundle finds an input: the argument's number, the place in it (-1: all of it), and the input's key."""

    argument: int
    place: int
    key: Key


class TaskProgram(NamedTuple):
    """The tasks of a bundle in the order in which they run, its inputs, and the keys of its results.

    `keys` are those under which the graph has the tasks: a list has none of its own, and a graph of Dask's dataframes
    may have a task under another one.
    """

    tasks: tuple[GraphNode, ...]
    reads: tuple[Read, ...]
    outputs: tuple[Key, ...]
    keys: tuple[Key, ...]


def run_tasks(program: TaskProgram, *arguments: Any) -> object:
    """Return the result of a bundle of tasks, or a tuple of several.

    Raises
    ------
    Exception
        What a task raised, with a note that names it.
    """
    values = {
        read.key: arguments[read.argument] if read.place < 0 else arguments[read.argument][read.place]
        for read in program.reads
    }
    left = Counter(program.outputs)
    for task in program.tasks:
        left.update(task.dependencies)
    times = TaskTimes()
    for key, task in zip(program.keys, program.tasks, strict=True):
        start = perf_counter()
        try:
            result = task({dep: values[dep] for dep in task.dependencies})
        except Exception as error:
            # Some exceptions forbid it.
            with suppress(Exception):
                error.add_note(f"in task {key!r}, one of the {len(program.tasks)} that ran as one bundle")
            raise
        times.note(key, start, result)
        # The next task may call `secede` too.
        rejoin_after_secede()
        values[key] = result
        # This name must not keep what no task reads any more.
        del result
        for dep in task.dependencies:
            left[dep] -= 1
            if not left[dep]:
                del values[dep]
    times.tell()
    if len(program.outputs) == 1:
        return values[program.outputs[0]]
    return tuple(values[key] for key in program.outputs)


def pick(results: tuple[object, ...], place: int, *silent: object) -> object:
    """Return one result of a bundle, or of a flow's member.

    Raises
    ------
    Exception
        What the task of a flow raised.
    """
    result = results[place]
    if isinstance(result, Failed):
        raise result.error
    return result


def is_ours(spec: object) -> bool:
    """Return whether a task of a graph is a bundle or a flow's member, or picks a result of one."""
    return getattr(spec, "func", None) in (run_tasks, pick) or is_member(spec)


def is_pick(spec: object) -> bool:
    """Return whether a task picks a result of a bundle."""
    return getattr(spec, "func", None) is pick
