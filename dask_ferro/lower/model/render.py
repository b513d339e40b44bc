"""Text and HTML of a model, for a terminal and for a notebook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from dask_ferro.lower.inputs.tables import described
from dask_ferro.lower.prepared.prepared import PreparedModel

_OPS_SHOWN = 6
# A label and its text, shown as one line or one row of a table.
Fact = tuple[str, str]


class Planned(NamedTuple):
    """Figures of a plan: bundles of a chunk, chunks, and FLOPs and bytes of a chunk."""

    bundles: int
    chunks: int
    flops: float
    nbytes: float


def quantity(value: float, unit: str) -> str:
    """Return a number with an SI prefix.

    >>> quantity(2.5e9, "FLOP"), quantity(12, "B")
    ('2.5 GFLOP', '12 B')
    """
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def facts(
    opened: PreparedModel, ops: Counter[str], planned: Callable[[], Planned], *, has_inputs: bool
) -> list[Fact]:
    """Return the facts that both forms show.

    Parameters
    ----------
    planned : callable
        Plans the model; where it raises, the facts say why.
    has_inputs : bool
        Whether the model has its inputs, so that it should be possible to plan it.
    """
    common = ", ".join(f"{n} {op}" for op, n in ops.most_common(_OPS_SHOWN))
    more = len(ops) - _OPS_SHOWN
    sig = opened.signature
    return [
        ("inputs", "; ".join(map(str, sig.inputs)) or "none"),
        ("outputs", "; ".join(map(str, sig.outputs))),
        ("tables", described(sig)),
        ("ops", f"{sum(ops.values())} ({common}{f', {more} more kinds' if more > 0 else ''})"),
        *_planned(planned, has_inputs),
        ("weights", quantity(opened.loaded.weight_bytes, "B")),
    ]


def _planned(planned: Callable[[], Planned], has_inputs: bool) -> list[Fact]:
    """Return the facts of the plan; a model that cannot be planned yet gives a reason, as a repr must not raise."""
    try:
        plan = planned()
    except Exception as error:  # noqa: BLE001 - whatever it is, computing it raises it again
        return [("bundles", f"not known: {error}" if has_inputs else "known once it has its inputs")]
    chunks = f"{plan.chunks} chunk{'s' if plan.chunks != 1 else ''}"
    cost = f"{quantity(plan.flops, 'FLOP')}, {quantity(plan.nbytes, 'B')} moved, a chunk"
    return [("bundles", f"{plan.bundles} x {chunks}"), ("projected", cost)]


def as_text(name: str, facts: Sequence[Fact]) -> str:
    """Return the facts as indented lines."""
    lines = "".join(f"\n  {label:<10}{text}" for label, text in facts)
    return f"<ModelGraph {name!r}{lines}>"


def as_html(name: str, facts: Sequence[Fact]) -> str:
    """Return the facts as a small table."""
    cells = "".join(
        f'<tr><th style="text-align:left">{label}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for label, text in facts
    )
    return f"<table><caption><b>{escape(name)}</b></caption><tbody>{cells}</tbody></table>"
