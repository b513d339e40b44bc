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

    `chunks` are the rows of each chunk where the value is cut along axis 0; None: it is taken whole.
    """
    if is_dask_collection(value):
        return _collection(name, value, chunks)
    if not isinstance(value, np.ndarray) and is_future(value):
        return of_future(value)
    # One row serves every chunk.
    cut = None if chunks is None or len(value) == 1 else tuple(chunks)
    count = len(cut or "1")
    if not isinstance(value, np.ndarray) or value.nbytes <= EMBED_BYTES + _TASK_BYTES * count:
        return Feed(Literal((value,) if cut is None else tuple(np.split(value, np.cumsum(cut)[:-1]))), {}, {})
    import dask.array as da

    label = f"ferro-input-{name}-{token}{'' if cut is None else f'-{tokenize(cut)[:8]}'}"
    rest = tuple((size,) for size in value.shape[1:])
    lazy = da.from_array(value, ((len(value),) if cut is None else cut, *rest), name=label)
    return _collection(name, lazy, cut)


def of_future(future: Any) -> Feed:
    """Return what a future holds as tasks read it."""
    return Feed(
        KeySeries(one=future.key), {future.key: {future.key: future}}, {future.key: set()}, future.key
    )


def _collection(name: str, value: Any, chunks: Sequence[int] | None) -> Feed:
    graph, top = layers_of(name, value)
    if chunks is not None:
        series = KeySeries((value.name,), (0,) * (value.ndim - 1))
        return Feed(series, graph.layers, graph.dependencies, top)
    keys = list(dask.core.flatten(value.__dask_keys__()))
    if len(keys) != 1:
        is_array = is_dask_array(value)
        remedy = "one chunk with .rechunk(-1)" if is_array else "without batch=, or compute it first"
        raise ConfigError(f"input {name!r} is taken whole and comes in {len(keys)} chunks; make it {remedy}")
    return Feed(KeySeries(one=keys[0]), graph.layers, graph.dependencies, top)


def layers_of(name: str, value: Any) -> tuple[HighLevelGraph, str]:
    """Return the graph of an input that is a collection, and the layer that holds its keys."""
    if isinstance(value, Mapping):
        raise ConfigError(f"input {name!r} is the outputs of a model: pass one of them")
    graph = value.__dask_graph__()
    if not isinstance(graph, HighLevelGraph):
        graph = HighLevelGraph.from_collections(f"ferro-{id(value)}", graph, dependencies=[])
    own = [layer for layer in getattr(value, "__dask_layers__", tuple)() if layer in graph.layers]
    return graph, next(iter(own), list(graph.layers)[-1])
