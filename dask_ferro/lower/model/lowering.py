"""A plan on its inputs, as a Dask graph: names, keys, arguments.

Names decide policy in Dask: the prefix (model and main operator) collects durations, so there are few of them;
chunks of one bundle share a group, so that a long batch is queued at the scheduler instead of pushed to workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

from dask.delayed import single_key
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.engines.selection import route
from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.plan import MODEL_INPUT, Bundle, Plan, ValueSource
from dask_ferro.graph.ir.inference import ValueType
from dask_ferro.graph.ir.regions import region_of
from dask_ferro.lower.annotations import ByHead, about
from dask_ferro.lower.inputs.keys import (
    Feed,
    all_there,
    feed,
    is_dask_array,
    token_of,
    usable_here,
)
from dask_ferro.lower.inputs.shipping import copy_for
from dask_ferro.lower.layer import BundleLayer, BundleTasks, Key, KeySeries, KeysOrValue, PickLayer
from dask_ferro.lower.model.bound import BoundModel
from dask_ferro.lower.model.bundles import BundlePlan
from dask_ferro.lower.model.joining import assemble
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.signature import Dim, Signature, shape_of
from dask_ferro.lower.worker.bundle_ref import BundleRef
from dask_ferro.lower.worker.output_check import OutputCheck, Sizes
from dask_ferro.lower.worker.threads import WORTH_THREADS_S
from dask_ferro.trace import ABOUT

# A function of the values of keys, and its arguments after these.
Rebuilding = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Lowered:
    """A Dask graph of a model on its inputs, and how its keys make up the outputs.

    Attributes
    ----------
    graph : HighLevelGraph
    layer_name : str
        Of the bundles' layer.
    token : str
        Of model, inputs and plan.
    series : tuple of KeySeries
        Keys of each bundle.
    sources : tuple of ValueSource
        Bundle and index of each model output.
    widths : tuple of int
        How many outputs each bundle has.
    types : mapping
        Types of the values at the batch of a chunk.
    rows : tuple of int or None
        Rows of each chunk.
    by_name : bool
        Whether the one bundle's one task gives the outputs as a dict.
    sent : tuple of Future
        What the workers were sent for it.
    """

    graph: HighLevelGraph
    layer_name: str
    token: str
    series: tuple[KeySeries, ...]
    sources: tuple[ValueSource, ...]
    widths: tuple[int, ...]
    types: Mapping[str, ValueType]
    rows: tuple[int, ...] | None
    signature: Signature
    by_name: bool
    sent: tuple[Any, ...] = ()

    @property
    def is_there(self) -> bool:
        """Whether all that it was sent is there, as far as this process was told."""
        return all_there(self.sent)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return 1 if self.rows is None else len(self.rows)

    @property
    def is_single(self) -> bool:
        """Whether one key holds the whole result."""
        return self.by_name or (
            len(self.sources) == 1 and self.chunks == 1 and self.widths[self.sources[0].bundle] == 1
        )

    @cached_property
    def _last(self) -> tuple[int, ...]:
        """The bundles that hold outputs, each once."""
        return tuple(dict.fromkeys(s.bundle for s in self.sources))

    @cached_property
    def keys(self) -> list[Key]:
        """The keys to compute: a list of chunks for each bundle that holds an output."""
        lists = [list(map(self.series[b].at, range(self.chunks))) for b in self._last]
        return lists[0] if self.is_single else lists

    @cached_property
    def _assembly(self) -> tuple[Any, ...]:
        """Arguments of `assemble` after the results."""
        number = {bundle: i for i, bundle in enumerate(self._last)}
        places = tuple((number[s.bundle], s.place if self.widths[s.bundle] > 1 else -1) for s in self.sources)
        return tuple(s.name for s in self.signature.outputs), places, self.signature.gives

    def rebuilding(self, model: str) -> Rebuilding:
        """Return the function that makes the outputs of the keys' values, and its arguments after these.

        Parameters
        ----------
        model : str
            Its name, for an error.
        """
        return (single_key, ()) if self.is_single else (assemble, (*self._assembly, model))

    def with_output(self, graph: HighLevelGraph, index: int) -> HighLevelGraph:
        """Return `graph` with a layer that holds one output chunk by chunk, where no bundle does."""
        source = self.sources[index]
        if self.widths[source.bundle] == 1:
            return graph
        place = self.signature.outputs[index].name if self.by_name else source.place
        picked = PickLayer(self._out_series(index), self.series[source.bundle], place, self.chunks)
        name = self._out_name(index)
        # A persisted graph has no layer of bundles: its results lie in all of its layers.
        upstream = set(graph.layers) if self.layer_name not in graph.layers else {self.layer_name}
        return HighLevelGraph({**graph.layers, name: picked}, {**graph.dependencies, name: upstream})

    def output_keys(self, index: int) -> list[Key]:
        """Return the keys of one output's chunks, in `with_output`'s graph."""
        series = self._out_series(index)
        return [series.at(c) for c in range(self.chunks)]

    def _out_name(self, index: int) -> str:
        return f"ferro-output-{self.token}-{index}"

    def _out_series(self, index: int) -> KeySeries:
        source = self.sources[index]
        if self.widths[source.bundle] == 1:
            return self.series[source.bundle]
        return KeySeries((self._out_name(index),), _zeros(self.types, self.signature.outputs[index].name))

    def dask_arrays(self, seconds: float, model: str) -> dict[str, Any]:
        """Return each output as a dask array chunked along the batch axis; of one chunk where inputs are whole.

        Parameters
        ----------
        seconds : float
            Projected, of a chunk.
        model : str
            Its name.
        """
        outputs = enumerate(self.signature.outputs)
        return {spec.name: self._dask_array(i, seconds, model) for i, spec in outputs}

    def _dask_array(self, index: int, seconds: float, model: str) -> Any:
        from dask_ferro.lower.model.array import ModelArray

        spec = self.signature.outputs[index]
        found = self.types[spec.name]
        if spec.dtype is None or found.shape is None or not found.shape:
            raise ConfigError(
                f"output {spec}: its dtype or number of axes is not known before it runs, so it cannot be a dask"
                " array; compute it from numpy chunks instead"
            )
        fixed = self.signature.fixed_rows
        if self.rows is not None and not (
            self.signature.gives[index] and (fixed or _may_have(found.shape[0], self.rows))
        ):
            raise ConfigError(
                f"output {spec} does not carry the batch axis, so the chunks of a dask array would each make one;"
                " pass the input as one numpy array"
            )
        name = self.series[self.sources[index].bundle].head[0]
        graph = self.graph
        if self.widths[self.sources[index].bundle] > 1:
            name, graph = self._out_name(index), self.with_output(self.graph, index)
        elif name not in graph.layers:
            # A dask array is named after a layer: here an empty one, over the layer that has its keys.
            layers = {**graph.layers, name: MaterializedLayer({})}
            graph = HighLevelGraph(layers, {**graph.dependencies, name: {self.layer_name}})
        sizes = tuple((d if isinstance(d, int) else float("nan"),) for d in found.shape)
        rows = sizes[0] if self.rows is None else self.rows
        array = ModelArray(graph, name, (rows, *sizes[1:]), dtype=spec.dtype)
        array.seconds, array.model, array.output = seconds, model, spec.name
        return array


class Lowerings:
    """The Dask graphs of one planned model: one for the workers of a client, and one for this process.

    Parameters
    ----------
    name : str
        The model's.
    planned : BundlePlan or Lowered
        Of a persisted model its only graph, whose keys hold values on workers: it is not planned again.
    """

    def __init__(self, name: str, planned: BundlePlan | Lowered) -> None:
        self.name = name
        self._planned = planned
        self._made: dict[str, Lowered] = {}

    def of(self, client: Any) -> Lowered:
        """Return the graph for a client, whose workers hold the large inputs, or for this process (None).

        What was sent and is lost, by a restart or with a worker, is sent again.
        """
        if isinstance(self._planned, Lowered):
            return self._planned
        key = _client_id(client)
        if key not in self._made or not self._made[key].is_there:
            # Graphs of a client that is gone hold futures of data that are gone with it.
            self._made.clear()
            self._made[key] = lower(self._planned, client)
        return self._made[key]

    def again(self, lost: Lowered, client: Any) -> Lowered | None:
        """Return the graph with what `lost` sent sent again; None where nothing was lost, or nothing can be sent."""
        made = self.of(client)
        # By identity: another thread, which lost the same, may have sent it again.
        return None if made is lost else made


def _client_id(client: Any) -> str:
    return "" if client is None else str(client.id)


class _Arrivals(NamedTuple):
    """The inputs as tasks read them, and the copy of the model's file where it has to travel."""

    feeds: tuple[Feed, ...]
    copy: Feed | None

    @property
    def all(self) -> tuple[Feed, ...]:
        return self.feeds if self.copy is None else (*self.feeds, self.copy)


def lower(planned: BundlePlan, client: Any) -> Lowered:
    """Return the Dask graph of a model on its inputs.

    Parameters
    ----------
    client : distributed.Client or None
        To send large inputs with.
    """
    bound, plan, types = planned.bound, planned.plan, planned.sized.types
    model = bound.model
    tokens = {name: token_of(value) for name, value in bound.arrays.items()}
    by_name = planned.chunks == 1 and len(plan.bundles) == 1 and len(plan.outputs) > 1
    refs = _bundle_refs(planned, by_name)
    arrivals = _arrivals(bound, tokens, client if client is not None and not client.asynchronous else None)
    # How an input travels is part of a task's name: a task that holds its input, and one that depends on it, are two.
    ways = tuple(bool(one.sent) for one in arrivals.all)
    content = (model.loaded.digest, tuple(tokens.items()), bound.rows, refs, ways)
    # A digest of the text: hash() differs from process to process.
    token = blake2b(repr(content).encode(), digest_size=16).hexdigest()
    series = tuple(_series(model, plan, types, token, b, planned.chunks) for b in range(len(plan.bundles)))
    name = series[plan.outputs[0].bundle].head[0] if plan.outputs else f"ferro-{token}"
    graph = _graph(name, _bundle_layer(planned, refs, series, arrivals), arrivals)
    widths = tuple(len(b.outputs) for b in plan.bundles)
    sent = tuple(chain.from_iterable(one.sent for one in arrivals.all))
    return Lowered(
        *(graph, name, token, series, plan.outputs, widths, types),
        *(bound.rows, model.signature, by_name, sent),
    )


def _arrivals(bound: BoundModel, tokens: Mapping[str, str], client: Any) -> _Arrivals:
    sig = bound.model.signature
    feeds = tuple(
        feed(spec.name, bound.arrays[spec.name], bound.rows if carries else None, tokens[spec.name], client)
        for spec, carries in zip(sig.inputs, sig.carries, strict=True)
    )
    copy = copy_for(bound.model, client)
    # This process sees the file, so its own tasks need no copy.
    return _Arrivals(feeds, None if copy is None else usable_here(copy, [None]))


def _bundle_layer(
    planned: BundlePlan, refs: Sequence[BundleRef], series: Sequence[KeySeries], arrivals: _Arrivals
) -> BundleLayer:
    tasks = [
        BundleTasks(ref, keys, _arguments(bundle, arrivals.feeds, series))
        for ref, keys, bundle in zip(refs, series, planned.plan.bundles, strict=True)
    ]
    copy = None if arrivals.copy is None else arrivals.copy.source.at(0)
    bound = planned.bound
    layer = BundleLayer(bound.model.ref, tasks, planned.chunks, copy, rows=bound.rows)
    # Set here: without any, Dask's layer would take those of the moment, and not of where the model was bound.
    layer.annotations = {**_about(bound.model, planned.plan, series), **bound.annotations} or None
    return layer


def _graph(name: str, layer: BundleLayer, arrivals: _Arrivals) -> HighLevelGraph:
    """Return the bundles' layer over those of the inputs."""
    layers: dict[str, Any] = {}
    dependencies: dict[str, set[str]] = {}
    for one in arrivals.all:
        layers.update(one.layers)
        dependencies.update({k: set(v) for k, v in one.dependencies.items()})
    read = {one.top for one in arrivals.all if one.top is not None}
    return HighLevelGraph({**layers, name: layer}, {**dependencies, name: read})


def _bundle_refs(planned: BundlePlan, by_name: bool) -> tuple[BundleRef, ...]:
    return tuple(_bundle_ref(planned, n, by_name=by_name) for n in range(len(planned.plan.bundles)))


def _bundle_ref(planned: BundlePlan, number: int, *, by_name: bool) -> BundleRef:
    plan, model, splits = planned.plan, planned.bound.model, planned.splits
    sig = model.signature
    bundle = plan.bundles[number]
    positions = {origin: p for p, origin in enumerate(_origins(bundle))}
    picks = []
    for source in bundle.sources:
        many = source.bundle != MODEL_INPUT and len(plan.bundles[source.bundle].outputs) > 1
        picks.append((positions[_origin(source)], source.place if many else -1))
    by_rows = splits and any(sig.carries[s.place] for s in bundle.sources)
    return BundleRef(
        bundle.inputs,
        bundle.outputs,
        route(model.support, bundle.nodes),
        tuple(picks),
        rows=1 if by_rows else 0,
        split=tuple(sig.carries[s.place] for s in bundle.sources) if splits else (),
        parallel=bundle.seconds > WORTH_THREADS_S,
        by_name=by_name,
        flops=0.0 if by_rows else float(bundle.cost.flops),
        down=tuple(sorted({s.place for s in plan.outputs if s.bundle == number})),
        check=_output_check(planned, number),
    )


def _output_check(planned: BundlePlan, number: int) -> OutputCheck | None:
    """Return the check of a bundle's results that are outputs of the model; None: there is none."""
    bound, plan = planned.bound, planned.plan
    sig, bundle = bound.model.signature, plan.bundles[number]
    is_cut = bound.rows is not None and (planned.chunks > 1 or bound.has_dask_rows)
    is_dask = any(map(is_dask_array, bound.arrays.values()))
    # A batch of 1 that is run row by row has other shapes than its inputs.
    is_whole = not (is_cut or planned.splits)
    outputs = tuple(
        (s.place, spec.name, _sizes(planned, spec.name, int(not is_whole)) if is_dask or is_whole else None)
        for s, spec in zip(plan.outputs, sig.outputs, strict=True)
        if s.bundle == number
    )
    if not outputs or not (is_cut or is_dask or is_whole):
        return None
    reads = (i for i, s in enumerate(bundle.sources) if s.bundle == MODEL_INPUT and sig.carries[s.place])
    shapes = ((n, shape_of(a)) for n, a in bound.arrays.items()) if is_whole and not is_dask else ()
    return OutputCheck(bound.model.name, outputs, tuple(reads), is_cut, tuple(shapes))


def _sizes(planned: BundlePlan, name: str, first: int) -> Sizes:
    """Return the sizes of an output as far as they are known, from the axis `first` on."""
    shape = planned.sized.types[name].shape
    if not shape:
        return None
    return tuple(d if isinstance(d, int) and axis >= first else None for axis, d in enumerate(shape))


def _about(opened: PreparedModel, plan: Plan, series: Sequence[KeySeries]) -> dict[str, Any]:
    """Return the annotation that names each bundle's regions; {} for a graph without regions."""
    nodes = list(opened.loaded.model.graph)
    if not any(str(region_of(node)) for node in nodes):
        return {}
    found = ByHead()
    for keys, bundle in zip(series, plan.bundles, strict=True):
        found[keys.head] = tuple(about(nodes[i] for i in bundle.nodes))
    return {ABOUT: found}


def _origin(source: ValueSource) -> tuple[int, int]:
    """Return the argument that holds a source: a model input, or the whole result of a bundle."""
    return (MODEL_INPUT, source.place) if source.bundle == MODEL_INPUT else (source.bundle, 0)


def _origins(bundle: Bundle) -> list[tuple[int, int]]:
    return list(dict.fromkeys(_origin(s) for s in bundle.sources))


def _arguments(bundle: Bundle, feeds: Sequence[Feed], series: Sequence[KeySeries]) -> tuple[KeysOrValue, ...]:
    return tuple(
        feeds[index].source if number == MODEL_INPUT else series[number] for number, index in _origins(bundle)
    )


def _series(
    opened: PreparedModel, plan: Plan, types: Mapping[str, ValueType], token: str, number: int, chunks: int
) -> KeySeries:
    bundle = plan.bundles[number]
    # Dask collects durations by this name: the operator of most nodes tells bundles apart.
    op = max(bundle.ops, key=lambda name: (bundle.ops[name], name), default="identity").lower()
    name = f"{_label(opened.name)}-{op}-{token}"
    is_output = any(s.bundle == number for s in plan.outputs)
    if is_output and len(bundle.outputs) == 1:
        # As a dask array names its chunks: the chunk, and a zero for each other axis.
        return KeySeries((f"{name}-{number}",), _zeros(types, bundle.outputs[0]))
    # Chunks of one bundle are a group of their own: independent, so they can be queued.
    if chunks > 1:
        return KeySeries((f"{name}-{number}",))
    return KeySeries((name, number))


def _may_have(size: Dim, rows: Sequence[float]) -> bool:
    """Whether an output of this size at the largest chunk may have a row for each of its rows."""
    known = [n for n in rows if n == n]
    return not isinstance(size, int) or len(known) < len(rows) or size == max(known, default=size)


def _zeros(types: Mapping[str, ValueType], name: str) -> tuple[int, ...]:
    shape = types[name].shape
    return (0,) * (len(shape) - 1) if shape else ()


def _label(name: str) -> str:
    """Return a name that Dask takes for one word of a key's prefix."""
    label = re.sub(r"\W+", "_", name).strip("_") or "model"
    return label if label[0].isalpha() else f"m_{label}"
