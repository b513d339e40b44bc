"""Operators that move data without an index: reshapes, transposes, parts and copies.

None of them computes, so most let a Partial value through, whatever its reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from dask_ferro.graph.ir.nodes import type_of
from dask_ferro.graph.ops.facts import BY_NUMBER, Misplaces, OpFacts, keeps_sizes, no_flops, rows_of
from dask_ferro.graph.ops.labels import (
    REDUCTIONS,
    Dims,
    Rule,
    TypedNode,
    aligned,
    names,
    without,
)
from dask_ferro.graph.ops.states import FREE, Counts, Depends, Finding, Rows, State

# Where exporters write "to the end", they write at least this.
_THE_END = 2**31 - 1


# Labels.


def _transposed(o: TypedNode) -> Rule:
    dims = names(o.rank())
    order = o.attribute("perm", range(o.rank())[::-1])
    return Rule((dims,), (tuple(dims[i] for i in order),), linear=((0,),), commutes=REDUCTIONS)


def _reshaped(o: TypedNode) -> Rule:
    before, after = regrouped(o.shape(0), o.out_shape())
    shape = 1 if o.node.op_type == "Reshape" else None
    return Rule((before,), (after,), linear=((0,),), commutes=REDUCTIONS, shape=shape)


def regrouped(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims]:
    """Return the labels of a reshape: the first dimensions of runs with one product are split together.

    Equal parts of the first dimension of a run are equal parts of its elements in order, so the same parts
    lie along the first dimension of the run that it becomes.  Unequal ones do so only if its size stays.

    Examples
    --------
    >>> regrouped((4, 6, 8), (24, 2, 4))
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


def _expanded(o: TypedNode) -> Rule:
    out = o.out_shape()
    made = aligned(o.shape(0), out)
    kept = (None,) * (len(out) - len(made)) + made
    repeats = tuple(dim for dim, label in enumerate(kept) if label is None)
    return Rule((made,), (kept,), linear=((0,),), commutes=REDUCTIONS, shape=1, repeats=repeats)


def _blocks(o: TypedNode) -> Rule:
    """DepthToSpace and SpaceToDepth: batch."""
    dims = without(names(o.rank()), range(1, o.rank()))
    return Rule((dims,), (dims,), linear=((0,),), commutes=REDUCTIONS)


def _stack(o: TypedNode) -> Rule:
    """Trilu: all but the matrix.  It fills in zeros, so a Partial has to be a sum."""
    dims = without(names(o.rank()), range(o.rank() - 2, o.rank()))
    return Rule((dims,), (dims,), linear=((0,),))


def _joined(o: TypedNode) -> Rule:
    count = len(o.node.inputs)
    dims = without(names(o.rank()), (o.axis(0),))
    return Rule((dims,) * count, (dims,), linear=(tuple(range(count)),), commutes=REDUCTIONS)


def _divided(o: TypedNode) -> Rule:
    dims = without(names(o.rank()), (o.axis(0),))
    return Rule((dims,), (dims,) * len(o.node.outputs), linear=((0,),), commutes=REDUCTIONS)


def _sliced(o: TypedNode) -> Rule | None:
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


def _padded(o: TypedNode) -> Rule | None:
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


def _tiled(o: TypedNode) -> Rule:
    """The dimensions that are not repeated."""
    repeated = [i for i, (a, b) in enumerate(zip(o.shape(0), o.out_shape(), strict=True)) if a != b]
    dims = without(names(o.rank()), repeated)
    return Rule((dims,), (dims,), linear=((0,),), commutes=REDUCTIONS)


def _reversed_sequence(o: TypedNode) -> Rule:
    time, batch = int(o.attribute("time_axis", 0)), int(o.attribute("batch_axis", 1))
    dims = without(names(o.rank()), (time,))
    return Rule((dims, (str(batch),)), (dims,))


# Rows of a batch: how a node combines them.


def _cut_combines(o: TypedNode, position: int, dim: int) -> str:
    return BY_NUMBER if o.out_shape()[dim] != o.shape(0)[dim] else ""


def _pad_combines(o: TypedNode, position: int, dim: int) -> str:
    return "adds to them" if o.out_shape()[dim] != o.shape(0)[dim] else ""


def _order_combines(o: TypedNode, position: int, dim: int) -> str:
    return "computes with their order"


# Rows of a batch: where they lie.


def _reshaped_rows(o: TypedNode, states: Sequence[State], rows: int) -> State:
    """Where the rows lie after a reshape: at the same distance in the order of elements."""
    state = states[0]
    if not isinstance(state, Rows):
        return Finding(False, "takes its shape from them")
    before, after = _known_shape(o, o.node.inputs[0]), _known_shape(o, o.node.outputs[0])
    if o.node.op_type == "Squeeze" and "axes" not in o.node.attributes and not o.has(1):
        return Finding(False, "takes the axis of the rows away where there is one")
    if before is not None and after is not None:
        return relaid(before, after, state, rows) or Finding(False, "takes them apart")
    return _by_spelled_shape(o, states, state, before)


def _by_spelled_shape(
    o: TypedNode, states: Sequence[State], state: Rows, before: Sequence[int] | None
) -> State:
    """Where the rows lie after a reshape to a shape that only its operand tells of."""
    unknown = Finding(False, "has a shape that is not known")
    if len(states) < 2 or state != Rows(0):
        return unknown
    shape, wanted = states[1], o.constant(1)
    if isinstance(shape, Counts) and shape.depends and shape.depends[0]:
        keeps = sum(shape.depends) == 1 and shape.exact  # half of their number puts two of them together
        return state if keeps else unknown
    if wanted and wanted[0] == -1 and before is not None:
        whole = prod(before[1:])
        if 0 not in wanted and min(wanted[1:], default=1) > 0 and whole % prod(wanted[1:]):
            return Finding(True, "puts several of them together")
    # A copy of the size on axis 0.
    return state if wanted and wanted[0] == 0 else unknown


def _known_shape(o: TypedNode, value: object) -> tuple[int, ...] | None:
    """The shape of a value without unknown and empty dimensions."""
    shape = None if value is None else type_of(value, o.types).shape  # type: ignore[arg-type]
    found = tuple(d for d in shape or () if isinstance(d, int) and d)
    return found if shape is not None and len(found) == len(shape) else None


def relaid(before: Sequence[int], after: Sequence[int], state: Rows, rows: int) -> Rows | None:
    """Return where rows lie after a reshape; None: nowhere.

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


def _joined_rows(o: TypedNode, states: Sequence[State], rows: int) -> State | None:
    """Runs of all rows, one after another."""
    state = states[0]
    if not isinstance(state, Rows) or not o.is_known() or o.axis(0) != state.dim:
        return None
    parts = [s for s in states if isinstance(s, Rows)]
    runs = {o.shape(i)[s.dim] // s.before for i, s in enumerate(states) if isinstance(s, Rows)}
    if len(parts) == len(states) and len(runs) == 1 and {s.dim for s in parts} == {state.dim}:
        return Rows(state.dim, sum(s.before for s in parts))
    return Finding(False, "puts others between them")


def _divided_rows(o: TypedNode, states: Sequence[State], rows: int) -> Sequence[State] | State | None:
    """Whole runs of the rows in each part."""
    state = states[0]
    if not isinstance(state, Rows) or not o.is_known() or o.axis(0) != state.dim:
        return None
    run = o.shape(0)[state.dim] // state.before
    parts = [o.out_shape(i)[state.dim] for i in range(len(o.node.outputs))]
    if any(part % run for part in parts):
        return Finding(True, BY_NUMBER)
    return [Rows(state.dim, part // run) for part in parts]


def _tiled_rows(o: TypedNode, states: Sequence[State], rows: int) -> State | None:
    state = states[0]
    if not isinstance(state, Rows) or not o.is_known():
        return None
    times = o.out_shape()[state.dim] // o.shape(0)[state.dim]
    return Rows(state.dim, state.before * times) if times > 1 else state


def _sliced_rows(o: TypedNode, states: Sequence[State], rows: int) -> State | None:
    if not isinstance(states[0], Rows):
        return None
    whole = _takes_all(o, states[0], states[1:])
    return states[0] if whole else Finding(whole is not None, BY_NUMBER)


def _takes_all(o: TypedNode, rows: Rows, settings: Sequence[State]) -> bool | None:
    """Whether a Slice takes all rows in order, however many there are, by the states of its settings; None: not known.

    What is cut off is not seen where a probe is shorter: only an end of `_THE_END` is the end, or their number.
    """
    axes, starts, ends, steps = (
        _setting(o, position, name)
        for position, name in ((3, "axes"), (1, "starts"), (2, "ends"), (4, "steps"))
    )
    if o.has(3) and axes is None:
        return None
    if axes is None:
        axes = tuple(range(o.size(1) if o.has(1) else len(starts or ())))
    places = [axis % max(1, o.rank()) for axis in axes]
    counts = [s for s in settings if s != FREE]
    if rows.dim not in places:
        return None if counts else True
    place = places.index(rows.dim)
    if starts is None or (o.has(4) and steps is None):
        return None
    if (steps is not None and steps[place] != 1) or -_THE_END < starts[place] != 0:
        return False
    if ends is not None:
        return ends[place] >= _THE_END
    # Where rows lie once, any number of theirs that was read is the end or beyond it.
    theirs = Counts(tuple(i == place for i in range(len(axes))))
    return True if counts == [theirs] and settings[1] == theirs and rows.before == 1 else None


def _setting(o: TypedNode, position: int, name: str) -> tuple[int, ...] | None:
    """An operand of a Slice, an attribute up to opset 9; None: left out, or not known ahead."""
    return o.constant(position) if o.has(position) else tuple(o.attribute(name, ())) or None


# Rows of a batch: operands that spell sizes, where the number of rows may stand.


def lengths(
    positions: Callable[[TypedNode], Sequence[int]],
    axes_of: Callable[[TypedNode, int], Sequence[int] | None],
) -> Misplaces:
    """Return whether elements of the operands at `positions` are lengths of, or ends along, another axis.

    Parameters
    ----------
    positions : callable
        Of the node.
    axes_of : callable
        Of the node and the number of elements: the axes that these are about; None: not known.
    """

    def misplaces(o: TypedNode, position: int, depends: Depends, data: State) -> bool | None:
        if depends is None:
            return None
        if not isinstance(data, Rows) or position not in positions(o):
            return True
        axes = axes_of(o, len(depends)) if o.rank() else None
        if axes is None or len(axes) != len(depends):
            return None
        return bool(_others(axes, depends, data))

    return misplaces


def _aligned_axes(o: TypedNode, count: int) -> Sequence[int]:
    """Aligned from the back; axes that the stretched operand lacks lie before its axis 0."""
    return range(o.rank() - count, o.rank())


def _cut_axes(o: TypedNode, count: int) -> Sequence[int] | None:
    given = o.constant(3) if o.has(3) else tuple(range(count))
    return None if given is None else tuple(axis % o.rank() for axis in given)


def _cut_elsewhere(o: TypedNode, position: int, depends: Depends, data: State) -> bool | None:
    found = lengths(lambda o: (1, 2), _cut_axes)(o, position, depends, data)
    axes = _cut_axes(o, len(depends or ())) if found and position in (1, 2) and o.rank() else None
    if depends is None or axes is None or not isinstance(data, Rows):
        return found
    # An axis of one is taken whole, however many rows there are.
    return None if all(o.shape(0)[axis] == 1 for axis in _others(axes, depends, data)) else found


def _others(axes: Sequence[int], depends: Sequence[bool], data: Rows) -> list[int]:
    """The axes, other than the rows' own, that an element with their number is about."""
    return [axis for axis, theirs in zip(axes, depends, strict=True) if theirs and axis != data.dim]


def _spelled_shape(o: TypedNode, position: int, depends: Depends, data: State) -> bool:
    return False  # followed by the shapes before and after


# Sizes.


def filled(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    """Return the state of one value for every row, in a shape that is made of sizes."""
    depends = elements[-1]
    if depends is not None and sum(depends) == 1:
        dim, made = depends.index(True), type_of(o.node.outputs[0], o.types).shape
        if made is None or not isinstance(made[dim], int) or made[dim] == rows:
            return Rows(dim)
    return Finding(False, "makes a shape of the number of rows")


def _stretched(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    """The rows that a value is repeated for, along a new axis or one of length 1."""
    made, data = filled(o, elements, rows), o.node.inputs[0]
    if not isinstance(made, Rows):
        return made
    shape = None if data is None else type_of(data, o.types).shape
    ahead = made.dim - len(elements[-1] or ())
    if shape is None or (-ahead <= len(shape) and shape[ahead] != 1):
        return Finding(False, "repeats what is no row")
    return made


def _joined_sizes(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    known = [each for each in elements if each is not None]
    return Counts(sum(known, ()) if len(known) == len(elements) else None)


def _sliced_sizes(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    starts, ends = (o.constant(1), o.constant(2)) if o.has(1) else (None, None)
    steps = o.constant(4) if o.has(4) else (1,)
    if elements[0] is None or not starts or not ends or not steps or 0 in steps or len(starts) > 1:
        return Counts(None)
    return Counts(elements[0][starts[0] : ends[0] : steps[0]])


_RESHAPE = OpFacts(no_flops, "none", labels=_reshaped, row_states=_reshaped_rows, sizes=keeps_sizes)

TABLE: Mapping[str, OpFacts] = {
    "Reshape": replace(_RESHAPE, misplaces=_spelled_shape),
    **rows_of("Flatten Squeeze Unsqueeze", _RESHAPE),
    "Transpose": OpFacts(no_flops, labels=_transposed),
    "Expand": OpFacts(
        no_flops, labels=_expanded, misplaces=lengths(lambda o: (1,), _aligned_axes), sizes=_stretched
    ),
    **rows_of("DepthToSpace SpaceToDepth", OpFacts(no_flops, labels=_blocks)),
    "Trilu": OpFacts(no_flops, labels=_stack, combines=_order_combines),
    "Concat": OpFacts(no_flops, labels=_joined, row_states=_joined_rows, sizes=_joined_sizes),
    "Split": OpFacts(
        no_flops,
        labels=_divided,
        row_states=_divided_rows,
        misplaces=lengths(lambda o: (1,), lambda o, count: (o.axis(0),) * count),
    ),
    "Slice": OpFacts(
        no_flops,
        "picked",
        labels=_sliced,
        row_states=_sliced_rows,
        combines=_cut_combines,
        misplaces=_cut_elsewhere,
        sizes=_sliced_sizes,
    ),
    "Pad": OpFacts(no_flops, labels=_padded, combines=_pad_combines),
    "Tile": OpFacts(no_flops, labels=_tiled, row_states=_tiled_rows, sizes=_stretched),
    "CenterCropPad": OpFacts(no_flops),
    "ReverseSequence": OpFacts(no_flops, labels=_reversed_sequence),
    **rows_of("Shape Size", OpFacts(no_flops, "type")),
}
