"""Keys of checked inputs: each input reaches the tasks by its content, a future or another collection's keys.

Small arrays travel inside the tasks, and large ones in the graph, chunk by chunk, as those of `dask.array.from_array`:
the scheduler has them where a worker is lost.  Dask arrays, delayed values and futures keep their own keys.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.base import is_dask_collection, tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.errors import ConfigError
from dask_ferro.lower.layer import Key, KeySeries, KeysOrValue, Literal
from dask_ferro.lower.signature import Signature, fixed_batch, shape_of
from dask_ferro.lower.upstream import Alias, DataNode

# Bytes of a task's own description: an input that adds no more to each task does not change a graph's size much.
_TASK_BYTES = 1024
# An array up to this size is part of each task that reads it; a larger one is one value for all of them.
EMBED_BYTES = 64 << 10
# A release travels with the client's next batch of messages, 10 ms later at the most; data sent under the same key
# in between would be released with it.
_RELEASE_S = 0.05
_LABELS_KEPT = 1000
_sent: weakref.WeakKeyDictionary[Any, dict[str, list[weakref.ref[Any]]]] = weakref.WeakKeyDictionary()


class Feed(NamedTuple):
    """One input as tasks read it: keys or values, the layers that it adds to the graph, and the last of these.

    `sent` are the futures of what this client sent to the workers for it, none of what travels otherwise.
    """

    source: KeysOrValue
    layers: Mapping[str, Any]
    dependencies: Mapping[str, set[str]]
    top: str | None = None
    sent: tuple[Any, ...] = ()


class Sent(DataNode):
    """A value that workers and this process hold: pickled, it is an alias of the workers' key.

    Parameters
    ----------
    key : str
    value : object
        What tasks of this process are handed.
    future : distributed.Future
        The future of the data, which stays on the workers while somebody holds the future.
    """

    __slots__ = ("future",)

    def __init__(self, key: Key, value: Any, future: Any) -> None:
        super().__init__(key, value)
        self.future = future

    def copy(self) -> Sent:
        """Return a copy of the node under the same key."""
        return Sent(self.key, self.value, self.future)

    @property
    def block_fusion(self) -> bool:
        """True: inside a fused task its value would be sent."""
        return True

    def substitute(self, subs: dict[Any, Any], key: Any = None) -> Any:
        """Return the node under another key or, inside a fused task, an alias of the workers' key."""
        if key is not None:
            return self if key == self.key else Sent(key, self.value, self.future)
        return Alias(self.key, self.future.key) if self.key in subs else self

    def __reduce__(self) -> tuple[Any, ...]:
        # As Dask sends a future in a graph: an alias of what the workers hold.
        return Alias, (self.key, self.future.key)


def usable_here(feed: Feed, values: Sequence[Any]) -> Feed:
    """Return a `sent` input with its values, so that a graph of it runs in this process too."""
    if not feed.sent or feed.top is None:
        return feed
    nodes = {f.key: Sent(f.key, value, f) for f, value in zip(feed.sent, values, strict=True)}
    return feed._replace(layers={feed.top: nodes})


def all_there(futures: Iterable[Any]) -> bool:
    """Whether none of the sent data is known to be lost."""
    return all(future.status == "finished" for future in futures)


def row_chunks(sig: Signature, arrays: Mapping[str, Any], batch: int | None) -> tuple[int, ...] | None:
    """Return the rows of each chunk, or None when the inputs are taken whole.

    Raises
    ------
    ConfigError
        When the inputs that carry the batch are chunked differently, or their lengths differ.
    """
    carried = {s.name: arrays[s.name] for s, c in zip(sig.inputs, sig.carries, strict=True) if c}
    chunked = {name: tuple(a.chunks[0]) for name, a in carried.items() if is_dask_array(a)}
    if _differ(list(chunked.values())):
        raise ConfigError(f"inputs are chunked differently along axis 0: {chunked}; rechunk them alike")
    lengths = {name: len(a) for name, a in carried.items() if shape_of(a) and not is_dask_array(a)}
    # Sizes that dask does not know are nan, and so is their sum, which equals nothing.
    lengths |= {name: sum(sizes) for name, sizes in chunked.items() if sum(sizes) == sum(sizes)}
    # An input of one row is repeated for every row, so its length does not count.
    if sig.fixed_rows:
        lengths = {name: n for name, n in lengths.items() if n != 1 or len(lengths) == 1}
    cutting = bool(chunked) or batch is not None
    if (cutting or sig.fixed_rows) and len(set(lengths.values())) > 1:
        raise ConfigError(f"inputs differ in length along the batch axis: {lengths}")
    if cutting and not all(shape_of(a) for a in carried.values()):
        raise ConfigError(
            "an input that carries the batch is a future or a delayed value: it cannot be cut in chunks"
        )
    splitting = bool(sig.fixed_rows) and any(n != sig.fixed_rows for n in lengths.values())
    if (cutting or splitting) and not all(sig.gives):
        _refuse_outputs(sig, chunked=bool(chunked), splitting=splitting)
    rows = next(iter(lengths.values()), 0)
    if chunked:
        chunks = next(iter(chunked.values()))
    elif batch is None or rows <= batch:
        return None
    else:
        chunks = tuple(min(batch, rows - start) for start in range(0, rows, batch))
    if isinstance(sig.batch, int) and sig.batch > 1 and any(n != sig.batch for n in chunks):
        first = sig.inputs[sig.carries.index(True)]
        raise ConfigError(
            f"the model's batch is fixed at {sig.batch} rows, so it cannot be cut into chunks of {chunks}; run without"
            f" batch=, and with dask arrays of one chunk along axis 0; {fixed_batch(first)}"
        )
    return chunks


def _differ(chunks: Sequence[tuple[float, ...]]) -> bool:
    """Whether chunks differ in number, or in a size that is known of both."""
    if len({len(sizes) for sizes in chunks}) > 1:
        return True
    return any(map(_are_known_to_differ, zip(*chunks, strict=True)))


def _are_known_to_differ(sizes: Sequence[float]) -> bool:
    # Dask's unknown sizes are nan, which equals nothing, itself included.
    return len({n for n in sizes if n == n}) > 1


def _refuse_outputs(sig: Signature, *, chunked: bool, splitting: bool) -> None:
    """Raise `ConfigError` for the outputs that chunks cannot be joined to."""
    without = [str(s) for s, gives in zip(sig.outputs, sig.gives, strict=True) if not gives]
    if splitting:
        why = "the model's batch is fixed at 1, and it was given more"
        remedy = f"pass one row at a time; {fixed_batch(sig.inputs[sig.carries.index(True)])}"
    elif chunked:
        why, remedy = "an input is a dask array", "pass it as one numpy array (.compute())"
    else:
        why, remedy = "batch= cuts the rows", "run without batch="
    raise ConfigError(
        f"outputs without the batch axis cannot be joined from chunks: {without}; {why}: {remedy}"
    )


def rechunked(name: str, array: Any, batch: int) -> Any:
    """Return a dask array in chunks of `batch` rows."""
    if any(n != n for n in array.chunks[0]):
        raise ConfigError(
            f"input {name!r} is a dask array whose chunks have unknown sizes, so batch={batch} cannot cut it;"
            " call .compute_chunk_sizes() first, or leave batch= out"
        )
    return array.rechunk({0: batch})


def is_dask_array(value: Any) -> bool:
    """Whether `value` is a dask.array."""
    return is_dask_collection(value) and isinstance(getattr(value, "chunks", None), tuple)


def whole_rest(array: Any) -> Any:
    """Return a dask array with one chunk along every axis but the first."""
    if all(len(c) == 1 for c in array.chunks[1:]):
        return array
    return array.rechunk(dict.fromkeys(range(1, array.ndim), -1))


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
    if is_future(value):
        series = KeySeries(one=value.key)
        return Feed(series, {value.key: {value.key: value}}, {value.key: set()}, value.key)
    if is_dask_collection(value):
        return _collection(name, value, chunks)
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


def is_future(value: Any) -> bool:
    """Whether `value` is a distributed future; asks without importing distributed."""
    import sys

    if "distributed" not in sys.modules:
        return False
    from distributed import Future

    return isinstance(value, Future)


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


def sent(label: str, parts: Sequence[Any], client: Any, *, workers: Sequence[str] | None = None) -> Feed:
    """Send the parts straight to the workers; their futures stand in the graph under their own keys.

    The keys name the content, so the same parts are sent once while somebody holds them.

    Parameters
    ----------
    label : str
    parts : sequence of array
    client : distributed.Client
    workers : sequence of str, optional
        Addresses of workers that get them; where one has left, or none is given, any worker may.
    """
    names = [f"{label}-{i}" for i in range(len(parts))]
    known = _sent.setdefault(client, {})
    futures = _alive(known.get(label, ()))
    if futures is None:
        if label in known:
            _await_releases(known)
        elif len(known) >= _LABELS_KEPT:
            del known[next(iter(known))]
        there = None if workers is None else [w for w in workers if w in client.nthreads()]
        futures = client.scatter(dict(zip(names, parts, strict=True)), workers=there or None, direct=True)
        known[label] = [weakref.ref(futures[name]) for name in names]
    return Feed(
        KeySeries(text=label), {label: futures}, {label: set()}, label, tuple(futures[n] for n in names)
    )


def _await_releases(known: dict[str, list[weakref.ref[Any]]]) -> None:
    """Wait until what was released is released on the workers, and forget it: new data may then have its key.

    Once for all of it, because the inputs of a call are mostly released together.
    """
    released = [label for label, references in list(known.items()) if _alive(references) is None]
    # Perhaps just now: that message must not overtake the new data.
    time.sleep(_RELEASE_S)
    for label in released:
        known.pop(label, None)


def _alive(references: Sequence[weakref.ref[Any]]) -> dict[str, Any] | None:
    """Return the futures by key if all of them exist and none has failed."""
    held = [future for reference in references if (future := reference()) is not None]
    if not held or len(held) < len(references) or not all_there(held):
        return None
    return {future.key: future for future in held}
