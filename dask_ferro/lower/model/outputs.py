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
from dask_ferro.lower.signature import Dim
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
    """Return the output of a model on its inputs, a dask array or a delayed value; `Outputs` of several."""
    made = lower(bound, client, are_arrays=True)
    return _output(made, 0) if len(bound.plan.outputs) == 1 else Outputs(made)


def values_of(bound: BoundModel) -> dict[str, Any]:
    """Return the outputs of a model on its inputs by name, computed in this process."""
    made = lower(bound, None, are_arrays=False)
    return assemble(dask.get(made.graph, made.keys), made.places, bound.model.name)  # type: ignore[attr-defined, arg-type]


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
        # An input of one row is repeated for every row.
        sizes[0] = (next((n for n in bound.lengths if n != 1), np.nan),)
    source, place = made.source(index)
    is_open = bound.chunks > 1 and not all(isinstance(d, int) for d in shape[1:])
    name: str = source.head[0]
    top: Layer | None = None
    if place is not None or is_open or not shape:
        name = f"ferro-output-{made.token}-{index}"
        series = KeySeries((name,), (0,) * (len(shape) - 1)) if shape else KeySeries(one=(name,))
        top = LazyLayer(_picks(made, index, series, is_open=is_open))
    elif name not in made.graph.layers:
        # A dask array is named after a layer: here an empty one, over the layer that has its keys.
        top = MaterializedLayer({})
    graph = made.graph if top is None else _over(made, name, top)
    return da.Array(graph, name, tuple(sizes), dtype=spec.dtype)


def _picks(made: Lowered, index: int, series: KeySeries, *, is_open: bool) -> list[TaskSeries]:
    """Return tasks that pick one output of a bundle; where its axes are open, they compare it with the first chunk."""
    (source, place), chunks, model = made.source(index), made.bound.chunks, made.bound.model
    picked = (source, Literal((place,)))
    if not is_open:
        return [TaskSeries(series, chunks, pick, picked)]
    shape = KeySeries(one=f"ferro-output-{made.token}-{index}-shape")
    names = (Literal((model.name,)), Literal((model.signature.outputs[index].name,)))
    return [
        TaskSeries(shape, 1, shape_at, picked),
        TaskSeries(series, chunks, pick, (*picked, shape, *names)),
    ]


def _delayed(made: Lowered, index: int) -> Delayed:
    (source, place), model = made.source(index), made.bound.model
    name = f"ferro-output-{made.token}-{index}"
    parts = List(*(TaskRef(source.at(chunk)) for chunk in range(made.bound.chunks)))
    task = PortableTask(name, joined, parts, place, model.name, model.signature.outputs[index].name)
    return Delayed(name, _over(made, name, MaterializedLayer({name: task})))


def _over(made: Lowered, name: str, top: Layer) -> HighLevelGraph:
    """Return the graph with a layer over that of the bundles."""
    layers, needs = made.graph.layers, made.graph.dependencies
    return HighLevelGraph({**layers, name: top}, {**needs, name: {made.layer_name}})


def _may_have(size: Dim, rows: Sequence[float]) -> bool:
    """Whether an output of this size at the largest chunk may have a row for each of its rows."""
    known = [n for n in rows if n == n]
    return not isinstance(size, int) or len(known) < len(rows) or size == max(known, default=size)


# ---- chunks put together ------------------------------------------------------------------------------------


def assemble(
    results: Sequence[Sequence[Any]], places: Mapping[str, int | None], model: str
) -> dict[str, Any]:
    """Return outputs by name, of the values of `Lowered.keys` and where each lies in them (`Lowered.places`)."""
    made = zip(places.items(), results, strict=True)
    return together_by_name({name: joined(values, place, model, name) for (name, place), values in made})
