"""What a model looks like in a terminal and in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dask_ferro.lower.model.collection import ModelGraph

_OPS_SHOWN = 6


def quantity(value: float, unit: str) -> str:
    """Return a number with an SI prefix.

    >>> quantity(2.5e9, "FLOP"), quantity(12, "B")
    ('2.5 GFLOP', '12 B')
    """
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def rows(model: ModelGraph) -> list[tuple[str, str]]:
    """Return the facts that both forms show, as label and text."""
    common = ", ".join(f"{n} {op}" for op, n in model.ops.most_common(_OPS_SHOWN))
    more = len(model.ops) - _OPS_SHOWN
    sig = model._opened.signature
    return [
        ("inputs", "; ".join(map(str, sig.inputs)) or "none"),
        ("outputs", "; ".join(map(str, sig.outputs))),
        ("ops", f"{sum(model.ops.values())} ({common}{f', {more} more kinds' if more > 0 else ''})"),
        *_planned(model),
        ("weights", quantity(model._opened.loaded.weight_bytes, "B")),
    ]


def _planned(model: ModelGraph) -> list[tuple[str, str]]:
    """What the plan says; a model that cannot be planned yet says so, as nobody wants an error of a repr."""
    try:
        bundles, chunks = len(model.bundles), model.chunks
        cost = f"{quantity(model.flops, 'FLOP')}, {quantity(model.bytes, 'B')} moved, a chunk"
    except Exception as error:  # noqa: BLE001 - whatever it is, computing it raises it again
        if model._arrays is not None:
            return [("bundles", f"not known: {error}")]
        return [("bundles", "known once it has its inputs")]
    return [("bundles", f"{bundles} x {chunks} chunk{'s' if chunks != 1 else ''}"), ("projected", cost)]


def as_text(model: ModelGraph) -> str:
    """Return the facts as indented lines."""
    lines = "".join(f"\n  {label:<10}{text}" for label, text in rows(model))
    return f"<ModelGraph {model.name!r}{lines}>"


def as_html(model: ModelGraph) -> str:
    """Return the facts as a small table."""
    cells = "".join(
        f'<tr><th style="text-align:left">{label}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for label, text in rows(model)
    )
    return f"<table><caption><b>{escape(model.name)}</b></caption><tbody>{cells}</tbody></table>"
