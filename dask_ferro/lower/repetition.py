"""A layer of tasks that repeat: the graph contains one step, but a reader of its tasks sees all steps.

RepeatedTasks      client and scheduler store and send one step; a flow's members write out all (`flow.repeat`)
its items          the same tasks, for all other ways to run them: Dask's schedulers, tasks one by one
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from dask.highlevelgraph import MaterializedLayer
from dask.typing import Key

from dask_ferro.flow.repeat import write_repeats
from dask_ferro.flow.run import InnerTask, Repeat
from dask_ferro.lower.upstream import GraphNode, Task, TaskRef


class RepeatedTasks(Mapping[Key, Task]):
    """The tasks of repeats by key.

    Parameters
    ----------
    name, carry, inputs
        The same as in `flow.run.Repeat`.
    template : mapping of key to task
        The tasks of the first repeat, and the tasks that end all repeats.
    """

    def __init__(
        self,
        name: str,
        template: Mapping[Key, Task],
        carry: Mapping[Key, Key],
        inputs: Sequence[Mapping[Key, Any]],
    ) -> None:
        self.name, self.template, self.carry, self.inputs = name, template, carry, inputs

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.template, self.carry, self.inputs)

    def __getitem__(self, key: Key) -> Task:
        return self._tasks[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    @cached_property
    def _tasks(self) -> dict[Key, Task]:
        inner = tuple(InnerTask(key, task, 0) for key, task in self.template.items())
        each = write_repeats(Repeat(self.name, inner, self.carry, self.inputs, {}))
        return {task.key: _task(task) for task in each}

    def of_template(self, value: Callable[[Key], Any], key: Key) -> Any:
        """Return the value of the template's key that stands for a key."""
        assert isinstance(key, tuple)
        return value((re.sub(f"(?<={self.name}-)[0-9]+", "1", str(key[0])), *key[1:]))

    def layer(self, annotations: Mapping[str, Callable[[Key], Any]]) -> MaterializedLayer:
        """Return them as a layer, with the annotations of the template."""
        each = {name: partial(self.of_template, value) for name, value in annotations.items()}
        return MaterializedLayer(self, annotations=each)


def _task(task: InnerTask) -> Task:
    reads = tuple(task.call.dependencies)
    return Task(task.key, _call_with, task.call, reads, *map(TaskRef, reads))


def _call_with(call: Callable[[dict[Key, Any]], Any], reads: Sequence[Key], *values: Any) -> Any:
    return call(dict(zip(reads, values, strict=True)))


def repeats_in(layers: Mapping[str, Any]) -> list[RepeatedTasks]:
    """Return the tasks that repeat."""
    return [
        one for layer in layers.values() if isinstance(one := getattr(layer, "mapping", None), RepeatedTasks)
    ]


def fold_repeats(layers: Mapping[str, Any]) -> tuple[dict[Key, GraphNode], dict[str, dict[Key, Any]]]:
    """Return the tasks of layers, of those that repeat the template, and their annotations, by annotation and key."""
    graph: dict[Key, GraphNode] = {}
    annotations: dict[str, dict[Key, Any]] = {}
    for layer in layers.values():
        tasks = getattr(layer, "mapping", layer)
        tasks = tasks.template if isinstance(tasks, RepeatedTasks) else tasks
        graph.update(tasks)
        for name, value in (layer.annotations or {}).items():
            of_layer = {key: value(key) if callable(value) else value for key in tasks}
            annotations.setdefault(name, {}).update(of_layer)
    return graph, annotations
