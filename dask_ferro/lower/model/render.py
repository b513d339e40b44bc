"""The facts of a model that its text and its card in a notebook show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

from dask_ferro.engines.selection import route
from dask_ferro.graph.bundling.plan import Bundle
from dask_ferro.lower.inputs.tables import described
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.words import count, size

_OPS_SHOWN = 6
# A label and its text, shown as one line or one row of a table.
Fact = tuple[str, str]


def facts(opened: PreparedModel, ops: Counter[str], planned: Callable[[], Sequence[Bundle]]) -> list[Fact]:
    """Return the facts that both forms show.

    Parameters
    ----------
    planned : callable
        Returns the bundles of the model on inputs of its own; it raises where there are none.
    """
    common = ", ".join(f"{n} {op}" for op, n in ops.most_common(_OPS_SHOWN))
    more = len(ops) - _OPS_SHOWN
    sig = opened.signature
    return [
        ("inputs", "; ".join(map(str, sig.inputs)) or "none"),
        ("outputs", "; ".join(map(str, sig.outputs))),
        ("tables", described(sig)),
        ("ops", f"{sum(ops.values())} ({common}{f', {more} more kinds' if more > 0 else ''})"),
        *_planned(opened, planned),
        ("weights", _weights(opened)),
    ]


def _weights(opened: PreparedModel) -> str:
    tensors = [value.const_value for value in opened.loaded.model.graph.initializers.values()]
    parameters = sum(tensor.size for tensor in tensors if tensor is not None)
    return f"{size(opened.loaded.weight_bytes)}, {parameters:,} parameters in {len(tensors):,} tensors"


def _planned(opened: PreparedModel, planned: Callable[[], Sequence[Bundle]]) -> list[Fact]:
    """Return the facts of the plan; of a model that cannot be planned yet a reason, as a repr must not raise."""
    try:
        bundles = planned()
    except Exception:  # noqa: BLE001 - whatever it is, computing it raises it again
        return [("bundles", "known once it has its inputs")]
    flops, moved = sum(b.flops for b in bundles), sum(b.bytes for b in bundles)
    engines: Counter[str] = Counter()
    for engine, nodes in chain.from_iterable(route(opened.support, bundle.nodes) for bundle in bundles):
        engines[engine] += nodes
    listed = ", ".join(f"{nodes:,} by {engine}" for engine, nodes in engines.most_common())
    return [
        ("bundles", f"{len(bundles)}"),
        ("engines", listed),
        ("projected", f"{count(flops, 'FLOP')}, {size(moved)} moved, a chunk"),
    ]


def as_text(name: str, facts: Sequence[Fact]) -> str:
    """Return the facts as indented lines."""
    lines = "".join(f"\n  {label:<10}{text}" for label, text in facts)
    return f"<ModelGraph {name!r}{lines}>"
