"""States of rows after a node with a body: an If, and a Scan over the rows or along another axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeAlias

import onnx_ir as ir

from dask_ferro.graph.ir.nodes import bodies, reads
from dask_ferro.graph.ops.labels import TypedNode
from dask_ferro.graph.ops.states import FREE, Counts, Finding, Rows, State

Look: TypeAlias = Callable[[ir.Value | None], State]
# A function from a body and the states of its inputs to the states of its outputs.
Walk: TypeAlias = Callable[[ir.Graph, Sequence[State]], Sequence[State]]
# Iterations until the states of a loop have to be stable: the first may read rows, the second pass them on.
_ITERATIONS = 3


def branched(o: TypedNode, state: Look, walk: Walk) -> Sequence[State] | str | None:
    """Return the states of the outputs of an If whose branches agree, a text if it surely combines rows, or None."""
    condition = state(o.node.inputs[0])
    if isinstance(condition, Counts) and condition.depends is not None:
        return "takes a branch by their number"
    # The branch would depend on the chunk.
    if condition != FREE:
        return None
    one, other = (list(walk(body, ())) for body in bodies(o.node))
    found = next((s for s in [*one, *other] if isinstance(s, Finding)), None)
    if found is not None:
        return (found,) * len(one)
    return one if one == other else None


def scanned(o: TypedNode, state: Look, walk: Walk) -> Sequence[State | str] | str | None:
    """Return the state of each output of a Scan, or a text on how it surely combines rows; None: not known.

    Parameters
    ----------
    o : TypedNode
        A Scan that reads rows.
    state : callable
        Returns the state of a value.
    walk : callable
        Returns the states of a body's outputs.
    """
    (body,) = bodies(o.node)
    scans = int(o.attribute("num_scan_inputs", 0))
    carried = len(body.inputs) - scans
    given = [state(v) for v in o.node.inputs]
    axes = _listed(o, "scan_input_axes", scans)
    axes = tuple(axis % max(1, o.rank(carried + i)) for i, axis in enumerate(axes))
    places = _listed(o, "scan_output_axes", len(body.outputs) - carried)
    if None in o.node.inputs or any(place < 0 for place in places):
        return None
    if any(isinstance(s, Rows) and s.dim == axis for s, axis in zip(given[carried:], axes, strict=True)):
        return _over_rows(o, body, carried, axes, places, state)
    elements = [_without(s, axis) for s, axis in zip(given[carried:], axes, strict=True)]
    made = _settled(body, given[:carried], elements, walk)
    if made is None:
        return None
    return [*made[:carried], *(_with(s, place) for s, place in zip(made[carried:], places, strict=True))]


def _over_rows(
    o: TypedNode, body: ir.Graph, carried: int, axes: Sequence[int], places: Sequence[int], state: Look
) -> Sequence[State | str] | str | None:
    """Return the states after a Scan over the rows: a row is independent if it reads no changing loop state."""
    given = list(o.node.inputs)
    # A captured value with rows would have all of them at each step.
    if any(state(v) != FREE for v in [*given[:carried], *_captured(o.node, body)]):
        return None
    wanted = [Rows(axis) for axis in axes]
    if [state(v) for v in given[carried:]] != wanted or any(_listed(o, "scan_input_directions", len(axes))):
        return None
    if any(_listed(o, "scan_output_directions", len(places))):
        return "gives them in the reverse order"
    # An output may read the row of its step and constants; a changing loop state differs from row to row.
    changing = [i for i in range(carried) if not _stays(body, i)]
    after = _made_from(body, [body.inputs[i] for i in changing])
    moving = _made_from(body, body.inputs[carried:])
    hands_on = any(body.outputs[i] in moving for i in changing)
    why = (
        "hands numbers on from row to row" if hands_on else "counts its steps, and starts anew in each chunk"
    )
    states: list[State | str] = [why if i in changing else FREE for i in range(carried)]
    for out, place in zip(body.outputs[carried:], places, strict=True):
        states.append(why if out in after else Rows(place))
    return states


def _stays(body: ir.Graph, position: int) -> bool:
    """Return whether each step passes a loop state on unchanged."""
    value: ir.Value | None = body.outputs[position]
    while value is not None and (node := value.producer()) is not None and node.op_type == "Identity":
        value = node.inputs[0]
    return value is body.inputs[position]


def _settled(
    body: ir.Graph, carried: Sequence[State], elements: Sequence[State], walk: Walk
) -> Sequence[State] | None:
    """Return the states of a body's outputs once the loop states are stable; None if they never are."""
    before = list(carried)
    for _ in range(_ITERATIONS):
        made = walk(body, [*before, *elements])
        after = list(made[: len(before)])
        if after == before:
            return made
        if any(isinstance(s, Finding) for s in after) or any(
            old not in (FREE, new) for old, new in zip(before, after, strict=True)
        ):
            return None
        before = after
    return None


def _without(state: State, axis: int) -> State:
    """Return the state of one element that is scanned along another axis than that of the rows."""
    if isinstance(state, Rows):
        return Rows(state.dim - (state.dim > axis), state.before)
    return Counts(None, False) if isinstance(state, Counts) else state


def _with(state: State, axis: int) -> State:
    """Return the state of the elements of all steps, stacked along a new axis."""
    if isinstance(state, Rows):
        return Rows(state.dim + (state.dim >= axis), state.before)
    return Counts(None, False) if isinstance(state, Counts) else state


def _captured(node: ir.Node, body: ir.Graph) -> list[ir.Value]:
    """Return the values of the enclosing graph that the body reads."""
    own = {*body.inputs, *chain.from_iterable(inner.outputs for inner in body)}
    given = {v for v in node.inputs if v is not None}
    return [v for v in reads(node) if v not in own and v not in given]


def _listed(o: TypedNode, name: str, count: int) -> tuple[int, ...]:
    return tuple(o.attribute(name, ())) or (0,) * count


def _made_from(body: ir.Graph, values: Sequence[ir.Value]) -> set[ir.Value]:
    """Return the values of the body that are computed from given ones."""
    found = set(values)
    for node in body:
        if any(v in found for v in reads(node)):
            found.update(node.outputs)
    return found
