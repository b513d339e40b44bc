"""Lower a model on its inputs to a Dask graph, and its outputs to collections: a dask array each, a mapping of several.

Names decide policy in Dask: the prefix (model and main operator) collects durations, so there are few of them;
chunks of one bundle share a group, so that a long batch is queued at the scheduler instead of pushed to workers.

An output without rows or a known number of axes (a sequence, a map, the result of an operator that inference does not
know) is a delayed value.  If only a run determines the width of the rows, each chunk is compared with the first one:
a list of texts that is as wide as its longest row has another width in each chunk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.base import DaskMethodsMixin, tokenize
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, Layer, MaterializedLayer
from tlz import merge

from dask_ferro.engines.selection import route
from dask_ferro.errors import InputError
from dask_ferro.flow.task_cost import CALL, TaskCost, guess_cost
from dask_ferro.graph.bundling.plan import MODEL_INPUT, Bundle, ValueSource
from dask_ferro.graph.ir.nodes import value_bytes
from dask_ferro.lower.annotations import ByHead, task_annotation
from dask_ferro.lower.inputs.shipping import copy_for
from dask_ferro.lower.layer import (
    Key,
    KeySeries,
    KeysOrValue,
    LazyLayer,
    Literal,
    RunLengths,
    TaskInput,
    TaskSeries,
    embed_input,
    task_input,
)
from dask_ferro.lower.model.bound import BoundModel
from dask_ferro.lower.portable import PortableCall, PortableTask
from dask_ferro.lower.signature import Dim, comes_later
from dask_ferro.lower.upstream import List, TaskRef
from dask_ferro.lower.worker.outputs import OutputCheck, Sizes, join_chunks, pick, shape_at, together_by_name
from dask_ferro.lower.worker.task import WORTH_THREADS_S, BundleRef, run_bundle
from dask_ferro.trace import PART_ANNOTATION


def outputs_of(bound: BoundModel, client: Any) -> Any:
    """Return the output of a model on its inputs, a dask array or a delayed value; `Outputs` of several.

    The client asks its workers whether they see the model's file.
    """
    tokens = {name: tokenize(value) for name, value in bound.arrays.items()}
    feeds = _feeds(bound, lambda name, value, rows: task_input(name, value, rows, tokens[name], client))
    copy = None if client is None else copy_for(bound.model.loaded, bound.model.ref.path, client)
    # Workers in this process have loaded the model.
    elsewhere = client is not None and not client.scheduler.address.startswith("inproc://")
    made = lower(bound, feeds, copy, tuple(tokens.items()), are_arrays=True, has_sessions=elsewhere)
    return _output(made, 0) if len(bound.plan.outputs) == 1 else Outputs(made)


def values_of(bound: BoundModel) -> dict[str, Any]:
    """Return the outputs of a model on its inputs by name, computed in this process."""
    # No other graph has these keys, so they need not depend on the content of the inputs.
    made = lower(bound, _feeds(bound, embed_input), None, None, are_arrays=False, has_sessions=False)
    return assemble(dask.get(made.graph, made.keys), made.places, bound.model.name)  # type: ignore[attr-defined, arg-type]


def _feeds(bound: BoundModel, of: Callable[[str, Any, tuple[int, ...] | None], TaskInput]) -> list[TaskInput]:
    """Return the inputs as tasks read them; `of` builds each from its name, its value, and the rows of its chunks."""
    sig = bound.model.signature
    return [
        of(spec.name, bound.arrays[spec.name], bound.rows if carries else None)
        for spec, carries in zip(sig.inputs, sig.carries, strict=True)
    ]


# ---- the graph ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelGraph:
    """A Dask graph of a model on its inputs, and the places of its outputs."""

    graph: HighLevelGraph
    # The layer of the bundles.
    layer_name: str
    # Token of model, inputs and plan.
    token: str
    # Keys of each bundle.
    series: tuple[KeySeries, ...]
    bound: BoundModel

    def source(self, index: int) -> tuple[KeySeries, int | None]:
        """Return the keys of the bundle that holds an output, and the position in its tuple; None: its only output."""
        source = self.bound.plan.outputs[index]
        is_only = len(self.bound.plan.bundles[source.bundle].outputs) == 1
        return self.series[source.bundle], None if is_only else source.place

    @property
    def keys(self) -> list[list[Key]]:
        """The keys to compute, which are the keys of each output's chunks."""
        sources = (self.source(index)[0] for index in range(len(self.bound.plan.outputs)))
        return [list(map(source.at, range(self.bound.chunks))) for source in sources]

    @property
    def places(self) -> dict[str, int | None]:
        """The position of each output in its bundle's values; None: it is the value."""
        return {spec.name: self.source(i)[1] for i, spec in enumerate(self.bound.model.signature.outputs)}


def lower(
    bound: BoundModel,
    feeds: Sequence[TaskInput],
    copy: TaskInput | None,
    tokens: object,
    *,
    are_arrays: bool,
    has_sessions: bool,
) -> ModelGraph:
    """Return the Dask graph of a model on its inputs.

    `copy` is the model's content, for workers that cannot see its file, and `tokens` identifies the inputs.
    `are_arrays` states whether the outputs become dask arrays, whose shapes are binding; otherwise they have the
    computed shapes.  `has_sessions` states whether tasks have the sessions of bundles with them, for other processes.
    """
    model, bundles = bound.model, bound.plan.bundles
    refs = tuple(_bundle_ref(bound, n, are_arrays=are_arrays) for n in range(len(bundles)))
    content = (model.loaded.digest, tokens, bound.rows, refs)
    # A digest of the text: hash() differs from process to process.
    token = blake2b(repr(content).encode(), digest_size=16).hexdigest()
    if has_sessions:
        # Not a part of the token: the results are the same.
        sessions = model.sessions(tuple((ref.inputs, ref.outputs, ref.engines) for ref in refs))
        refs = tuple(ref._replace(session=packed) for ref, packed in zip(refs, sessions, strict=True))
    series = tuple(_series(bound, token, n) for n in range(len(bundles)))
    # Dask's unknown sizes are nan.
    rows = (n if n == n else None for n in bound.rows or ())
    counts = RunLengths(tuple((n, len(list(same))) for n, same in groupby(rows)))
    copied = {} if copy is None else {"copy": copy.source}
    tasks = [
        TaskSeries(
            keys,
            bound.chunks,
            run_bundle,
            (Literal((model.ref,)), Literal((ref,)), *_arguments(bundle, feeds, series)),
            {**copied, "rows": counts} if ref.check is not None and ref.check.is_cut else copied,
            _cost(bound, bundle) if len(bundles) > 1 else None,
        )
        for ref, keys, bundle in zip(refs, series, bundles, strict=True)
    ]
    annotations = {**_region_annotation(bound, series), **dask.get_annotations()}  # type: ignore[attr-defined]
    layer = LazyLayer(tasks, annotations or None)
    sources = bound.plan.outputs
    name = series[sources[0].bundle].head[0] if sources else f"ferro-{token}"
    below = feeds if copy is None else [*feeds, copy]
    layers = merge(*(one.layers for one in below), {name: layer})
    tops = {one.top for one in below if one.top is not None}
    needs = merge(*(one.dependencies for one in below), {name: tops})
    return ModelGraph(HighLevelGraph(layers, needs), name, token, series, bound)


def _bundle_ref(bound: BoundModel, number: int, *, are_arrays: bool) -> BundleRef:
    plan, sig = bound.plan, bound.model.signature
    bundle = plan.bundles[number]
    positions = {origin: p for p, origin in enumerate(_origins(bundle))}
    picks = []
    for source in bundle.sources:
        many = source.bundle != MODEL_INPUT and len(plan.bundles[source.bundle].outputs) > 1
        picks.append((positions[_origin(source)], source.place if many else -1))
    carries = tuple(sig.carries[s.place] for s in bundle.sources) if bound.splits else ()
    read = (bound.arrays[sig.inputs[s.place].name] for s in bundle.sources if s.bundle == MODEL_INPUT)
    return BundleRef(
        bundle.inputs,
        bundle.outputs,
        route(bound.model.support, bundle.nodes),
        tuple(picks),
        split=carries if any(carries) else (),
        parallel=bundle.seconds > WORTH_THREADS_S,
        down=tuple(sorted({s.place for s in plan.outputs if s.bundle == number})),
        check=_output_check(bound, number, are_arrays=are_arrays),
        late=any(map(comes_later, read)),
    )


def _output_check(bound: BoundModel, number: int, *, are_arrays: bool) -> OutputCheck | None:
    plan, sig = bound.plan, bound.model.signature
    is_cut = bound.rows is not None and (bound.chunks > 1 or bound.has_dask_rows)
    # If a model of batch 1 is run row by row, its rows are not the inferred rows.
    is_whole = not (is_cut or bound.splits)
    outputs = tuple(
        (
            s.place,
            spec.name,
            _sizes(bound, spec.name, int(not is_whole)) if are_arrays or is_whole else None,
        )
        for s, spec in zip(plan.outputs, sig.outputs, strict=True)
        if s.bundle == number
    )
    if not outputs or not (is_cut or is_whole or are_arrays):
        return None
    reads = (
        i
        for i, s in enumerate(plan.bundles[number].sources)
        if s.bundle == MODEL_INPUT and sig.carries[s.place]
    )
    shapes = tuple(bound.shapes.items()) if is_whole else ()
    return OutputCheck(bound.model.name, outputs, tuple(reads), is_cut, shapes, are_arrays)


def _sizes(bound: BoundModel, name: str, first: int) -> Sizes:
    """Return the sizes of an output as far as they are known, beginning with the axis `first`."""
    shape = bound.sized.types[name].shape
    if shape is None:
        return None
    return tuple(d if isinstance(d, int) and axis >= first else None for axis, d in enumerate(shape))


def _region_annotation(bound: BoundModel, series: Sequence[KeySeries]) -> dict[str, Any]:
    """Return the annotation that names each bundle's regions; {} for a graph without regions."""
    loaded = bound.model.loaded
    if not loaded.has_regions:
        return {}
    nodes = list(loaded.model.graph)
    found = ByHead()
    for keys, bundle in zip(series, bound.plan.bundles, strict=True):
        found[keys.head] = tuple(task_annotation(nodes[i] for i in bundle.nodes))
    return {PART_ANNOTATION: found}


def _cost(bound: BoundModel, bundle: Bundle) -> TaskCost:
    """Return the projected cost of a bundle."""
    return guess_cost(bundle.seconds, sum(value_bytes(bound.sized.types[name]) for name in bundle.outputs))


def _origin(source: ValueSource) -> tuple[int, int]:
    """Return the argument that holds a source: a model input, or the whole result of a bundle."""
    return (MODEL_INPUT, source.place) if source.bundle == MODEL_INPUT else (source.bundle, 0)


def _origins(bundle: Bundle) -> list[tuple[int, int]]:
    return list(dict.fromkeys(_origin(s) for s in bundle.sources))


def _arguments(
    bundle: Bundle, feeds: Sequence[TaskInput], series: Sequence[KeySeries]
) -> tuple[KeysOrValue, ...]:
    return tuple(
        feeds[index].source if number == MODEL_INPUT else series[number] for number, index in _origins(bundle)
    )


def _series(bound: BoundModel, token: str, number: int) -> KeySeries:
    bundle = bound.plan.bundles[number]
    # Dask collects durations by this name; the most frequent operator distinguishes bundles.
    op = max(bundle.ops, key=lambda name: (bundle.ops[name], name), default="identity").lower()
    cost = blake2b(repr((sorted(bundle.ops.items()), bundle.cost)).encode(), digest_size=4).hexdigest()
    name = f"{_label(bound.model.name)}-{op}-{cost}{CALL}{token}"
    is_output = any(s.bundle == number for s in bound.plan.outputs)
    if is_output and len(bundle.outputs) == 1:
        # Like the keys of a dask array: the chunk, and a zero for each other axis.
        shape = bound.sized.types[bundle.outputs[0]].shape
        return KeySeries((f"{name}-{number}",), (0,) * (len(shape) - 1) if shape else ())
    # Chunks of one bundle are a group of their own: independent, so they can be queued.
    if bound.chunks > 1:
        return KeySeries((f"{name}-{number}",))
    return KeySeries((name, number))


def _label(name: str) -> str:
    """Return a name that Dask treats as one word of a key's prefix."""
    label = re.sub(r"\W+", "_", name).strip("_") or "model"
    return label if label[0].isalpha() else f"m_{label}"


# ---- outputs as collections --------------------------------------------------------------------------------


class Outputs(Mapping[str, Any], DaskMethodsMixin):
    """The outputs of a model by name, in its order: ``label, scores = model(x)``; all are computed together.

    Its iterator yields the outputs and not their names, so that it unpacks; `keys()` and `items()` are like a dict's.
    It is not a dict itself, because a client takes dicts apart.
    """

    __dask_optimize__ = staticmethod(da.Array.__dask_optimize__)
    __dask_scheduler__ = staticmethod(da.Array.__dask_scheduler__)

    def __init__(self, made: ModelGraph) -> None:
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


def _output(made: ModelGraph, index: int) -> Any:
    bound, sig = made.bound, made.bound.model.signature
    spec, shape = sig.outputs[index], bound.sized.types[sig.outputs[index].name].shape
    if spec.dtype is None or shape is None:
        return _to_delayed(made, index)
    if bound.rows is not None and not (shape and (sig.fixed_rows or _may_have(shape[0], bound.rows))):
        raise InputError(
            f"model {bound.model.name!r}: output {spec} does not carry the batch axis, so it cannot be"
            " joined from chunks; run it on all rows in one task (no batch_size=, and numpy arrays)"
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
    graph = made.graph if top is None else _add_layer(made, name, top)
    return da.Array(graph, name, tuple(sizes), dtype=spec.dtype)


def _picks(made: ModelGraph, index: int, series: KeySeries, *, is_open: bool) -> list[TaskSeries]:
    """Return tasks that pick one output of a bundle; if its axes are open, they compare it with the first chunk."""
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


def _to_delayed(made: ModelGraph, index: int) -> Delayed:
    (source, place), model = made.source(index), made.bound.model
    name = f"ferro-output-{made.token}-{index}"
    parts = List(*(TaskRef(source.at(chunk)) for chunk in range(made.bound.chunks)))
    task = PortableTask(name, join_chunks, parts, place, model.name, model.signature.outputs[index].name)
    return Delayed(name, _add_layer(made, name, MaterializedLayer({name: task})))


def _add_layer(made: ModelGraph, name: str, top: Layer) -> HighLevelGraph:
    """Return the graph with a layer on top of the bundles' layer."""
    layers, needs = made.graph.layers, made.graph.dependencies
    return HighLevelGraph({**layers, name: top}, {**needs, name: {made.layer_name}})


def _may_have(size: Dim, rows: Sequence[float]) -> bool:
    """Whether an output of this size at the largest chunk may have a row for each of its rows."""
    known = [n for n in rows if n == n]
    return not isinstance(size, int) or len(known) < len(rows) or size == max(known, default=size)


# ---- chunks put together -----------------------------------------------------------------------------------


def assemble(
    results: Sequence[Sequence[Any]], places: Mapping[str, int | None], model: str
) -> dict[str, Any]:
    """Return outputs by name, from the values of `Lowered.keys` and the positions of `Lowered.places`."""
    made = zip(places.items(), results, strict=True)
    return together_by_name({name: join_chunks(values, place, model, name) for (name, place), values in made})
