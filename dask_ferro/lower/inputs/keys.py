"""Keys of checked inputs: each input reaches the tasks by its content, a future or another collection's keys.

Small arrays travel inside the tasks, and large ones in the graph, chunk by chunk, as those of `dask.array.from_array`:
the scheduler has them where a worker is lost.  Dask arrays, delayed values and futures keep their own keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.base import is_dask_collection, tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.errors import ConfigError
from dask_ferro.lower.layer import KeySeries, KeysOrValue, Literal
from dask_ferro.lower.signature import is_dask_array, is_future

# Bytes of a task's own description: an input that adds no more to each task does not change a graph's size much.
_TASK_BYTES = 1024
# An array up to this size is part of each task that reads it; a larger one is one value for all of them.
EMBED_BYTES = 64 << 10


class Feed(NamedTuple):
    """One input as tasks read it: keys or values, the layers that it adds to the graph, and the last of these."""

    source: KeysOrValue
    layers: Mapping[str, Any]
    dependencies: Mapping[str, set[str]]
    top: str | None = None


def token_of(value: Any) -> str:
    """Return a deterministic token of an input's content."""
    return str(tokenize(value))


def feed(name: str, value: Any, chunks: Sequence[int] | None, token: str) -> Feed:
    """Return an input as tasks read it.

    Parameters
    ----------
    value : array, dask array, delayed value or future
    chunks : sequence of int or None
        Rows of each chunk where the value is to be cut along axis 0; None: whole.
    token : str
        Of the value.
    """
    if is_dask_collection(value):
        return _collection(name, value, chunks)
    if not isinstance(value, np.ndarray) and is_future(value):
        return Feed(KeySeries(one=value.key), {value.key: {value.key: value}}, {value.key: set()}, value.key)
    # One row serves every chunk.
    cut = None if chunks is None or len(value) == 1 else tuple(chunks)
    count = len(cut or "1")
    if not isinstance(value, np.ndarray) or value.nbytes <= EMBED_BYTES + _TASK_BYTES * count:
        return Feed(Literal(tuple([value] if cut is None else _cut(value, cut))), {}, {})
    import dask.array as da

    label = f"ferro-input-{name}-{token}{'' if cut is None else f'-{tokenize(cut)[:8]}'}"
    rest = tuple((size,) for size in value.shape[1:])
    lazy = da.from_array(value, ((len(value),) if cut is None else cut, *rest), name=label)
    return _collection(name, lazy, cut)


def _collection(name: str, value: Any, chunks: Sequence[int] | None) -> Feed:
    graph, top = layers_of(name, value)
    keys = list(dask.core.flatten(value.__dask_keys__()))
    if chunks is None:
        if len(keys) != 1:
            remedy = (
                "make it one chunk with .rechunk(-1)"
                if is_dask_array(value)
                else "make it without batch=, or compute it first"
            )
            raise ConfigError(f"input {name!r} is taken whole and comes in {len(keys)} chunks; {remedy}")
        return Feed(KeySeries(one=keys[0]), graph.layers, graph.dependencies, top)
    series = KeySeries((value.name,), (0,) * (value.ndim - 1))
    return Feed(series, graph.layers, graph.dependencies, top)


def layers_of(name: str, value: Any) -> tuple[HighLevelGraph, str]:
    """Return the graph of an input that is a collection, and the layer that holds its keys."""
    if isinstance(value, Mapping):
        raise ConfigError(f"input {name!r} is the outputs of a model: pass one of them")
    graph = value.__dask_graph__()
    if not isinstance(graph, HighLevelGraph):
        graph = HighLevelGraph.from_collections(f"ferro-{id(value)}", graph, dependencies=[])
    return graph, _top_layer(value, graph)


def _top_layer(value: Any, graph: HighLevelGraph) -> str:
    """Return the layer that holds the collection's own keys."""
    named = getattr(value, "__dask_layers__", None)
    found = [n for n in (named() if named is not None else ()) if n in graph.layers]
    return found[0] if found else next(reversed(list(graph.layers)))


def _cut(value: Any, chunks: Sequence[int]) -> list[Any]:
    stops = np.cumsum(chunks)
    return [value[stop - rows : stop] for stop, rows in zip(stops, chunks, strict=True)]
