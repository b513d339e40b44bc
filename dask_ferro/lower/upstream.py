"""Private interfaces of Dask: task specifications, expressions, the meta of a dask array, and a scheduler transition.

`runtime.upstream_names` lists the names and their replacements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from dask._expr import Expr, FinalizeCompute, LLGExpr
from dask._task_spec import (
    Alias,
    DataNode,
    GraphNode,
    List,
    Task,
    TaskRef,
    convert_legacy_graph,
    resolve_aliases,
)
from dask._task_spec import _execute_subgraph as execute_subgraph

__all__ = [
    "Alias", "DataNode", "Expr", "FinalizeCompute", "GraphNode", "LLGExpr", "List", "Task", "TaskRef",
    "convert_legacy_graph", "execute_subgraph", "is_masked", "place_again", "resolve_aliases",
]  # fmt: skip


def is_masked(values: Any) -> bool:
    """Whether an array is a numpy masked array, or a dask array has masked chunks."""
    return isinstance(getattr(values, "_meta", values), np.ma.MaskedArray)


def place_again(scheduler: Any, keys: Iterable[Any], stimulus_id: str) -> None:
    """Assign workers to tasks that have none, by a transition to "processing"."""
    scheduler.transitions(dict.fromkeys(keys, "processing"), stimulus_id)
