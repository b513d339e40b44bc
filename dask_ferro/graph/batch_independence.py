"""Decide whether the rows of a batch depend on each other: if they do, chunks give other results than the batch.

A walk over the nodes in order tracks the axis of the rows in each value with the facts of each operator in
`graph.ops`; most of these are the labels that `sharding.propagate` splits too:

    x  Rows(0) --Transpose--> Rows(1) --MatMul--> Rows(1) --Softmax(axis=0)--> Rows(1) --Transpose--> Rows(0)
    x  Rows(0) --ReduceMean(axes=[0])--> combined: surely mixed

An output that ends as `Rows(0)` can be computed chunk by chunk.  A node that combines rows, selects some by index, or
computes with their number is a sure finding; a node without facts (a loop, a custom operator, an unknown shape) is an
unsure finding, which a trial decides.  Sizes (`Shape`, and values computed from it) are tracked element by element,
so that a reshape to a computed shape is not a finding; a chunk has fewer rows than the batch, so any other use of
their number is one:

    Expand(x [N, 1], [n, 4])     allowed: the axis of the rows has this size anyway
    Expand(x [N, 1], [n])        aligned from the back, so each row is repeated n times
    Trilu(x, k=n), Pad(x, [0, 0, 0, n]), TopK(x, n), Unsqueeze(x, [n]), Clip(x, 0, n)

Nothing is computed, and weights are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import onnx_ir as ir

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.nodes import Types, bodies, nodes_and_bodies, reads, type_of
from dask_ferro.graph.ops.facts import ALONG_ROWS, UNKNOWN_TO_KEEP
from dask_ferro.graph.ops.labels import Dims, Rule, TypedNode
from dask_ferro.graph.ops.states import FREE, Counts, Depends, Finding, Free, Rows, State, counts_of
from dask_ferro.graph.ops.table import facts_of

_BY_THEIR_NUMBER = "computes with their number"


def dependence(
    model: ir.Model, types: Types, others: Types, carriers: Collection[str], rows: int
) -> dict[str, Finding]:
    """Return the reason for each output whose rows may depend on each other; independent outputs are left out.

    Parameters
    ----------
    model : onnx_ir.Model
        The model, in a topological order.
    types : mapping of str to ValueType
        Result of `inference.infer` without declared types, which may be wrong; with as many known sizes as possible.
    others : mapping of str to ValueType
        The same at another number of rows.
    carriers : collection of str
        The inputs with the rows along axis 0.
    rows : int
        The number of rows in `types`: a prime that is not the size of any other dimension.
    """
    walk = _RowWalk(types, others, model.opset_imports.get("", 0) or 0, rows)
    for value in model.graph.inputs:
        walk.states[value] = Rows(0) if value.name in carriers else FREE
    for node in model.graph:
        walk.take(node)
    ends = ((value.name or "", walk.end(value)) for value in model.graph.outputs)
    return {name: found for name, found in ends if found is not None}


class _RowWalk:
    """The states of the values of a graph, derived node by node."""

    def __init__(self, types: Types, others: Types, opset: int, rows: int) -> None:
        self.types, self.others, self.opset, self.rows = types, others, opset, rows
        self.states: dict[ir.Value, State] = {}

    def state(self, value: ir.Value | None) -> State:
        return FREE if value is None else self.states.get(value, FREE)

    def take(self, node: ir.Node) -> None:
        """Derive the states of the outputs of a node."""
        made = self._made(node)
        each = made if isinstance(made, list) else [made] * len(node.outputs)
        self.states.update(zip(node.outputs, each, strict=False))

    def end(self, value: ir.Value) -> Finding | None:
        """Return the reason why an output cannot be computed chunk by chunk; None if it can."""
        state, shape = self.state(value), type_of(value, self.types).shape
        first = shape[0] if shape else None
        if isinstance(state, Rows):
            if state == Rows(0):
                return None
            where = f"along axis {state.dim}" if state.dim else "more than once"
            return Finding(
                True, f"output {value.name!r} has the rows {where}, not one after another on axis 0"
            )
        if isinstance(state, Finding):
            return state
        if isinstance(first, int) and first != self.rows:
            many = f"{first // self.rows} for each row" if first % self.rows == 0 else f"{first}"
            return Finding(True, f"output {value.name!r} has {many} on axis 0, wanted one for each row")
        return Finding(True, f"output {value.name!r} is not made of the rows")

    def _made(self, node: ir.Node) -> State | list[State]:
        """Return the state of all outputs of a node, or of each."""
        if node.op_type in ("Shape", "Size") and node.domain == "":
            return self._sizes(node, self.state(node.inputs[0]))
        if any(_draws(TypedNode(inner, self.types, self.opset)) for inner in nodes_and_bodies(node)):
            return self._sure(node, "draws random numbers, which chunks of the rows draw again")
        has_bodies = bool(bodies(node))
        states = [self.state(v) for v in (reads(node) if has_bodies else node.inputs)]
        found = [s for s in states if isinstance(s, Finding)]
        if found:
            return next((s for s in found if s.sure), found[0])
        # Nodes that read no rows are most of a model: weights, masks and constants.
        if all(s == FREE for s in states):
            return FREE
        if has_bodies:
            condition = self.state(node.inputs[0]) if node.op_type == "If" else FREE
            if isinstance(condition, Counts) and condition.depends is not None:
                return self._sure(node, "takes a branch by their number")
            return self._unknown(node, "has a body, which is not inspected")
        if not any(isinstance(s, Rows) for s in states):
            return self._counted(node, states)
        return self._of_rows(node, states)

    # Sizes.

    def _sizes(self, node: ir.Node, of: State) -> State:
        shape = type_of(node.inputs[0], self.types).shape if node.inputs[0] is not None else None
        if of == FREE:
            return FREE
        if not isinstance(of, Rows) or shape is None:
            return Counts(None)
        depends = tuple(i == of.dim for i in range(len(shape)))
        if node.op_type == "Size":
            return Counts((True,))
        site = TypedNode(node, self.types, self.opset)
        return counts_of(depends[site.attribute("start", 0) : site.attribute("end", None)])

    def _counted(self, node: ir.Node, states: Sequence[State]) -> State:
        """Return the state of a value that is computed from sizes only."""
        sizes = facts_of(node).sizes
        if sizes is None:
            return Counts(None)
        elements = [self._depends(node, i, s) for i, s in enumerate(states)]
        made = self._told(node, sizes(TypedNode(node, self.types, self.opset), elements, self.rows))
        # The last operand is a shape to fill or to repeat for; the operands before it are the values.
        values = [s.depends for s in states[:-1] if isinstance(s, Counts)]
        if isinstance(made, Rows) and values:
            return self._told(node, Finding(None not in values, _BY_THEIR_NUMBER))
        return counts_of(made.depends) if isinstance(made, Counts) else made

    def _depends(self, node: ir.Node, position: int, state: State) -> Depends:
        if isinstance(state, Counts):
            return state.depends
        value = node.inputs[position]
        shape = () if value is None else type_of(value, self.types).shape
        if shape is None or not all(isinstance(d, int) for d in shape):
            return None
        return (False,) * prod(int(d or 0) for d in shape)

    # Rows.

    def _of_rows(self, node: ir.Node, states: Sequence[State]) -> State | list[State]:
        site, facts = TypedNode(node, self.types, self.opset), facts_of(node)
        if facts.combines:
            return self._sure(node, facts.combines)
        sizes = [s.depends for s in states if isinstance(s, Counts)]
        # The meaning of operands in other domains is not known, so no finding is reported for them.
        if sizes and facts.takes_sizes != "in shapes" and node.domain in STANDARD_DOMAINS:
            is_sure = facts.takes_sizes == "as numbers" and any(each is not None for each in sizes)
            return self._told(node, Finding(is_sure, _BY_THEIR_NUMBER))
        made = facts.row_states(site, states, self.rows) if facts.row_states is not None else None
        rule = facts.labels(site) if made is None and facts.labels is not None and site.is_known else None
        if rule is not None:
            found = self._by_rule(node, states, rule)
        else:
            found = self._told(node, UNKNOWN_TO_KEEP if made is None else made)
        each = found if isinstance(found, list) else [found] * len(node.outputs)
        if sizes and any(map(self._has_more_by_number, node.outputs, each)):
            return self._sure(node, _BY_THEIR_NUMBER)
        return found

    def _has_more_by_number(self, value: ir.Value, state: State) -> bool:
        """Return whether the number of rows is in the length of an axis other than the rows' axis."""
        shape, other = (type_of(value, types).shape for types in (self.types, self.others))
        if not isinstance(state, Rows) or shape is None or other is None:
            return False
        return any(a != b for dim, (a, b) in enumerate(zip(shape, other, strict=False)) if dim != state.dim)

    def _by_rule(self, node: ir.Node, states: Sequence[State], rule: Rule) -> State | list[State]:
        labels: dict[tuple[str, int], None] = {}
        for i, state in enumerate(states):
            # Counts are lengths here, so the shape of the result decides.
            if isinstance(state, (Free, Counts)) or i in rule.ignored:
                continue
            assert isinstance(state, Rows)
            dims = rule.inputs[i] if i < len(rule.inputs) else ()
            label = dims[state.dim] if state.dim < len(dims) else None
            if label is None:
                return self._sure(node, ALONG_ROWS)
            labels[label, state.before] = None
        # The dtype of the rows is all that is read.
        if not labels:
            return FREE
        if len(labels) != 1:
            return self._sure(node, "combines each of them with the others")
        ((label, before),) = labels
        # A weight with one element for each row: it would not fit any other number of rows.
        if any(s == FREE and label in dims for s, dims in zip(states, rule.inputs, strict=False)):
            return self._unknown(node, "combines them with as many numbers of the model")
        return [self._placed(node, rule.outputs, i, label, before) for i in range(len(node.outputs))]

    def _placed(self, node: ir.Node, outputs: Sequence[Dims], i: int, label: str, before: int) -> State:
        if i >= len(outputs):
            return self._sure(node, "counts through all of them")
        if label in outputs[i]:
            return Rows(outputs[i].index(label), before)
        return self._sure(node, "combines them all")

    # Findings.

    def _told(self, node: ir.Node, state: State) -> State:
        """Return a state; a finding gets the name of its node."""
        if not isinstance(state, Finding):
            return state
        return Finding(state.sure, f"node {_label(node)} {state.why}")

    def _sure(self, node: ir.Node, why: str) -> State:
        return self._told(node, Finding(True, why))

    def _unknown(self, node: ir.Node, why: str) -> State:
        return self._told(node, Finding(False, why))


def _label(node: ir.Node) -> str:
    name = node.name or (node.outputs[0].name if node.outputs else "")
    return f"{name!r} ({node.op_type})"


def _draws(o: TypedNode) -> bool:
    """Return whether a node may draw random numbers: a seed gives every chunk the same ones."""
    kind = facts_of(o.node).draws
    if kind == "in training" and o.has(2):
        mode = o.constant(2)
        return mode is None or any(mode)
    return kind == "always"
