"""The base class of lazy results of ranks and pipelines, which are Dask collections."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import dask
from dask.base import DaskMethodsMixin
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.lower.inputs.shipping import LARGE_GRAPHS

Graph = Mapping[Any, Any]
# Arrays of any kind by name: arrays of this process, dask arrays, sharded arrays.
Arrays = Mapping[str, Any]
C = TypeVar("C")

# A graph has outputs of earlier calls that are not requested.  For those that a scheduler still knows it looks up their
# inputs, which it may have forgotten: it refuses the graph, and then all that share a task.
# A lambda, since it is sent with its graph: a scheduler need not have this package.
needed: Callable[..., HighLevelGraph] = lambda graph, keys, **kwargs: graph.cull({*flatten(keys)})  # noqa: E731


def persist(client: Any, collection: C) -> C:
    """Return a collection whose results a client has begun to compute, and keeps."""
    # Parameters are in the graph of a training's first step, and then once in many steps.
    with dask.config.set(LARGE_GRAPHS):
        found: C = client.persist(collection)
    return found


class RankCollection(DaskMethodsMixin):
    """A collection of the tasks of calls, each of which has keys of its own."""

    __dask_optimize__ = staticmethod(needed)
    __dask_scheduler__ = staticmethod(dask.threaded.get)

    def __dask_postpersist__(self) -> tuple[Callable[..., Self], tuple[()]]:
        return self._rebuilt, ()

    def _rebuilt(self, graph: Graph, *, rename: Mapping[str, str] | None = None) -> Self:
        if rename:
            raise NotImplementedError(f"keys of a {type(self).__name__} name its calls and cannot be renamed")
        return self.persisted(graph)

    @abstractmethod
    def persisted(self, graph: Graph) -> Self:
        """Return the collection with a graph that holds the values of its keys, or futures of them."""
