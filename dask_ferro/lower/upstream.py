"""Private interfaces of Dask: task specifications, expressions, the meta of an array, and a scheduler transition."""

from __future__ import annotations

from collections.abc import Iterable
from traceback import walk_stack
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
)

__all__ = [
    "Alias", "Boxed", "DataNode", "Expr", "FinalizeCompute", "GraphNode", "LLGExpr", "List", "MarkedExpr", "Task",
    "TaskRef", "convert_legacy_graph", "infers_meta", "is_masked", "place_again", "pool_size",
]  # fmt: skip


def is_masked(values: Any) -> bool:
    """Whether a dask array has masked chunks."""
    return isinstance(values._meta, np.ma.MaskedArray)


def infers_meta() -> bool:
    """Whether dask.dataframe is calling, on rows that it made up, to learn the columns of a result."""
    return any(
        frame.f_code.co_name == "emulate" and frame.f_globals["__name__"].startswith("dask.dataframe")
        for frame, _ in walk_stack(None)
    )


def place_again(scheduler: Any, keys: Iterable[Any], stimulus_id: str) -> None:
    """Assign workers to tasks that have none, by a transition to "processing"."""
    scheduler.transitions(dict.fromkeys(keys, "processing"), stimulus_id)


def pool_size(pool: Any) -> int | None:
    """Return the workers of an executor, or of a pool of `multiprocessing`; None: it has another name for them."""
    found: int | None = getattr(pool, "_max_workers", None) or vars(pool or object).get("_processes")
    return found


class MarkedExpr(Expr):  # type: ignore[misc]
    """An expression with the mark that its graph is to be bundled; Dask's optimizer does not look into it.

    Parameters
    ----------
    boxed : Boxed
        The expression.
    """

    _parameters = ["boxed"]  # noqa: RUF012 - as Dask has it

    @property
    def content(self) -> Expr:
        """The expression."""
        return self.operand("boxed").content

    @property
    def deterministic_token(self) -> str:
        """Return a token of this object's own."""
        if not self._determ_token:
            self._determ_token = uuid4().hex
        return str(self._determ_token)

    def __dask_keys__(self) -> list[Any]:
        """Return the expression's keys."""
        return list(self.content.__dask_keys__())

    def finalize_compute(self) -> MarkedExpr:
        """Return the expression whose one key is the value."""
        return type(self)(Boxed(FinalizeCompute(self.content).optimize()))

    def _layer(self) -> dict[Any, Any]:
        return dict(self.content.__dask_graph__())

    def __dask_graph__(self) -> dict[Any, Any]:
        return self._layer()

    def __dask_annotations__(self) -> Any:
        """Return the annotations of the expression's tasks, by annotation and key."""
        return self.content.__dask_annotations__()


class Boxed:
    """An expression that is no operand in Dask's eyes, which would write it out beside the one that holds it."""

    def __init__(self, content: Expr) -> None:
        self.content = content
