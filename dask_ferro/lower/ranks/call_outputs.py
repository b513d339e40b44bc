"""All outputs of a call as one Dask collection: Dask looks at its graph once, not once for each array.

client.persist(CallOutputs(ranks(arrays))).arrays --> the outputs by name, which stay on their workers
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.lower.ranks.collection import ContentKeyed
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.sharded import CallTasks, ShardedArray, Written, merged


class CallOutputs(ContentKeyed):
    """The outputs of a call by name.

    Attributes
    ----------
    arrays : mapping of str to ShardedArray
    """

    def __init__(self, arrays: Mapping[str, ShardedArray]) -> None:
        self.arrays = arrays

    def __dask_graph__(self) -> HighLevelGraph:
        return merged(self.arrays.values())

    def __dask_keys__(self) -> list[Key]:
        return list(dict.fromkeys(chain.from_iterable(array.keys for array in self.arrays.values())))

    def __dask_layers__(self) -> tuple[str, ...]:
        tasks = {id(array.tasks): array for array in self.arrays.values()}
        return tuple(dict.fromkeys(array.top for array in tasks.values()))

    def __dask_tokenize__(self) -> Any:
        return "ferro-outputs", [array.token for array in self.arrays.values()]

    def __dask_postcompute__(self) -> tuple[Any, tuple[()]]:
        # The values of its keys: whole arrays are computed by `gather`.
        return list, ()

    def persisted(self, graph: Mapping[Key, Any]) -> CallOutputs:
        """Return the outputs on a graph that holds their parts.

        Arrays with the same keys share it.  Passed to the next call, none keeps the parts of another alive.
        """
        groups: dict[tuple[Key, ...], list[str]] = {}
        for name, array in self.arrays.items():
            groups.setdefault(array.keys, []).append(name)
        ends = set(chain.from_iterable(groups))
        found: dict[str, ShardedArray] = {}
        for keys, names in groups.items():
            # A graph of tasks, which Dask has optimized and not run, is held whole.
            own = dict(graph) if graph.keys() - ends else {key: graph[key] for key in keys}
            arrays = {name: self.arrays[name] for name in names}
            items = {name: array.items for name, array in arrays.items()}
            held = HighLevelGraph.from_collections(f"ferro-held-{tokenize(keys)}", own, dependencies=[])
            tasks = CallTasks.of(Written(f"{tokenize(keys)}", held, dict.fromkeys(names, keys), items=items))
            found |= {
                name: ShardedArray(one.port, one.mesh, tasks, one.token, one.made)
                for name, one in arrays.items()
            }
        return CallOutputs({name: found[name] for name in self.arrays})
