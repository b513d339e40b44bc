"""The facts of a model that its text and its card in a notebook show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dask_ferro.engines.selection import route
from dask_ferro.graph.bundling.plan import Bundle
from dask_ferro.lower.inputs.tables import described
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.words import count, many, size

_OPS_SHOWN = 6
# A label and its text, shown as one line or one row of a table.
Fact = tuple[str, str]


class Planned(NamedTuple):
    """The bundles of a chunk, and the number of chunks."""

    bundles: tuple[Bundle, ...]
    chunks: int


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
        *_planned(opened, planned, has_inputs),
        ("weights", _weights(opened)),
    ]


def _weights(opened: PreparedModel) -> str:
    tensors = [value.const_value for value in opened.loaded.model.graph.initializers.values()]
    parameters = sum(tensor.size for tensor in tensors if tensor is not None)
    return f"{size(opened.loaded.weight_bytes)}, {parameters:,} parameters in {len(tensors):,} tensors"


def engines_of(opened: PreparedModel, bundle: Bundle) -> Counter[str]:
    """Return how many nodes of a bundle each engine computes, as they are routed ahead of time."""
    counts: Counter[str] = Counter()
    for engine, nodes in route(opened.support, bundle.nodes):
        counts[engine] += nodes
    return counts


def _planned(opened: PreparedModel, planned: Callable[[], Planned], has_inputs: bool) -> list[Fact]:
    """Return the facts of the plan; a model that cannot be planned yet gives a reason, as a repr must not raise."""
    try:
        plan = planned()
    except Exception as error:  # noqa: BLE001 - whatever it is, computing it raises it again
        return [("bundles", f"not known: {error}" if has_inputs else "known once it has its inputs")]
    flops, moved = sum(b.flops for b in plan.bundles), sum(b.bytes for b in plan.bundles)
    cost = f"{count(flops, 'FLOP')}, {size(moved)} moved, a chunk"
    engines: Counter[str] = Counter()
    for bundle in plan.bundles:
        engines += engines_of(opened, bundle)
    told = ", ".join(f"{nodes:,} by {engine}" for engine, nodes in engines.most_common())
    return [
        ("bundles", f"{len(plan.bundles)} x {many(plan.chunks, 'chunk')}"),
        ("engines", told),
        ("projected", cost),
    ]


def as_text(name: str, facts: Sequence[Fact]) -> str:
    """Return the facts as indented lines."""
    lines = "".join(f"\n  {label:<10}{text}" for label, text in facts)
    return f"<ModelGraph {name!r}{lines}>"
