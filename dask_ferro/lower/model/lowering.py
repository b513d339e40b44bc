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
from typing import Any, NamedTuple

import dask
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.engines.selection import route
from dask_ferro.graph.bundling.plan import MODEL_INPUT, Bundle, Plan, ValueSource
from dask_ferro.graph.ir.inference import ValueType
from dask_ferro.graph.ir.regions import region_of
from dask_ferro.lower.annotations import ByHead, about
from dask_ferro.lower.inputs.keys import Feed, feed, is_dask_array, token_of, usable_here
from dask_ferro.lower.inputs.shipping import copy_for
from dask_ferro.lower.layer import BundleLayer, BundleTasks, Key, KeySeries, KeysOrValue
from dask_ferro.lower.model.bound import BoundModel
from dask_ferro.lower.model.bundles import BundlePlan
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.signature import shape_of
from dask_ferro.lower.worker.bundle_ref import BundleRef
from dask_ferro.lower.worker.output_check import OutputCheck, Sizes
from dask_ferro.lower.worker.threads import WORTH_THREADS_S
from dask_ferro.trace import ABOUT


@dataclass(frozen=True)
class Lowered:
    """A Dask graph of a model on its inputs, and where its outputs are.

    Attributes
    ----------
    graph : HighLevelGraph
    layer_name : str
        Of the bundles' layer.
    token : str
        Of model, inputs and plan.
    series : tuple of KeySeries
        Keys of each bundle.
    planned : BundlePlan
    """

    graph: HighLevelGraph
    layer_name: str
    token: str
    series: tuple[KeySeries, ...]
    planned: BundlePlan

    @property
    def sources(self) -> tuple[ValueSource, ...]:
        """Bundle and index of each model output."""
        return self.planned.plan.outputs

    def has_several(self, index: int) -> bool:
        """Whether the bundle of an output has others too."""
        return len(self.planned.plan.bundles[self.sources[index].bundle].outputs) > 1

    @cached_property
    def _last(self) -> tuple[int, ...]:
        """The bundles that hold outputs, each once."""
        return tuple(dict.fromkeys(s.bundle for s in self.sources))

    @cached_property
    def keys(self) -> list[list[Key]]:
        """The keys to compute: a list of chunks for each bundle that holds an output."""
        return [list(map(self.series[b].at, range(self.planned.chunks))) for b in self._last]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Where each output lies in the values of `keys`: the list, and the index in each value; -1: the value."""
        number = {bundle: i for i, bundle in enumerate(self._last)}
        return tuple(
            (number[s.bundle], s.place if self.has_several(i) else -1) for i, s in enumerate(self.sources)
        )


class _Arrivals(NamedTuple):
    """The inputs as tasks read them, and the copy of the model's file where it has to travel."""

    feeds: tuple[Feed, ...]
    copy: Feed | None

    @property
    def all(self) -> tuple[Feed, ...]:
        return self.feeds if self.copy is None else (*self.feeds, self.copy)


def lower(planned: BundlePlan, client: Any, *, are_arrays: bool) -> Lowered:
    """Return the Dask graph of a model on its inputs.

    Parameters
    ----------
    client : distributed.Client or None
        Its workers are asked whether they see the model's file.
    are_arrays : bool
        Whether the outputs become dask arrays, whose shapes hold; else they have the shapes that are computed.
    """
    bound, plan, types = planned.bound, planned.plan, planned.sized.types
    model = bound.model
    tokens = {name: token_of(value) for name, value in bound.arrays.items()}
    refs = tuple(_bundle_ref(planned, n, are_arrays=are_arrays) for n in range(len(plan.bundles)))
    arrivals = _arrivals(bound, tokens, client)
    content = (model.loaded.digest, tuple(tokens.items()), bound.rows, refs)
    # A digest of the text: hash() differs from process to process.
    token = blake2b(repr(content).encode(), digest_size=16).hexdigest()
    series = tuple(_series(model, plan, types, token, b, planned.chunks) for b in range(len(plan.bundles)))
    name = series[plan.outputs[0].bundle].head[0] if plan.outputs else f"ferro-{token}"
    graph = _graph(name, _bundle_layer(planned, refs, series, arrivals), arrivals)
    return Lowered(graph, name, token, series, planned)


def _arrivals(bound: BoundModel, tokens: Mapping[str, str], client: Any) -> _Arrivals:
    sig = bound.model.signature
    feeds = tuple(
        feed(spec.name, bound.arrays[spec.name], bound.rows if carries else None, tokens[spec.name])
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
    annotations = {**_about(bound.model, planned.plan, series), **dask.get_annotations()}  # type: ignore[attr-defined]
    return BundleLayer(bound.model.ref, tasks, planned.chunks, copy, annotations or None, bound.rows)


def _graph(name: str, layer: BundleLayer, arrivals: _Arrivals) -> HighLevelGraph:
    """Return the bundles' layer over those of the inputs."""
    layers: dict[str, Any] = {}
    dependencies: dict[str, set[str]] = {}
    for one in arrivals.all:
        layers.update(one.layers)
        dependencies.update({k: set(v) for k, v in one.dependencies.items()})
    read = {one.top for one in arrivals.all if one.top is not None}
    return HighLevelGraph({**layers, name: layer}, {**dependencies, name: read})


def _bundle_ref(planned: BundlePlan, number: int, *, are_arrays: bool) -> BundleRef:
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
        flops=0.0 if by_rows else float(bundle.cost.flops),
        down=tuple(sorted({s.place for s in plan.outputs if s.bundle == number})),
        check=_output_check(planned, number, are_arrays=are_arrays),
    )


def _output_check(planned: BundlePlan, number: int, *, are_arrays: bool) -> OutputCheck | None:
    """Return the check of a bundle's results that are outputs of the model; None: there is none."""
    bound, plan = planned.bound, planned.plan
    sig, bundle = bound.model.signature, plan.bundles[number]
    is_cut = bound.rows is not None and (planned.chunks > 1 or bound.has_dask_rows)
    # Of a model of batch 1 that is run row by row, the rows are not those that were inferred.
    is_whole = not (is_cut or planned.splits)
    outputs = tuple(
        (
            s.place,
            spec.name,
            _sizes(planned, spec.name, int(not is_whole)) if are_arrays or is_whole else None,
        )
        for s, spec in zip(plan.outputs, sig.outputs, strict=True)
        if s.bundle == number
    )
    if not outputs or not (is_cut or is_whole or are_arrays):
        return None
    reads = (i for i, s in enumerate(bundle.sources) if s.bundle == MODEL_INPUT and sig.carries[s.place])
    is_dask = any(map(is_dask_array, bound.arrays.values()))
    shapes = ((n, shape_of(a)) for n, a in bound.arrays.items()) if is_whole and not is_dask else ()
    return OutputCheck(bound.model.name, outputs, tuple(reads), is_cut, tuple(shapes), are_arrays)


def _sizes(planned: BundlePlan, name: str, first: int) -> Sizes:
    """Return the sizes of an output as far as they are known, from the axis `first` on."""
    shape = planned.sized.types[name].shape
    if shape is None:
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


def _zeros(types: Mapping[str, ValueType], name: str) -> tuple[int, ...]:
    shape = types[name].shape
    return (0,) * (len(shape) - 1) if shape else ()


def _label(name: str) -> str:
    """Return a name that Dask takes for one word of a key's prefix."""
    label = re.sub(r"\W+", "_", name).strip("_") or "model"
    return label if label[0].isalpha() else f"m_{label}"
