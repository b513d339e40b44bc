"""A model, and an output of a model on its inputs: its bundles as a graph, and the chunks of its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import ceil

from markupsafe import Markup

from dask_ferro.graph.bundling.plan import MODEL_INPUT, Bundle
from dask_ferro.lower.model.collection import ModelGraph, chunk_rows, facts_of, opened_of
from dask_ferro.lower.model.render import engines_of, quantity
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.signature import ValueSpec
from dask_ferro.views.notebook.card import CardTable, ValueCard, card_html, share_bar
from dask_ferro.views.notebook.svg import boxes, curve, drawing, line, rect, words
from dask_ferro.views.terminal import duration

Figure = tuple[str, Markup]
Depths = Sequence[int]
# The engine of a bundle, of which its box has the colour.
EngineOf = Callable[[Bundle], str]

_COLUMNS = ("name", "dtype", "shape")
# The largest graph that is drawn bundle by bundle, in boxes; more could not be read.
_DEEPEST, _WIDEST = 9, 7
_BOX_W, _BOX_H, _STEP_X, _STEP_Y = 92, 26, 122, 36
# The bars of the profile of a larger graph, and their size together.
_BARS, _PROFILE_W, _PROFILE_H = 80, 480, 90
# Lines between chunks; with more chunks, a line stands for several.
_LINES = 24
_STRIP_W, _STRIP_H = 44, 110
# Operator types with a colour of their own.
_HUES = 5
_ENGINES = {"onnxruntime": "ff-0", "array": "ff-1", "reference": "ff-4"}
# A longer list of inputs or outputs is shown when it is asked for.
_SHORT = 8
# The costliest bundles in a table.
_COSTLIEST = 20


def model(value: ModelGraph) -> str:
    """Return the card of a model: facts, chunks, bundles, operators, inputs and outputs."""
    facts, opened = facts_of(value), opened_of(value)
    # A model that cannot be planned yet has the reason among its facts.
    is_planned = any(name == "projected" for name, _ in facts)
    figures = (
        [*strip(chunk_rows(value)), graph(value.bundles, partial(_engine, opened))] if is_planned else []
    )
    return card_html(
        ValueCard(
            "ModelGraph",
            value.name,
            repr(value),
            [(name, text) for name, text in facts if name not in ("inputs", "outputs")],
            [*figures, _ops(value.ops)],
            [
                CardTable(
                    "inputs", _COLUMNS, [_row(s) for s in opened.signature.inputs], left=3, is_open=True
                ),
                CardTable(
                    "outputs", _COLUMNS, [_row(s) for s in opened.signature.outputs], left=3, is_open=True
                ),
                *([_costliest(value.bundles, opened)] if is_planned else ()),
            ],
        )
    )


def output(value: tuple[ValueSpec, ModelGraph]) -> str:
    """Return the card of one output of a model on its inputs."""
    spec, whole = value
    rows = chunk_rows(whole)
    name, dtype, shape = _row(spec)
    facts = [("dtype", dtype), ("shape", shape), ("of", whole.name), ("chunks", f"{whole.chunks:,}")]
    return card_html(
        ValueCard("output", name, f"<output {spec} of {whole.name!r}>", facts, list(strip(rows)))
    )


def _is_short(specs: Sequence[ValueSpec]) -> bool:
    return len(specs) <= _SHORT


def _row(spec: ValueSpec) -> tuple[str, str, str]:
    if spec.kind != "tensor" or spec.dtype is None:
        return spec.name, spec.kind, ""
    dims = "unknown" if spec.shape is None else " × ".join("?" if d is None else str(d) for d in spec.shape)
    return spec.name, spec.dtype.name, dims or "scalar"


# -- rows ----------------------------------------------------------------------------------------------------


def strip(rows: Sequence[float] | None) -> Iterator[Figure]:
    """Yield the rows of the batch, cut into chunks; nothing where no input is cut."""
    if not rows:
        return
    known = [count for count in rows if count == count]
    total = sum(known) or 1
    shapes = [
        rect(0, 0, _STRIP_W, _STRIP_H, "ff-0", opacity=0.25),
        rect(0, 0, _STRIP_W, _STRIP_H, "ff-outline"),
    ]
    if len(known) == len(rows):
        ends = [round(_STRIP_H * end / total, 1) for end in accumulate(known)]
        every = ceil(len(ends) / _LINES)
        shapes += [line(0, y, _STRIP_W, y, "ff-edge") for y in ends[every - 1 : -1 : every]]
    largest = f"{max(known):,}" if known else "?"
    told = f"{sum(known):,} rows" if len(known) == len(rows) else "rows not known"
    label = f"{told} in {len(rows):,} chunk{'s' if len(rows) != 1 else ''} of up to {largest}"
    yield label, drawing(_STRIP_W, _STRIP_H, shapes, label=label)


# -- bundles -------------------------------------------------------------------------------------------------


def graph(bundles: Sequence[Bundle], engine_of: EngineOf) -> Figure:
    """Return the bundles of one chunk as boxes with their edges, or as a profile where they are many."""
    depths = _depths(bundles)
    wide = Counter(depths)
    if len(wide) <= _DEEPEST and max(wide.values(), default=0) <= _WIDEST:
        return _boxed(bundles, depths, engine_of)
    return _profile(bundles, wide)


def _engine(opened: PreparedModel, bundle: Bundle) -> str:
    """Return the first engine of a bundle."""
    return next(iter(engines_of(opened, bundle)), "")


def _depths(bundles: Sequence[Bundle]) -> Depths:
    """Return the number of bundles before each one on the longest chain; they are in topological order."""
    depths: list[int] = []
    for bundle in bundles:
        before = [depths[source.bundle] for source in bundle.sources if source.bundle != MODEL_INPUT]
        depths.append(1 + max(before, default=-1))
    return depths


def _boxed(bundles: Sequence[Bundle], depths: Depths, engine_of: EngineOf) -> Figure:
    """Return each bundle as a box, filled by its share of the time, of its engine's colour."""
    places: list[tuple[float, float]] = []
    rows: Counter[int] = Counter()
    for depth in depths:
        places.append((depth * _STEP_X + 1, rows[depth] * _STEP_Y + 1))
        rows[depth] += 1
    longest = max((bundle.seconds for bundle in bundles), default=0.0) or 1.0
    shapes = [*_edges(bundles, places)]
    for number, (bundle, (x, y)) in enumerate(zip(bundles, places, strict=True)):
        engine = engine_of(bundle)
        fill = 0.2 + 0.5 * bundle.seconds / longest
        shapes += [
            rect(
                x,
                y,
                _BOX_W,
                _BOX_H,
                _ENGINES.get(engine, "ff-5"),
                title=_told(number, bundle, engine),
                opacity=fill,
            ),
            words(x + _BOX_W / 2, y + 17, _name(bundle), anchor="middle", most=14),
        ]
    width = (max(depths, default=0)) * _STEP_X + _BOX_W + 2
    height = (max(rows.values(), default=1) - 1) * _STEP_Y + _BOX_H + 2
    label = f"{len(bundles)} bundle{'s' if len(bundles) != 1 else ''} of a chunk"
    return label, drawing(width, height, shapes, label=label)


def _edges(bundles: Sequence[Bundle], places: Sequence[tuple[float, float]]) -> Iterator[Markup]:
    for (x, y), bundle in zip(places, bundles, strict=True):
        for source in dict.fromkeys(s.bundle for s in bundle.sources if s.bundle != MODEL_INPUT):
            left, top = places[source]
            yield curve(left + _BOX_W, top + _BOX_H / 2, x, y + _BOX_H / 2)


def _name(bundle: Bundle) -> str:
    op = bundle.ops.most_common(1)[0][0] if bundle.ops else "values"
    others = len(bundle.nodes) - 1
    return f"{op} +{others}" if others > 0 else op


def _told(number: int, bundle: Bundle, engine: str) -> str:
    ops = ", ".join(f"{n} {op}" for op, n in bundle.ops.most_common(_HUES))
    costs = f"{quantity(bundle.flops, 'FLOP')}, {quantity(bundle.bytes, 'B')}, {duration(bundle.seconds)}"
    return f"bundle {number}: {ops}; {costs}; {engine}"


def _profile(bundles: Sequence[Bundle], wide: Mapping[int, int]) -> Figure:
    """Return the number of bundles at each depth as bars: the parallelism of a graph that is too large for boxes."""
    deep = max(wide) + 1
    each = ceil(deep / _BARS)
    highs = [0] * ceil(deep / each)
    for depth, number in wide.items():
        highs[depth // each] = max(highs[depth // each], number)
    step, top = _PROFILE_W / len(highs), max(highs)
    cells = [
        (i * step, _PROFILE_H * (1 - high / top), max(step - 1, 1), _PROFILE_H * high / top)
        for i, high in enumerate(highs)
    ]
    shapes = [boxes("ff-0", cells, opacity=0.7), line(0, _PROFILE_H, _PROFILE_W, _PROFILE_H)]
    label = f"{len(bundles):,} bundles of a chunk by depth: {deep:,} deep, at most {top:,} side by side"
    return label, drawing(_PROFILE_W, _PROFILE_H + 1, shapes, label=label)


def _costliest(bundles: Sequence[Bundle], opened: PreparedModel) -> CardTable:
    order = sorted(range(len(bundles)), key=lambda i: (-bundles[i].seconds, i))[:_COSTLIEST]
    rows = [_cost_row(number, bundles[number], opened) for number in order]
    columns = ("bundle", "operators", "engines", "nodes", "FLOP", "bytes", "seconds")
    title = "bundles, the costliest first" if len(bundles) > 1 else "bundles"
    return CardTable(title, columns, rows, left=3, number=len(bundles))


def _cost_row(number: int, bundle: Bundle, opened: PreparedModel) -> tuple[str, ...]:
    ops = ", ".join(f"{n} {op}" for op, n in bundle.ops.most_common(_HUES))
    more = ", …" if len(bundle.ops) > _HUES else ""
    engines = ", ".join(engines_of(opened, bundle))
    costs = quantity(bundle.flops, ""), quantity(bundle.bytes, "B"), duration(bundle.seconds)
    return str(number), ops + more, engines, f"{len(bundle.nodes):,}", *costs


def _ops(ops: Counter[str]) -> Figure:
    """Return the operator types as one bar, by their numbers of nodes."""
    total = ops.total() or 1
    common: Iterable[tuple[str, int]] = ops.most_common(_HUES)
    parts = [(f"ff-{i}", n / total, f"{n:,} {op}") for i, (op, n) in enumerate(common)]
    others = total - sum(n for _, n in ops.most_common(_HUES)) if ops else 0
    parts += [("ff-other", others / total, f"{others:,} others")] if others else []
    return "; ".join(title for _, _, title in parts), share_bar(parts)
