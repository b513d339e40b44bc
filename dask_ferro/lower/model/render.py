"""List the facts of a model that its text and its card in a notebook show, as labels and texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from dask_ferro.engines.selection import route
from dask_ferro.graph.bundling.plan import Bundle
from dask_ferro.lower.inputs.tables import describe_columns
from dask_ferro.lower.preparation.model import PreparedModel
from dask_ferro.words import count, limit_texts, size

_OPS_SHOWN = 6
# A label and its text, shown as one line or one row of a table.
Fact = tuple[str, str]


def facts_of(opened: PreparedModel, ops: Counter[str], bundles: Sequence[Bundle]) -> list[Fact]:
    """Return the facts that both forms show; without bundles, the model cannot be planned yet."""
    common = ", ".join(limit_texts(_OPS_SHOWN, [f"{n} {op}" for op, n in ops.most_common()], before="and "))
    sig = opened.signature
    return [
        ("inputs", "; ".join(map(str, sig.inputs)) or "none"),
        ("outputs", "; ".join(map(str, sig.outputs))),
        ("tables", describe_columns(sig)),
        ("ops", f"{sum(ops.values())} ({common})"),
        *_plan_facts(opened, bundles),
        ("weights", _weights(opened)),
    ]


def _weights(opened: PreparedModel) -> str:
    tensors = [value.const_value for value in opened.loaded.model.graph.initializers.values()]
    parameters = sum(tensor.size for tensor in tensors if tensor is not None)
    return f"{size(opened.loaded.weight_bytes)}, {parameters:,} parameters in {len(tensors):,} tensors"


def _plan_facts(opened: PreparedModel, bundles: Sequence[Bundle]) -> list[Fact]:
    if not bundles:
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
