"""Expressions of Dask that bundle the graph of another one, where it is written out: on the scheduler.

`set_facts` is the hook by which a scheduler tells what it knows of tasks.  Where nobody does (one of Dask's local
schedulers, a scheduler without the plugin), the graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any
from uuid import uuid4

from dask.base import collections_to_expr
from dask.core import flatten
from dask.typing import Key

from dask_ferro.lower.bundled.choice import Facts, Graph, needed
from dask_ferro.lower.bundled.rewrite import Annotations, Rewritten, reused, rewritten
from dask_ferro.lower.upstream import Expr, FinalizeCompute, LLGExpr, convert_legacy_graph

# Returns what a scheduler of this process knows, by its identifier; None: it has nothing to tell.
FactsOf = Callable[[str], Facts | None]
_facts_of: FactsOf | None = None


def set_facts(facts_of: FactsOf | None) -> None:
    """Set the hook that returns what a scheduler knows; None removes it."""
    global _facts_of
    _facts_of = facts_of


def _written(expr: Any, keys: Collection[Key], scheduler: str, is_bundled: bool) -> Rewritten:
    """Return the graph of an expression with bundles, or with the keys of earlier bundles alone."""
    graph = convert_legacy_graph(expr.__dask_graph__())
    annotations = {name: dict(by) for name, by in expr.__dask_annotations__().items()}
    facts = _facts_of(scheduler) if _facts_of is not None else None
    if facts is not None and is_bundled:
        return rewritten(graph, keys, annotations, facts)
    kept = reused(graph, keys, facts.existing) if facts is not None else None
    if kept is None:
        kept = _culled(graph, keys) if isinstance(expr, LLGExpr) else graph
    return Rewritten(kept, annotations)


def _culled(graph: Graph, keys: Collection[Key]) -> dict[Key, Any]:
    return {key: graph[key] for key in needed(graph, keys, lambda key: None).order}


class Submission:
    """A graph on its way to the scheduler, which writes it out with bundles.

    Dask's scheduler asks an expression for its graph and for the annotations of the graph's tasks.

    Parameters
    ----------
    expr : dask expression
    keys : collection of keys
        Those whose results are asked for.
    scheduler : str
        The scheduler's identifier.
    is_bundled : bool
        False: the graph stays as it is, apart from keys that the bundles of an earlier graph compute.
    """

    def __init__(self, expr: Any, keys: Collection[Key], scheduler: str, is_bundled: bool) -> None:
        self._arguments = expr, frozenset(keys), scheduler, is_bundled

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __dask_graph__(self) -> dict[Key, Any]:
        """Return the graph."""
        return self._made.graph

    def __dask_annotations__(self) -> Annotations:
        """Return the annotations of the graph's tasks, by annotation and key."""
        return self._made.annotations

    @cached_property
    def _made(self) -> Rewritten:
        return _written(*self._arguments)


class _Boxed:
    """An expression that Dask's optimizer does not look into, as it would write it out beside ours."""

    def __init__(self, content: Any) -> None:
        self.content = content


class BundledExpr(Expr):  # type: ignore[misc]
    """An expression whose graph is another one's, with bundles.

    Parameters
    ----------
    boxed : _Boxed
        The other expression.
    scheduler : str
        The scheduler's identifier; "" where there is none.
    """

    _parameters = ["boxed", "scheduler"]  # noqa: RUF012 - as Dask has it

    @property
    def deterministic_token(self) -> str:
        """Return a token of this object's own, as the graph differs with what the scheduler knows."""
        if not self._determ_token:
            self._determ_token = uuid4().hex
        return str(self._determ_token)

    @property
    def _inner(self) -> Any:
        return self.operand("boxed").content

    def __dask_keys__(self) -> list[Key]:
        """Return the keys of the other expression."""
        return list(self._inner.__dask_keys__())

    def finalize_compute(self) -> BundledExpr:
        """Return the expression whose one key is the result."""
        return type(self)(_Boxed(FinalizeCompute(self._inner).optimize()), self.operand("scheduler"))

    @cached_property
    def _made(self) -> Rewritten:
        return _written(
            self._inner, frozenset(flatten(self.__dask_keys__())), self.operand("scheduler"), True
        )

    def _layer(self) -> dict[Key, Any]:
        return self._made.graph

    def __dask_graph__(self) -> dict[Key, Any]:
        return self._layer()

    def __dask_annotations__(self) -> Annotations:
        """Return the annotations of the graph's tasks, by annotation and key."""
        return self._made.annotations


def bundled_expr(collection: Any, scheduler: str) -> BundledExpr:
    """Return the expression of a Dask collection, with bundles."""
    return BundledExpr(_Boxed(collections_to_expr(collection).optimize()), scheduler)
