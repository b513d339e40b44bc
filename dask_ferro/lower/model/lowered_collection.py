"""`LoweredCollection`: the part of Dask's collection protocol that models and single outputs share."""

from __future__ import annotations

from typing import Any

import dask
from dask.base import DaskMethodsMixin
from dask.delayed import single_key
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.lower.client import current_client
from dask_ferro.lower.layer import Key
from dask_ferro.lower.model.lowering import Lowered, Lowerings, Rebuilding
from dask_ferro.lower.model.results import Request, execute, target_of
from dask_ferro.lower.portable import PortableCall


class LoweredCollection(DaskMethodsMixin):
    """A collection whose keys come from a lowered model, and go to the scheduler as they are."""

    # Bundles are planned already: nothing is left to fuse.
    __dask_optimize__ = staticmethod(lambda dsk, keys, **kwargs: dsk)
    # Engines release Python's lock while they compute, so threads run side by side.
    __dask_scheduler__ = staticmethod(dask.threaded.get)

    def _graphs(self, threads: int | None = None) -> Lowerings:
        """Return the graphs of the model on its inputs, by client; cut for so many threads, or as `slots` finds."""
        raise NotImplementedError

    def _request(self, made: Lowered) -> Request:
        """Return the graph and the keys of this collection."""
        raise NotImplementedError

    def _rebuilding(self, made: Lowered) -> Rebuilding:
        """Return the function that makes this collection's value of its keys' values, and its other arguments."""
        raise NotImplementedError

    @property
    def lowered(self) -> Lowered:
        """The graph for the client that a computation would go to."""
        return self._graphs().of(current_client())

    def __dask_graph__(self) -> HighLevelGraph:
        return self._request(self.lowered)[0]

    def __dask_keys__(self) -> list[Key]:
        return self._request(self.lowered)[1]

    def __dask_postcompute__(self) -> Rebuilding:
        rebuild, arguments = self._rebuilding(self.lowered)
        # Dask looks for this function of its own, which needs no task.
        return (rebuild, ()) if rebuild is single_key else (PortableCall(rebuild, arguments), ())

    def compute(self, **kwargs: Any) -> Any:
        """Return the value; `kwargs` are `scheduler` and what `dask.compute` takes."""
        target = target_of(self, kwargs)
        graphs = self._graphs(target.threads)
        made = graphs.of(target.client)

        def again() -> Request | None:
            nonlocal made
            new = graphs.again(made, target.client)
            made = new or made
            return None if new is None else self._request(new)

        values = execute(target, self._request(made), graphs.name, again)
        rebuild, arguments = self._rebuilding(made)
        return rebuild(values, *arguments)
