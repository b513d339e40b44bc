"""Expressions of Dask that bundle the graph of another one, where it is written out: on the scheduler.

`set_facts` is the hook by which a scheduler tells what it knows of tasks.  Where nobody does (one of Dask's local
schedulers, a scheduler without the plugin), the graph stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from dask.typing import Key

from dask_ferro.flow.run import MEMBER
from dask_ferro.lower.bundling.choice import Annotations, CostFacts, find_needed
from dask_ferro.lower.bundling.rewrite import RewrittenGraph, reuse_bundles, rewrite_graph, rewrite_once
from dask_ferro.lower.repetition import fold_repeats, repeats_in
from dask_ferro.lower.upstream import Expr, LLGExpr, convert_legacy_graph, layers_of

# Returns what a scheduler of this process knows, by its identifier; None: it has nothing to tell.
CostFactsOf = Callable[[str], CostFacts | None]
_facts_of: CostFactsOf | None = None

logger = logging.getLogger(__name__)


def set_facts(facts_of: CostFactsOf | None) -> None:
    """Set the hook that returns what a scheduler knows; None removes it."""
    global _facts_of
    _facts_of = facts_of


def _in_order(keys: Collection[Key]) -> tuple[Key, ...]:
    """Return keys in an order that has neighbours side by side: that of a sequence, or of sorted names."""
    if isinstance(keys, Sequence):
        return tuple(dict.fromkeys(keys))
    try:
        return tuple(sorted(keys))
    except TypeError:
        return tuple(sorted(keys, key=str))


class BundledGraph:
    """The graph of an expression, which the scheduler writes out with bundles.

    Dask's scheduler asks an expression for two things: its graph, and the annotations of the graph's tasks.  Results
    of `keys` are asked for, of the scheduler with that identifier ("": there is none).  A graph that is not bundled
    stays as it is, apart from tasks of ranks, which are a flow, and from keys that the bundles of an earlier graph
    compute.  `common` are the annotations of tasks without their own, as those of a block around the call.
    """

    def __init__(
        self,
        expr: Expr,
        keys: Collection[Key],
        scheduler: str,
        is_bundled: bool,
        common: Mapping[str, object] | None = None,
    ) -> None:
        self._arguments = expr, _in_order(keys), scheduler, is_bundled, common or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __dask_graph__(self) -> dict[Key, Any]:
        return self._rewritten.graph

    def __dask_annotations__(self) -> Annotations:
        return self._rewritten.annotations

    @cached_property
    def _rewritten(self) -> RewrittenGraph:
        """The graph with bundles, or with the keys of earlier bundles alone."""
        expr, keys, scheduler, is_bundled, common = self._arguments
        if (of_repeats := self._of_repeats()) is not None:
            return of_repeats
        graph = convert_legacy_graph(expr.__dask_graph__())
        annotations = {name: dict(by) for name, by in expr.__dask_annotations__().items()}
        reduced = None
        try:
            facts = _facts_of(scheduler) if _facts_of is not None else None
            if facts is not None and (is_bundled or annotations.get(MEMBER)):
                return rewrite_graph(graph, keys, annotations, facts, common)
            reduced = reuse_bundles(graph, keys, facts.existing, facts.held) if facts is not None else None
        # The graph is right as it is; only a mistake of ours, or of a task that others change meanwhile, comes here.
        except Exception:
            logger.exception(
                "dask_ferro: a graph of %d tasks could not be bundled, and runs as it is", len(graph)
            )
        if reduced is None and isinstance(expr, LLGExpr):
            reduced = {
                key: graph[key] for key in find_needed(graph, keys, lambda key: None, lambda key: None).order
            }
        return RewrittenGraph(graph if reduced is None else reduced, annotations)

    def _of_repeats(self) -> RewrittenGraph | None:
        """Return the flow or the bundle of tasks that repeat; None: there are none, or they run one by one."""
        expr, keys, scheduler, _, common = self._arguments
        layers = layers_of(expr)
        repeats = repeats_in(layers)
        facts = _facts_of(scheduler) if repeats and _facts_of is not None else None
        if facts is None:
            return None
        try:
            graph, annotations = fold_repeats(layers)
            return rewrite_once(convert_legacy_graph(graph), keys, annotations, facts, common, repeats)
        # The tasks are right, all of them written out.
        except Exception:
            logger.exception("dask_ferro: steps of a training are submitted with all of their tasks")
            return None
