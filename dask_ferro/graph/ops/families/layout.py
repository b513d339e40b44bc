"""Operators that move data without an index: reshapes, transposes, parts and copies, control flow.

None of them computes, so most pass on a Partial value, whatever its reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from dask_ferro.graph.ir.nodes import type_of
from dask_ferro.graph.ops.facts import BY_NUMBER, UNKNOWN_TO_KEEP, OpFacts, keeps_sizes, rows_of
from dask_ferro.graph.ops.labels import REDUCTIONS, Dims, Rule, TypedNode, align, all_but, mask_dims, names
from dask_ferro.graph.ops.states import Counts, Depends, Finding, Rows, State

# Exporters write at least this number for "to the end".
_THE_END = 2**31 - 1


# Labels.

_move_rule = partial(Rule, linear=((0,),), commutes=REDUCTIONS)


def _transpose(o: TypedNode) -> Rule:
    dims = names(o.rank())
    order = o.attribute("perm", range(o.rank())[::-1])
    return _move_rule((dims,), (tuple(dims[i] for i in order),))


def _reshape(o: TypedNode) -> Rule:
    before, after = regroup(o.shape(0), o.out_shape())
    return _move_rule((before,), (after,), shape=1 if o.node.op_type == "Reshape" else None)


def regroup(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims]:
    """Return the labels of a reshape: the first dimensions of runs with one product are split together.

    Equal parts of the first dimension of a run are equal parts of its elements in order, so they are also equal parts
    of the first dimension of the resulting run.  This holds for unequal parts only if the size of that dimension
    stays.

    Examples
    --------
    >>> regroup((4, 6, 8), (24, 2, 4))
    (('0', None, '1'), ('0', '1', None))
    """
    labels: tuple[list[str | None], ...] = ([None] * len(before), [None] * len(after))
    if 0 in before:
        return tuple(labels[0]), tuple(labels[1])
    left = [i for i, size in enumerate(before) if size != 1]
    right = [i for i, size in enumerate(after) if size != 1]
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


def _expand(o: TypedNode) -> Rule:
    out = o.out_shape()
    operand = align(o.shape(0), out)
    return _move_rule((operand,), ((None,) * (len(out) - len(operand)) + operand,), shape=1)


def _concat(o: TypedNode) -> Rule:
    count = len(o.node.inputs)
    dims = mask_dims(names(o.rank()), (o.axis(0),))
    return Rule((dims,) * count, (dims,), linear=(tuple(range(count)),), commutes=REDUCTIONS)


def _pad(o: TypedNode) -> Rule | None:
    """The dimensions that keep their size; a dimension that is cut and filled by the same amount is not among them."""
    if o.has(1):
        given, axes = o.constant(1), o.constant(3) if o.has(3) else tuple(range(o.rank()))
    else:
        given, axes = tuple(o.attribute("pads", ())), tuple(range(o.rank()))
    if given is None or axes is None or len(given) != 2 * len(axes):
        return None
    count = len(axes)
    filled = [axis % o.rank() for i, axis in enumerate(axes) if given[i] or given[count + i]]
    dims = mask_dims(names(o.rank()), filled)
    plain = (
        str(o.attribute("mode", "constant")) == "constant" and not o.has(2) and not o.attribute("value", 0.0)
    )
    return Rule((dims,), (dims,), linear=((0,),) if plain else ())


def _tile(o: TypedNode) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(o.shape(0), o.out_shape(), strict=True)) if a != b]


def _reverse_sequence(o: TypedNode) -> Rule:
    time, batch = int(o.attribute("time_axis", 0)), int(o.attribute("batch_axis", 1))
    dims = mask_dims(names(o.rank()), (time,))
    return Rule((dims, (str(batch),)), (dims,))


# Rows of a batch: their positions.


def _reshape_rows(o: TypedNode, states: Sequence[State], rows: int) -> State:
    """The positions of the rows after a reshape: at the same distance in the order of elements."""
    state = states[0]
    if not isinstance(state, Rows):
        return Finding(False, "takes its shape from them")
    before, after = _known_shape(o, o.node.inputs[0]), _known_shape(o, o.node.outputs[0])
    if o.node.op_type == "Squeeze" and "axes" not in o.node.attributes and not o.has(1):
        return Finding(False, "removes the axis of the rows if there is one")
    if before is None or after is None:
        return Finding(False, "has a shape that is not known")
    return relaid(before, after, state, rows) or Finding(False, "splits them")


def _known_shape(o: TypedNode, value: object) -> tuple[int, ...] | None:
    """The shape of a value without unknown and empty dimensions."""
    shape = None if value is None else type_of(value, o.types).shape  # type: ignore[arg-type]
    sizes = tuple(d for d in shape or () if isinstance(d, int) and d)
    return sizes if shape is not None and len(sizes) == len(shape) else None


def relaid(before: Sequence[int], after: Sequence[int], state: Rows, rows: int) -> Rows | None:
    """Return the positions of rows after a reshape; None: there are none.

    Examples
    --------
    >>> relaid((8, 251, 6), (8 * 251, 6), Rows(1), 251)
    Rows(dim=0, before=8)
    >>> relaid((8 * 251, 6), (8, 251, 2, 3), Rows(0, 8), 251)
    Rows(dim=1, before=1)
    """
    outer = prod(before[: state.dim]) * state.before
    above = 1
    for dim, size in enumerate(after):
        runs, odd = divmod(outer, above)
        if not odd and size % (runs * rows) == 0:
            return Rows(dim, runs)
        above *= size
    return None


def _join_rows(o: TypedNode, states: Sequence[State], rows: int) -> State | None:
    """Several runs of all rows after one another may be taken apart again."""
    is_along = isinstance(states[0], Rows) and o.is_known and states[0].dim == o.axis(0)
    return Finding(False, "appends other rows") if is_along else None


def _slice_rows(o: TypedNode, states: Sequence[State], rows: int) -> State | None:
    """The positions of the rows after a Slice of other axes, or of all rows in order, whatever their number.

    A shorter probe may hide a cut: only an end of `_THE_END` means the end.
    """
    state, (starts, ends, axes, steps) = states[0], _cuts(o)
    if not isinstance(state, Rows) or not o.rank() or axes is None:
        return UNKNOWN_TO_KEEP
    places = [axis % o.rank() for axis in axes]
    if state.dim not in places:
        return state
    if starts is None or ends is None or steps is None:
        return UNKNOWN_TO_KEEP
    place = places.index(state.dim)
    is_from_first = starts[place] == 0 or starts[place] <= -_THE_END
    is_whole = is_from_first and ends[place] >= _THE_END and steps[place] == 1
    return state if is_whole else Finding(True, BY_NUMBER)


def _cuts(o: TypedNode) -> list[tuple[int, ...] | None]:
    """Return the starts, ends, axes and steps of a Slice, attributes up to opset 9; None: not known ahead."""
    if not o.has(1):
        starts, ends = (tuple(o.attribute(name, ())) for name in ("starts", "ends"))
        return [starts, ends, tuple(o.attribute("axes", range(len(starts)))), (1,) * len(starts)]
    count = o.size(1)
    axes = o.constant(3) if o.has(3) else tuple(range(count))
    return [o.constant(1), o.constant(2), axes, o.constant(4) if o.has(4) else (1,) * count]


# Sizes.


def fill_state(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    """Return the state of one value for every row, in a shape that is made of sizes."""
    depends = elements[-1]
    if depends is not None and sum(depends) == 1:
        dim, made = depends.index(True), type_of(o.node.outputs[0], o.types).shape
        if made is None or not isinstance(made[dim], int) or made[dim] == rows:
            return Rows(dim)
    return Finding(False, "makes a shape of the number of rows")


def _stretch_rows(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    """The rows that a value is repeated for, along a new axis or one of length 1."""
    state, data = fill_state(o, elements, rows), o.node.inputs[0]
    if not isinstance(state, Rows):
        return state
    shape = None if data is None else type_of(data, o.types).shape
    ahead = state.dim - len(elements[-1] or ())
    if shape is None or (-ahead <= len(shape) and shape[ahead] != 1):
        return Finding(False, "repeats data that is not per-row")
    return state


def _concat_sizes(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    known = [each for each in elements if each is not None]
    return Counts(sum(known, ()) if len(known) == len(elements) else None)


def _slice_sizes(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    starts, ends = (o.constant(1), o.constant(2)) if o.has(1) else (None, None)
    steps = o.constant(4) if o.has(4) else (1,)
    if elements[0] is None or not starts or not ends or not steps or 0 in steps or len(starts) > 1:
        return Counts(None)
    return Counts(elements[0][starts[0] : ends[0] : steps[0]])


_RESHAPE = OpFacts(0, "none", labels=_reshape, row_states=_reshape_rows, sizes=keeps_sizes)

# Labels of a node that moves elements along some dimensions.
_moves = partial(all_but, commutes=REDUCTIONS)

TABLE: Mapping[str, OpFacts] = {
    "Reshape": replace(_RESHAPE, takes_sizes="in shapes"),
    **rows_of("Flatten Squeeze Unsqueeze", _RESHAPE),
    "Transpose": OpFacts(0, labels=_transpose),
    "Expand": OpFacts(0, labels=_expand, takes_sizes="in shapes", sizes=_stretch_rows),
    **rows_of("DepthToSpace SpaceToDepth", OpFacts(0, labels=_moves(lambda o: range(1, o.rank()), (0,)))),
    # Zeros are filled in, so terms have to be terms of a sum.
    "Trilu": OpFacts(0, labels=all_but(lambda o: range(o.rank() - 2, o.rank()), (0,))),
    "Concat": OpFacts(0, labels=_concat, row_states=_join_rows, sizes=_concat_sizes),
    "Split": OpFacts(0, labels=_moves(lambda o: (o.axis(0),), (0,)), takes_sizes="perhaps"),
    "Slice": OpFacts(
        0,
        "picked",
        labels=_moves(lambda o: _cuts(o)[2], (0,)),
        row_states=_slice_rows,
        takes_sizes="perhaps",
        sizes=_slice_sizes,
    ),
    "Pad": OpFacts(0, labels=_pad),
    "Tile": OpFacts(0, labels=_moves(_tile, (0,)), sizes=_stretch_rows),
    "CenterCropPad": OpFacts(0),
    "ReverseSequence": OpFacts(0, labels=_reverse_sequence),
    **rows_of("Shape Size", OpFacts(0, "type")),
    # Control flow, sequences and optionals only move other values; bodies are priced node by node.
    **rows_of("If Loop Scan SequenceMap", OpFacts(0)),
    **rows_of("SequenceConstruct SequenceEmpty SequenceErase SequenceInsert", OpFacts(0)),
    **rows_of("SplitToSequence ConcatFromSequence", OpFacts(0)),
    "SequenceAt": OpFacts(0, "picked"),
    **rows_of("SequenceLength OptionalHasElement", OpFacts(0, "type")),
    **rows_of("Optional OptionalGetElement", OpFacts(0, "none")),
    "Gradient": OpFacts(0),  # rewritten before it runs
}
