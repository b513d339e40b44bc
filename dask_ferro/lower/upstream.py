"""Private interfaces of Dask: task specifications, expressions, the meta of a dask array, and a scheduler transition.

`runtime.upstream_names` lists the names and their replacements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

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
    "Alias", "DataNode", "Expr", "FinalizeCompute", "GraphNode", "LLGExpr", "List", "OpaqueExpr", "Task", "TaskRef",
    "convert_legacy_graph", "execute_subgraph", "is_masked", "place_again", "pool_size", "resolve_aliases",
]  # fmt: skip


def is_masked(values: Any) -> bool:
    """Whether an array is a numpy masked array, or a dask array has masked chunks."""
    return isinstance(getattr(values, "_meta", values), np.ma.MaskedArray)


def place_again(scheduler: Any, keys: Iterable[Any], stimulus_id: str) -> None:
    """Assign workers to tasks that have none, by a transition to "processing"."""
    scheduler.transitions(dict.fromkeys(keys, "processing"), stimulus_id)


def pool_size(pool: Any) -> int | None:
    """Return the workers of an executor, or of a pool of `multiprocessing`; None: it has another name for them."""
    found: int | None = getattr(pool, "_max_workers", None) or vars(pool or object).get("_processes")
    return found


class OpaqueExpr(Expr):  # type: ignore[misc]
    """An expression whose graph something else writes, and which Dask's optimizer does not look into.

    Parameters
    ----------
    source
        It has `__dask_graph__`, `__dask_annotations__`, `nested_keys`, and `finalized`, which returns another one.
    """

    _parameters = ["source"]  # noqa: RUF012 - as Dask has it

    @property
    def deterministic_token(self) -> str:
        """Return a token of this object's own, as what it writes differs from time to time."""
        if not self._determ_token:
            self._determ_token = uuid4().hex
        return str(self._determ_token)

    def __dask_keys__(self) -> list[Any]:
        """Return the source's keys."""
        return list(self.operand("source").nested_keys())

    def finalize_compute(self) -> OpaqueExpr:
        """Return the expression whose one key is the value."""
        return type(self)(self.operand("source").finalized())

    def _layer(self) -> dict[Any, Any]:
        return dict(self.operand("source").__dask_graph__())

    def __dask_graph__(self) -> dict[Any, Any]:
        return self._layer()

    def __dask_annotations__(self) -> Any:
        """Return the annotations of the source's tasks, by annotation and key."""
        return self.operand("source").__dask_annotations__()
