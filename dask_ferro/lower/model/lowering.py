"""A plan on its inputs, as a Dask graph: names, keys, arguments.

Names decide policy in Dask: the prefix (model and main operator) collects durations, so there are few of them;
chunks of one bundle share a group, so that a long batch is queued at the scheduler instead of pushed to workers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

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
from dask_ferro.lower.layer import BundleLayer, BundleTasks, Key, KeySeries, Literal, PickLayer
from dask_ferro.lower.prepared.prepared import Opened
from dask_ferro.lower.signature import Signature
from dask_ferro.lower.worker.bundle_ref import BundleRef
from dask_ferro.lower.worker.row_count import RowCount
from dask_ferro.trace import ABOUT

# A session with threads costs their start, and there is one session a bundle: below this it has none.
_WORTH_THREADS_S = 1e-3
# Nodes that a bundle's title names, and the end of each name that it shows: what a hover has room for.
_NAMED = 4
_NAME = 40


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
    def keys(self) -> list[Any]:
        """The keys to compute: a list of chunks for each bundle that holds an output."""
        lists = [[self.series[b].at(c) for c in range(self.chunks)] for b in self._last]
        return lists[0] if self.is_single else lists

    @cached_property
    def assembly(self) -> tuple[Any, ...]:
        """Arguments of `assemble` after the results."""
        number = {bundle: i for i, bundle in enumerate(self._last)}
        places = tuple((number[s.bundle], s.place if self.widths[s.bundle] > 1 else -1) for s in self.sources)
        return tuple(s.name for s in self.signature.outputs), places, self.signature.gives

    def with_output(self, graph: HighLevelGraph, index: int) -> HighLevelGraph:
        """Return `graph` with a layer that holds one output chunk by chunk, where no bundle does."""
        source = self.sources[index]
        if self.widths[source.bundle] == 1:
            return graph
        place = self.signature.outputs[index].name if self.by_name else source.place
        picked = PickLayer(self._out_series(index), self.series[source.bundle], place, self.chunks)
        name = self._out_name(index)
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
        """Return each output as a dask array chunked along the batch axis.

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
        assert self.rows is not None
        if spec.dtype is None or found.shape is None or not found.shape:
            raise ConfigError(
                f"output {spec}: its dtype or number of axes is not known before it runs, so it cannot be a dask"
                " array; compute it from numpy chunks instead"
            )
        fixed = self.signature.fixed_rows
        if not self.signature.gives[index] or not (fixed or _may_have(found.shape[0], self.rows)):
            raise ConfigError(
                f"output {spec} does not carry the batch axis, so the chunks of a dask array would each make one;"
                " pass the input as one numpy array"
            )
        name = self.series[self.sources[index].bundle].head[0]
        graph = self.graph
        if self.widths[self.sources[index].bundle] > 1:
            name, graph = self._out_name(index), self.with_output(self.graph, index)
        elif (
            name not in graph.layers
        ):  # a dask array is named after a layer: an empty one, over the one that has it
            layers = {**graph.layers, name: MaterializedLayer({})}
            graph = HighLevelGraph(layers, {**graph.dependencies, name: {self.layer_name}})
        rest = tuple((d if isinstance(d, int) else float("nan"),) for d in found.shape[1:])
        array = ModelArray(graph, name, (self.rows, *rest), dtype=spec.dtype)
        array.seconds, array.model, array.output = seconds, model, spec.name
        return array


def lower(
    opened: Opened,
    arrays: Mapping[str, Any],
    rows: tuple[int, ...] | None,
    plan: Plan,
    types: Mapping[str, ValueType],
    *,
    splits: bool,
    client: Any,
    annotations: Mapping[str, Any],
) -> Lowered:
    """Return the Dask graph of a plan on its inputs.

    Parameters
    ----------
    arrays : mapping of str to array
        Checked inputs by name.
    rows : tuple of int or None
        Rows of each chunk; None: inputs are taken whole.
    splits : bool
        Whether a task runs the model's fixed batch size slice by slice.
    client : distributed.Client or None
        To send large inputs with.
    annotations : mapping
        Dask annotations of the tasks.
    """
    sig = opened.signature
    tokens = {name: token_of(value) for name, value in arrays.items()}
    chunks = 1 if rows is None else len(rows)
    by_name = chunks == 1 and len(plan.bundles) == 1 and len(plan.outputs) > 1
    is_array = any(c and is_dask_array(arrays[s.name]) for s, c in zip(sig.inputs, sig.carries, strict=True))
    counts = rows is not None and (chunks > 1 or is_array)
    names = [node.name or node.op_type for node in opened.loaded.model.graph]
    refs = tuple(
        _bundle_ref(opened, plan, number, splits, by_name, names, counts)
        for number in range(len(plan.bundles))
    )
    live = client if client is not None and not client.asynchronous else None
    feeds = [
        feed(spec.name, arrays[spec.name], rows if carries else None, tokens[spec.name], live)
        for spec, carries in zip(sig.inputs, sig.carries, strict=True)
    ]
    copy = copy_for(opened, live)
    if copy is not None:
        copy = usable_here(copy, [None])  # this process sees the file
    ways = tuple(bool(one.sent) for one in (*feeds, *([copy] if copy is not None else [])))
    # How an input travels is part of a task's name: a task that holds its input, and one that depends on it, are two.
    content = (opened.loaded.digest, tuple(tokens.items()), rows, refs, ways)
    token = blake2b(repr(content).encode(), digest_size=16).hexdigest()
    series = tuple(_series(opened, plan, types, token, b, chunks) for b in range(len(plan.bundles)))
    tasks = [
        BundleTasks(ref, keys, _arguments(bundle, feeds, series))
        for ref, keys, bundle in zip(refs, series, plan.bundles, strict=True)
    ]
    name = series[plan.outputs[0].bundle].head[0] if plan.outputs else f"ferro-{token}"
    layers, dependencies = _merge([*feeds, *([copy] if copy is not None else [])])
    layer = BundleLayer(opened.ref, tasks, chunks, None if copy is None else copy.source.at(0), rows=rows)
    layer.annotations = {**_about(opened, plan, series), **annotations} or None
    graph = HighLevelGraph({**layers, name: layer}, {**dependencies, name: _direct(feeds, copy)})
    widths = tuple(len(b.outputs) for b in plan.bundles)
    sent = tuple(future for one in (*feeds, copy) if one is not None for future in one.sent)
    return Lowered(graph, name, token, series, plan.outputs, widths, types, rows, sig, by_name, sent)


def _bundle_ref(
    opened: Opened,
    plan: Plan,
    number: int,
    splits: bool,
    by_name: bool,
    names: Sequence[str],
    counts: bool,
) -> BundleRef:
    bundle = plan.bundles[number]
    positions = {origin: p for p, origin in enumerate(_origins(bundle))}
    picks = []
    for source in bundle.sources:
        many = source.bundle != MODEL_INPUT and len(plan.bundles[source.bundle].outputs) > 1
        picks.append((positions[_origin(source)], source.place if many else -1))
    sig = opened.signature
    by_rows = splits and any(sig.carries[s.place] for s in bundle.sources)
    return BundleRef(
        bundle.inputs,
        bundle.outputs,
        route(opened.support, bundle.nodes),
        tuple(picks),
        rows=1 if by_rows else 0,
        split=tuple(sig.carries[s.place] for s in bundle.sources) if splits else (),
        parallel=bundle.seconds > _WORTH_THREADS_S,
        by_name=by_name,
        title=_title([names[position] for position in bundle.nodes]),
        flops=0.0 if by_rows else float(bundle.flops),
        down=tuple(sorted({s.place for s in plan.outputs if s.bundle == number})),
        rowed=_row_count(opened, plan, number) if counts else None,
    )


def _row_count(opened: Opened, plan: Plan, number: int) -> RowCount | None:
    """Which results of a bundle are the model's outputs, and which of its inputs have the rows; None: no output."""
    sig, bundle = opened.signature, plan.bundles[number]
    outputs = tuple(
        (s.place, spec.name) for s, spec in zip(plan.outputs, sig.outputs, strict=True) if s.bundle == number
    )
    reads = (i for i, s in enumerate(bundle.sources) if s.bundle == MODEL_INPUT and sig.carries[s.place])
    return RowCount(opened.name, outputs, tuple(reads)) if outputs else None


def _about(opened: Opened, plan: Plan, series: Sequence[KeySeries]) -> dict[str, Any]:
    """The annotation that says which regions each bundle is of; none of a graph without signals."""
    nodes = list(opened.loaded.model.graph)
    if not any(str(region_of(node)) for node in nodes):
        return {}
    pairs = zip(series, plan.bundles, strict=True)
    found = {keys.head: tuple(about(nodes[i] for i in bundle.nodes)) for keys, bundle in pairs}
    return {ABOUT: ByHead(found)}


def _title(names: Sequence[str]) -> str:
    """Return the first names and how many more there are: a task may not grow with its nodes."""
    more = len(names) - _NAMED
    return ", ".join(name[-_NAME:] for name in names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _origin(source: ValueSource) -> tuple[int, int]:
    """The argument that a source comes in: a model input, or the whole result of a bundle."""
    return (MODEL_INPUT, source.place) if source.bundle == MODEL_INPUT else (source.bundle, 0)


def _origins(bundle: Bundle) -> list[tuple[int, int]]:
    return list(dict.fromkeys(_origin(s) for s in bundle.sources))


def _arguments(
    bundle: Bundle, feeds: Sequence[Feed], series: Sequence[KeySeries]
) -> tuple[KeySeries | Literal, ...]:
    return tuple(
        feeds[index].source if number == MODEL_INPUT else series[number] for number, index in _origins(bundle)
    )


def _series(
    opened: Opened, plan: Plan, types: Mapping[str, ValueType], token: str, number: int, chunks: int
) -> KeySeries:
    bundle = plan.bundles[number]
    op = max(bundle.ops, key=lambda name: (bundle.ops[name], name), default="identity").lower()
    name = f"{_label(opened.name)}-{op}-{token}"
    is_output = any(s.bundle == number for s in plan.outputs)
    if is_output and len(bundle.outputs) == 1:
        return KeySeries((f"{name}-{number}",), _zeros(types, bundle.outputs[0]))
    if chunks > 1:  # chunks of one bundle are a group of their own: independent, so they can be queued
        return KeySeries((f"{name}-{number}",))
    return KeySeries((name, number))


def _may_have(size: Any, rows: Sequence[Any]) -> bool:
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


def _merge(feeds: Sequence[Feed]) -> tuple[dict[str, Any], dict[str, set[str]]]:
    layers: dict[str, Any] = {}
    dependencies: dict[str, set[str]] = {}
    for one in feeds:
        layers.update(one.layers)
        dependencies.update({k: set(v) for k, v in one.dependencies.items()})
    return layers, dependencies


def _direct(feeds: Sequence[Feed], copy: Feed | None) -> set[str]:
    """Return the layers that the bundles read from: the last one of each input's graph."""
    return {one.top for one in (*feeds, copy) if one is not None and one.top is not None}
