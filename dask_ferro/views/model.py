"""A model in a notebook: its facts as a table, and the bundles of a chunk as a drawing.

    ┌──────────┐     ┌──────────┐        columns: bundles that wait for those to their left
    │ Conv +2  │─────│ Gemm     │        shade: the bundle's share of the time
    └──────────┘     └──────────┘

More bundles than can be read are told in a line.  Lines and text have the colour of the page, which may be light or
dark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from dask_ferro import notebook
from dask_ferro.graph.bundling.plan import MODEL_INPUT, Bundle
from dask_ferro.lower.model.render import Fact
from dask_ferro.words import count, duration, size

# The largest graph that is drawn bundle by bundle, and the size of a box and of its place.
_DEEPEST, _WIDEST = 9, 7
_BOX_W, _BOX_H, _STEP_X, _STEP_Y = 92, 26, 122, 36
# Readable under black and white text.
_BLUE = "#4a7fb5"
# Operator types in the tip of a box, and characters of a name in it.
_OPS, _NAME = 5, 14


def card(name: str, facts: Sequence[Fact], bundles: Sequence[Bundle]) -> str:
    """Return the HTML of a model; without bundles, of one that is not planned yet, there is no drawing."""
    return notebook.table(f"Model {name}", facts) + (_drawing(bundles) if bundles else "")


def _drawing(bundles: Sequence[Bundle]) -> str:
    depths = _depths(bundles)
    sizes = Counter(depths)
    deep, wide = len(sizes), max(sizes.values())
    label = f"{len(bundles):,} bundles of a chunk: {deep:,} deep, at most {wide:,} side by side"
    caption = f"<figcaption>{label}</figcaption>"
    if deep > _DEEPEST or wide > _WIDEST:
        return f"<figure>{caption}</figure>"
    width, height = (deep - 1) * _STEP_X + _BOX_W + 2, wide * _STEP_Y
    svg = f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" style="max-width:100%" role="img"'
    shapes = "".join(_boxes(bundles, depths))
    return f'<figure>{svg} aria-label="{label}">{shapes}</svg>{caption}</figure>'


def _depths(bundles: Sequence[Bundle]) -> Sequence[int]:
    """Return the number of bundles before each one on the longest chain; they are in topological order."""
    depths: list[int] = []
    for bundle in bundles:
        before = [depths[source.bundle] for source in bundle.sources if source.bundle != MODEL_INPUT]
        depths.append(1 + max(before, default=-1))
    return depths


def _boxes(bundles: Sequence[Bundle], depths: Sequence[int]) -> Iterator[str]:
    places: list[tuple[int, int]] = []
    rows: Counter[int] = Counter()
    longest = max(bundle.seconds for bundle in bundles) or 1.0
    for bundle, depth in zip(bundles, depths, strict=True):
        x, y = depth * _STEP_X + 1, rows[depth] * _STEP_Y + 1
        rows[depth] += 1
        for source in dict.fromkeys(s.bundle for s in bundle.sources if s.bundle != MODEL_INPUT):
            left, top = places[source][0] + _BOX_W, places[source][1] + _BOX_H // 2
            bends = f"C{left + 15} {top} {x - 15} {y + _BOX_H // 2}"
            yield f'<path d="M{left} {top}{bends} {x} {y + _BOX_H // 2}" fill="none" stroke="currentColor"/>'
        places.append((x, y))
        shade = 0.2 + 0.5 * bundle.seconds / longest
        box = f'<rect x="{x}" y="{y}" width="{_BOX_W}" height="{_BOX_H}" fill="{_BLUE}" fill-opacity="{shade:.2f}">'
        yield f"{box}<title>{escape(_tip(bundle))}</title></rect>"
        words = f'<text x="{x + _BOX_W // 2}" y="{y + 17}" text-anchor="middle" font-size="11" fill="currentColor"'
        yield f"{words}>{escape(_name(bundle)[:_NAME])}</text>"


def _name(bundle: Bundle) -> str:
    op = bundle.ops.most_common(1)[0][0] if bundle.ops else "values"
    others = len(bundle.nodes) - 1
    return f"{op} +{others}" if others > 0 else op


def _tip(bundle: Bundle) -> str:
    ops = ", ".join(f"{n} {op}" for op, n in bundle.ops.most_common(_OPS))
    costs = f"{count(bundle.flops, 'FLOP')}, {size(bundle.bytes)}, {duration(bundle.seconds)}"
    return f"{ops}; {costs} projected"
