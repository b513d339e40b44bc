"""Rows of the placement table for what moves data: other shapes, other orders, parts, and picks by index.

None of them computes, so most let a Partial value through, whatever its reduction.  Each function reads the
shapes and attributes of a node and returns its `Rule`, or None where the node has to be computed whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.graph.sharding.placements import REDUCTIONS, Dims, Row, Rule, Site, aligned, names, without

# Other shapes and orders.


def _transposed(o: Site) -> Rule:
    dims = names(o.rank())
    order = o.attribute("perm", range(o.rank())[::-1])
    return Rule((dims,), (tuple(dims[i] for i in order),), linear=((0,),), commutes=REDUCTIONS)


def _reshaped(o: Site) -> Rule:
    before, after = regrouped(o.shape(0), o.out_shape())
    shape = 1 if o.node.op_type == "Reshape" else None
    return Rule((before,), (after,), linear=((0,),), commutes=REDUCTIONS, shape=shape)


def regrouped(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims]:
    """Return the labels of a reshape: the first dimensions of runs with one product are split together.

    Equal parts of the first dimension of a run are equal parts of its elements in order, so the same parts
    lie along the first dimension of the run that it becomes.

    Examples
    --------
    >>> regrouped((4, 6, 8), (24, 2, 4))
    (('0', None, '1'), ('0', '1', None))
    """
    labels: tuple[list[str | None], ...] = ([None] * len(before), [None] * len(after))
    if 0 in before:
        return tuple(labels[0]), tuple(labels[1])
    left, right = ([i for i, size in enumerate(shape) if size != 1] for shape in (before, after))
    i = j = run = 0
    while i < len(left) and j < len(right):
        labels[0][left[i]] = labels[1][right[j]] = str(run)
        a, b, run = before[left[i]], after[right[j]], run + 1
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * before[left[i]], i + 1
            else:
                b, j = b * after[right[j]], j + 1
    return tuple(labels[0]), tuple(labels[1])


def _expanded(o: Site) -> Rule:
    out = o.out_shape()
    made = aligned(o.shape(0), out)
    kept = (None,) * (len(out) - len(made)) + made
    return Rule((made,), (kept,), linear=((0,),), commutes=REDUCTIONS, shape=1)


def _same(*linear: tuple[int, ...]) -> Row:
    """Make a row: each dimension of the operands, which broadcast, and of the result."""

    def row(o: Site) -> Rule:
        out = o.out_shape()
        inputs = tuple(aligned(o.shape(i), out) for i in range(len(o.node.inputs)))
        return Rule(inputs, (names(len(out)),), linear=linear, commutes=REDUCTIONS)

    return row


def _batch(o: Site) -> Rule:
    """DepthToSpace and SpaceToDepth."""
    dims = without(names(o.rank()), range(1, o.rank()))
    return Rule((dims,), (dims,), linear=((0,),), commutes=REDUCTIONS)


def _stack(o: Site) -> Rule:
    """Trilu: all but the matrix.  Zeros fill in, so what is Partial has to be a sum."""
    dims = without(names(o.rank()), range(o.rank() - 2, o.rank()))
    return Rule((dims,), (dims,), linear=((0,),))


# Parts.


def _joined(o: Site) -> Rule:
    count = len(o.node.inputs)
    dims = without(names(o.rank()), (o.axis(0),))
    return Rule((dims,) * count, (dims,), linear=(tuple(range(count)),), commutes=REDUCTIONS)


def _divided(o: Site) -> Rule:
    dims = without(names(o.rank()), (o.axis(0),))
    return Rule((dims,), (dims,) * len(o.node.outputs), linear=((0,),), commutes=REDUCTIONS)


def _sliced(o: Site) -> Rule | None:
    """All dimensions that are not cut."""
    if o.has(3):
        cut = o.constant(3)
    elif o.rank(1):
        cut = tuple(range(o.size(1)))
    else:  # up to opset 9 everything is an attribute
        cut = tuple(o.attribute("axes", range(len(o.attribute("starts", ())))))
    if cut is None:
        return None
    dims = without(names(o.rank()), [axis % o.rank() for axis in cut])
    return Rule((dims,), (dims,), linear=((0,),), commutes=REDUCTIONS)


def _padded(o: Site) -> Rule | None:
    """The dimensions that keep their size; one that is cut and filled by as much is not among them."""
    if o.has(1):
        given, axes = o.constant(1), o.constant(3) if o.has(3) else tuple(range(o.rank()))
    else:
        given, axes = tuple(o.attribute("pads", ())), tuple(range(o.rank()))
    if given is None or axes is None or len(given) != 2 * len(axes):
        return None
    count = len(axes)
    filled = [axis % o.rank() for i, axis in enumerate(axes) if given[i] or given[count + i]]
    dims = without(names(o.rank()), filled)
    plain = (
        str(o.attribute("mode", "constant")) == "constant" and not o.has(2) and not o.attribute("value", 0.0)
    )
    return Rule((dims,), (dims,), linear=((0,),) if plain else ())


def _tiled(o: Site) -> Rule:
    """The dimensions that are not repeated."""
    repeated = [i for i, (a, b) in enumerate(zip(o.shape(0), o.out_shape(), strict=True)) if a != b]
    dims = without(names(o.rank()), repeated)
    return Rule((dims,), (dims,), linear=((0,),), commutes=REDUCTIONS)


# Picks by index.


def _gathered(o: Site) -> Rule:
    """The dimensions of the data that are not picked from, and those of the indices."""
    axis, dims = o.axis(0), names(o.rank())
    picks: Dims = tuple(f"i{k}" for k in range(o.rank(1)))
    out = (*dims[:axis], *picks, *dims[axis + 1 :])
    return Rule((without(dims, (axis,)), picks), (out,), linear=((0,),), commutes=REDUCTIONS)


def _gathered_elements(o: Site) -> Rule:
    """The dimensions beside `axis` that the indices run through wholly."""
    partly = [i for i, (a, b) in enumerate(zip(o.shape(0), o.shape(1), strict=True)) if a != b]
    dims = without(names(o.rank()), (o.axis(0), *partly))
    return Rule((dims, dims), (dims,), linear=((0,),), commutes=REDUCTIONS)


def _scattered_elements(o: Site) -> Rule:
    found = _gathered_elements(o)
    added = str(o.attribute("reduction", "none")) in ("none", "add")
    dims = found.inputs[0]
    return Rule((dims, dims, dims), (dims,), linear=((0, 2),) if added else ())


def _scattered_slices(o: Site) -> Rule:
    """The dimensions of the slices that are written."""
    picked = o.shape(1)[-1]
    dims = without(names(o.rank()), range(picked))
    updates = (*(None,) * (o.rank(1) - 1), *dims[picked:])
    added = str(o.attribute("reduction", "none")) in ("none", "add")
    return Rule((dims, (), updates), (dims,), linear=((0, 2),) if added else ())


def _one_hot(o: Site) -> Rule:
    dims = names(o.rank())
    axis = int(o.attribute("axis", -1)) % (o.rank() + 1)
    return Rule((dims,), ((*dims[:axis], None, *dims[axis:]),))


def _rows(row: Row, kinds: str) -> dict[str, Row]:
    return dict.fromkeys(kinds.split(), row)


TABLE: Mapping[str, Row] = {
    "Transpose": _transposed,
    **_rows(_reshaped, "Reshape Flatten Squeeze Unsqueeze"),
    "Expand": _expanded,
    "Identity": _same((0,)),
    "Where": _same((1, 2)),
    **_rows(_batch, "DepthToSpace SpaceToDepth"),
    "Trilu": _stack,
    "Concat": _joined,
    "Split": _divided,
    "Slice": _sliced,
    "Pad": _padded,
    "Tile": _tiled,
    "Gather": _gathered,
    "GatherElements": _gathered_elements,
    "ScatterElements": _scattered_elements,
    "ScatterND": _scattered_slices,
    "OneHot": _one_hot,
}
