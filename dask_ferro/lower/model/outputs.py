"""The outputs of a model on its inputs: a dask array each, and a mapping of several.

What has no rows or no known number of axes (a sequence, a map, the result of an operator that inference does not know)
is a delayed value.  Where only a run tells how wide the rows are, each chunk is compared with the first one: a list of
texts that is as wide as its longest row has another width in each chunk.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import replace
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.base import DaskMethodsMixin
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer

from dask_ferro.errors import ConfigError
from dask_ferro.lower.layer import Key, KeySeries, LazyLayer, Literal, TaskSeries
from dask_ferro.lower.model.bound import BoundModel
from dask_ferro.lower.model.lowering import Lowered, lower
from dask_ferro.lower.portable import PortableCall, PortableTask
from dask_ferro.lower.signature import Dim, shape_of
from dask_ferro.lower.upstream import List, TaskRef
from dask_ferro.lower.worker.outputs import joined, pick, shape_at, together_by_name


class Outputs(Mapping[str, Any], DaskMethodsMixin):
    """The outputs of a model by name, in its order: ``label, scores = model(x)``; all are computed together.

    Its iterator yields the outputs and not their names, so that it unpacks; `keys()` and `items()` are those of a dict.
    It is no dict itself, as a client takes dicts apart.
    """

    __dask_optimize__ = staticmethod(da.Array.__dask_optimize__)
    __dask_scheduler__ = staticmethod(da.Array.__dask_scheduler__)

    def __init__(self, made: Lowered) -> None:
        self._arrays = {name: _output(made, i) for i, name in enumerate(made.places)}
        self._made = made

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._arrays.values())

    def __len__(self) -> int:
        return len(self._arrays)

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._arrays.keys()

    def values(self) -> ValuesView[Any]:
        """Return the outputs."""
        return self._arrays.values()

    def items(self) -> ItemsView[str, Any]:
        """Return names and outputs."""
        return self._arrays.items()

    def __repr__(self) -> str:
        lines = "".join(f"  {name}: {value!r}\n" for name, value in self.items())
        return f"Outputs(\n{lines})"

    def __dask_graph__(self) -> HighLevelGraph:
        return self._made.graph

    def __dask_keys__(self) -> list[list[Key]]:
        return self._made.keys

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self._made.layer_name,)

    def __dask_tokenize__(self) -> object:
        return "ferro-outputs", self._made.token

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return PortableCall(assemble, (self._made.places, self._made.bound.model.name)), ()

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._persisted, ()

    def _persisted(self, graph: Mapping[Key, Any], *, rename: Mapping[str, str] | None = None) -> Outputs:
        if rename:
            raise NotImplementedError("keys of a model's outputs name their content and cannot be renamed")
        name = f"ferro-persisted-{self._made.token}"
        held = HighLevelGraph.from_collections(name, dict(graph), dependencies=[])
        return Outputs(replace(self._made, graph=held, layer_name=name))


def outputs_of(bound: BoundModel, client: Any) -> Any:
    """Return the output of a model on its inputs, a dask array or a delayed value; `Outputs` of several.

    Raises
    ------
    ConfigError
        An output that has no row for each row, of rows that are cut.
    """
    made = lower(bound, client, are_arrays=True)
    return _output(made, 0) if len(bound.plan.outputs) == 1 else Outputs(made)


def values_of(bound: BoundModel) -> Any:
    """Return the value of a model on its inputs, or a dict of several by name, computed in this process."""
    made = lower(bound, None, are_arrays=False)
    values = assemble(dask.get(made.graph, made.keys), made.places, bound.model.name)  # type: ignore[attr-defined, arg-type]
    return values if len(values) > 1 else next(iter(values.values()))


# ---- an output as a collection ------------------------------------------------------------------------------


def _output(made: Lowered, index: int) -> Any:
    bound, sig = made.bound, made.bound.model.signature
    spec, shape = sig.outputs[index], bound.sized.types[sig.outputs[index].name].shape
    if spec.dtype is None or shape is None:
        return _delayed(made, index)
    if bound.rows is not None and not (shape and (sig.fixed_rows or _may_have(shape[0], bound.rows))):
        raise ConfigError(
            f"model {bound.model.name!r}: output {spec} does not carry the batch axis, so it cannot be joined from"
            " chunks; run it on all rows at once (no batch=, and numpy arrays)"
        )
    sizes: list[tuple[float, ...]] = [(d if isinstance(d, int) else np.nan,) for d in shape]
    if bound.rows is not None:
        sizes[0] = bound.rows
    elif bound.splits and sizes:
        sizes[0] = (_rows(bound),)
    source, place = made.source(index)
    is_open = bound.chunks > 1 and not all(isinstance(d, int) for d in shape[1:])
    name: str = source.head[0]
    top: Layer | None = None
    if place is not None or is_open or not shape:
        name = f"ferro-output-{made.token}-{index}"
        series = KeySeries((name,), (0,) * (len(shape) - 1) if shape else None)
        top = LazyLayer(_picks(series, source, place, bound.chunks, (bound.model.name, spec.name), is_open))
    elif name not in made.graph.layers:
        # A dask array is named after a layer: here an empty one, over the layer that has its keys.
        top = MaterializedLayer({})
    return da.Array(_over(made, name, top), name, tuple(sizes), dtype=spec.dtype)


def _picks(
    series: KeySeries,
    source: KeySeries,
    place: int | None,
    chunks: int,
    names: tuple[str, str],
    is_open: bool,
) -> list[TaskSeries]:
    """Return tasks that pick one output of a bundle; where its axes are open, they compare it with the first chunk."""
    at = Literal((place,))
    if not is_open:
        return [TaskSeries(series, chunks, pick, (source, at))]
    shape = KeySeries(one=f"{series.head[0]}-shape")
    return [
        TaskSeries(shape, 1, shape_at, (source, at)),
        TaskSeries(series, chunks, pick, (source, at, shape, *(Literal((name,)) for name in names))),
    ]


def _delayed(made: Lowered, index: int) -> Delayed:
    """Return an output as one delayed value, joined from its chunks."""
    (source, place), model = made.source(index), made.bound.model
    name = f"ferro-output-{made.token}-{index}"
    parts = List(*(TaskRef(source.at(chunk)) for chunk in range(made.bound.chunks)))
    task = PortableTask(name, joined, parts, place, model.name, model.signature.outputs[index].name)
    return Delayed(name, _over(made, name, MaterializedLayer({name: task})))


def _over(made: Lowered, name: str, top: Any) -> HighLevelGraph:
    """Return the graph with a layer over that of the bundles; the graph itself where there is none."""
    graph = made.graph
    if top is None:
        return graph
    # A persisted graph has no layer of bundles: its results lie in all of its layers.
    below = {made.layer_name} if made.layer_name in graph.layers else set(graph.layers)
    return HighLevelGraph({**graph.layers, name: top}, {**graph.dependencies, name: below})


def _may_have(size: Dim, rows: Sequence[float]) -> bool:
    """Whether an output of this size at the largest chunk may have a row for each of its rows."""
    known = [n for n in rows if n == n]
    return not isinstance(size, int) or len(known) < len(rows) or size == max(known, default=size)


def _rows(bound: BoundModel) -> float:
    """Return the rows of a model of batch 1 that is run row by row; nan: not known."""
    shapes = [shape_of(bound.arrays[name]) for name in bound.model.signature.carried]
    # An input of one row is repeated for every row.
    return next((shape[0] for shape in shapes if shape and shape[0] != 1), np.nan)


# ---- chunks put together ------------------------------------------------------------------------------------


def assemble(
    results: Sequence[Sequence[Any]], places: Mapping[str, tuple[int, int | None]], model: str
) -> dict[str, Any]:
    """Return outputs by name, of the values of `Lowered.keys` and where each lies in them (`Lowered.places`)."""
    return together_by_name(
        {name: joined(results[series], place, model, name) for name, (series, place) in places.items()}
    )
