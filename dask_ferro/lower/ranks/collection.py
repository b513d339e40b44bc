"""What the lazy results of ranks and pipelines have in common as Dask collections."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import dask
from dask.base import DaskMethodsMixin
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph

Graph = Mapping[Any, Any]

# A graph written again has outputs of earlier calls that nobody asks for.  Of those that a scheduler still knows it
# looks up what they read, which it may have forgotten: it refuses the graph, and then every one that shares a task.
# A lambda, since it is sent with its graph: a scheduler need not have this package.
needed: Callable[..., HighLevelGraph] = lambda graph, keys, **kwargs: graph.cull({*flatten(keys)})  # noqa: E731


class ContentKeyed(DaskMethodsMixin):
    """A collection whose keys are a function of its content, so that what is there already is found by its key."""

    __dask_optimize__ = staticmethod(needed)
    __dask_scheduler__ = staticmethod(dask.threaded.get)

    def __dask_postpersist__(self) -> tuple[Callable[..., Self], tuple[()]]:
        return self._rebuilt, ()

    def _rebuilt(self, graph: Graph, *, rename: Mapping[str, str] | None = None) -> Self:
        if rename:
            raise NotImplementedError(
                f"keys of a {type(self).__name__} name its content and cannot be renamed"
            )
        return self.persisted(graph)

    @abstractmethod
    def persisted(self, graph: Graph) -> Self:
        """Return the collection on a graph that holds the values of its keys, or futures of them."""
