"""Operators that read or write by index, or find elements by their value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.facts import BY_NUMBER, UNKNOWN_TO_KEEP, OpFacts, per_input
from dask_ferro.graph.ops.families.reductions import sort_flops
from dask_ferro.graph.ops.labels import REDUCTIONS, Dims, Rule, TypedNode, all_but, mask_dims, names
from dask_ferro.graph.ops.states import Counts, Depends, Finding, Rows, State

# A suppression compares each box with about 100 that it keeps in a class; 16 FLOPs intersect two.
_SUPPRESSION = 1600.0


def _scatter_flops(o: Operands) -> float:
    return float(o.size(2)) if str(o.attribute("reduction", "none")) != "none" else 0.0


# Labels.


def _gather(o: TypedNode) -> Rule:
    """The dimensions of the data that are not picked from, and the dimensions of the indices."""
    axis, dims = o.axis(0), names(o.rank())
    picks: Dims = tuple(f"i{k}" for k in range(o.rank(1)))
    out = (*dims[:axis], *picks, *dims[axis + 1 :])
    return Rule((mask_dims(dims, (axis,)), picks), (out,), linear=((0,),), commutes=REDUCTIONS)


def _gather_elements(o: TypedNode) -> Rule:
    """The dimensions except `axis` that the indices cover completely."""
    # No engine accepts indices of another rank, and `strict` would fail before the engine does.
    partly = [i for i, (a, b) in enumerate(zip(o.shape(0), o.shape(1), strict=False)) if a != b]
    dims = mask_dims(names(o.rank()), (o.axis(0), *partly))
    return Rule((dims, dims), (dims,), linear=((0,),), commutes=REDUCTIONS)


def _gather_nd(o: TypedNode) -> Rule:
    """The dimensions that data and indices share, and the dimensions of the indices."""
    shared, dims = int(o.attribute("batch_dims", 0)), names(o.rank())
    picks = tuple(f"i{k}" for k in range(shared, o.rank(1) - 1))
    width = o.shape(1)[-1]
    rest = dims[shared + width :]
    data = (*dims[:shared], *(None,) * width, *rest)
    return Rule((data, (*dims[:shared], *picks, None)), ((*dims[:shared], *picks, *rest),))


def _linear_inputs(o: TypedNode) -> tuple[tuple[int, ...], ...]:
    """Return the inputs in which a scatter is linear: data and updates, if it writes or adds."""
    return ((0, 2),) if str(o.attribute("reduction", "none")) in ("none", "add") else ()


def _scatter_elements(o: TypedNode) -> Rule:
    dims = _gather_elements(o).inputs[0]
    return Rule((dims, dims, dims), (dims,), linear=_linear_inputs(o))


def _scatter_nd(o: TypedNode) -> Rule:
    """The dimensions of the slices that are written."""
    picked = o.shape(1)[-1]
    dims = mask_dims(names(o.rank()), range(picked))
    updates = (*(None,) * (o.rank(1) - 1), *dims[picked:])
    return Rule((dims, (), updates), (dims,), linear=_linear_inputs(o))


def _cache_update(o: TypedNode) -> Rule:
    """All dimensions except `axis`; each sample of the batch begins to write at a place of its own."""
    dims = mask_dims(names(o.rank()), (o.axis(-2),))
    return Rule((dims, dims, dims[:1]), (dims,), linear=((0, 1),), commutes=REDUCTIONS)


def _one_hot(o: TypedNode) -> Rule:
    dims = names(o.rank())
    axis = int(o.attribute("axis", -1)) % (o.rank() + 1)
    return Rule((dims,), ((*dims[:axis], None, *dims[axis:]),))


# Rows of a batch.


def _compress_rows(o: TypedNode, states: Sequence[State], rows: int) -> Finding:
    """The number of rows shows whether rows vanish on their own."""
    data, picks = states
    flat = "axis" not in o.node.attributes
    along = isinstance(data, Rows) and bool(o.rank()) and o.axis(0) == data.dim
    return Finding(True, BY_NUMBER) if flat or along != isinstance(picks, Rows) else UNKNOWN_TO_KEEP


def _gather_sizes(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    first, picked = elements[0], o.constant(1)
    if first is None or picked is None or not all(-len(first) <= i < len(first) for i in picked):
        return Counts(None)
    return Counts(tuple(first[i] for i in picked))


# A chunk counts its own rows.
_COUNTS_ROWS = "numbers the rows of a chunk from 0"

TABLE: Mapping[str, OpFacts] = {
    "Gather": OpFacts(0, "picked", labels=_gather, sizes=_gather_sizes),
    "GatherElements": OpFacts(0, "picked", labels=_gather_elements),
    "GatherND": OpFacts(0, "picked", labels=_gather_nd),
    "Scatter": OpFacts(_scatter_flops),
    "ScatterElements": OpFacts(_scatter_flops, labels=_scatter_elements),
    "ScatterND": OpFacts(_scatter_flops, labels=_scatter_nd),
    "TensorScatter": OpFacts(0, labels=_cache_update),
    "OneHot": OpFacts(0, labels=_one_hot),
    "Compress": OpFacts(
        0,
        labels=all_but(lambda o: (o.axis(0),) if "axis" in o.node.attributes else None),
        row_states=_compress_rows,
    ),
    "NonZero": OpFacts(per_input(1), combines=_COUNTS_ROWS),
    "NonMaxSuppression": OpFacts(lambda o: _SUPPRESSION * o.size(1), combines=_COUNTS_ROWS),
    "Unique": OpFacts(sort_flops, combines="compares them with each other"),
}
