"""Private interfaces of Dask: task specifications, expressions, and the meta of an array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from traceback import walk_stack
from typing import Any

import numpy as np
from dask._expr import Expr, HLGExpr, LLGExpr
from dask._task_spec import Alias, DataNode, GraphNode, List, Task, TaskRef, convert_legacy_graph
from dask.typing import Key

__all__ = [
    "Alias", "DataNode", "Expr", "GraphNode", "LLGExpr", "List", "Task", "TaskRef", "convert_legacy_graph",
    "forget_messages", "infers_meta", "is_masked", "layers_of", "pool_size", "references",
]  # fmt: skip


def layers_of(expr: Expr) -> dict[str, Any]:
    """Return the layers of an expression that contains only high-level graphs, as submitted; {}: it contains others."""
    parts = [expr] if isinstance(expr, HLGExpr) else expr.operands
    if not all(type(part) is HLGExpr for part in parts):
        return {}
    return {name: layer for part in parts for name, layer in part.hlg.layers.items()}


def references(task: GraphNode) -> Iterator[Key]:
    """Yield the keys in a task's arguments, one after the other; Dask has them as a set."""
    if isinstance(task, Alias):
        yield task.target
    elif isinstance(task, Task):
        arguments: Iterable[object] = chain(task.args, task.kwargs.values())
        if task.has_subgraph():
            # A fused task has its inputs in the order of their hashes, next to their names inside of it.
            own, _, names, *inputs = task.args
            of_name = dict(zip(names, inputs, strict=True))
            read = dict.fromkeys(chain.from_iterable(map(references, own.values())))
            arguments = (of_name[name] for name in read if name in of_name)
        for argument in arguments:
            if isinstance(argument, TaskRef):
                yield argument.key
            elif isinstance(argument, GraphNode):
                yield from references(argument)


def is_masked(values: Any) -> bool:
    """Whether a dask array has masked chunks."""
    return isinstance(values._meta, np.ma.MaskedArray)


def forget_messages(scheduler: Any) -> None:
    """Drop the messages to workers that a scheduler keeps for whoever debugs it, with the tasks in them."""
    for stream in list(scheduler.stream_comms.values()):
        stream.recent_message_log.clear()


def infers_meta() -> bool:
    """Whether dask.dataframe is calling, on rows that it made up, to learn the columns of a result."""
    return any(
        frame.f_code.co_name == "emulate" and frame.f_globals["__name__"].startswith("dask.dataframe")
        for frame, _ in walk_stack(None)
    )


def pool_size(pool: Any) -> int | None:
    """Return the workers of an executor, or of a pool of `multiprocessing`; None: it has another attribute for them."""
    found: int | None = getattr(pool, "_max_workers", None) or vars(pool or object).get("_processes")
    return found
