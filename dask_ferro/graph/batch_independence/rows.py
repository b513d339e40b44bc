"""Do the rows of a batch depend on each other?  If they do, chunks of them give other numbers than all of them.

A walk over the nodes in order follows where the rows lie in each value, by the placement table (which
`sharding.propagate` uses) and a few rows of this module's own:

    x  Rows(0) --Transpose--> Rows(1) --MatMul--> Rows(1) --Softmax(axis=0)--> Rows(1) --Transpose--> Rows(0)
    x  Rows(0) --ReduceMean(axes=[0])--> combined: surely mixed

What ends as `Rows(0)` at an output can be computed chunk by chunk.  A node that surely combines rows, picks some by
their number, or computes with how many there are is a sure finding; one that nothing is known of (a body, a custom
operator, a shape that is not known) an unsure one.  Values of shapes (`Shape`, and what is made of it) are followed
element by element, so that a reshape by a computed shape is none.  Nothing is computed, and weights are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import onnx_ir as ir

from dask_ferro.graph.batch_independence.bodies import branched, scanned
from dask_ferro.graph.batch_independence.counts import misplaced
from dask_ferro.graph.batch_independence.ml import ml_state
from dask_ferro.graph.batch_independence.rules import (
    BY_ELEMENT,
    KEEPS_COUNTS,
    RESHAPES,
    combines,
    draws,
    row_rule,
    slices_all,
    without_rule,
)
from dask_ferro.graph.batch_independence.states import FREE, Counts, Finding, Free, Rows, State
from dask_ferro.graph.ir.ml_types import DOMAIN as ML
from dask_ferro.graph.ir.nested import with_bodies
from dask_ferro.graph.ir.nodes import Types, bodies, reads, type_of
from dask_ferro.graph.sharding.placements import Dims, Rule, Site


def dependence(model: ir.Model, types: Types, carriers: Collection[str], rows: int) -> dict[str, Finding]:
    """Return for each output whose rows may depend on each other the reason; independent ones are left out.

    Parameters
    ----------
    model : onnx_ir.Model
        In a topological order.
    types : mapping of str to ValueType
        From `inference.infer` without declared ones, which may be wrong; with a size for every dimension, where it can
        be.
    carriers : collection of str
        The inputs that have the rows along axis 0.
    rows : int
        Their number in `types`: a prime that is the size of nothing else.
    """
    walk = _Walk(with_bodies(model, types), model.opset_imports.get("", 0) or 0, rows)
    for value in model.graph.inputs:
        walk.states[value] = Rows(0) if value.name in carriers else FREE
    for node in model.graph:
        walk.take(node)
    ends = ((value.name or "", walk.end(value)) for value in model.graph.outputs)
    return {name: found for name, found in ends if found is not None}


class _Walk:
    def __init__(self, types: Types, opset: int, rows: int) -> None:
        self.types, self.opset, self.rows = types, opset, rows
        self.states: dict[ir.Value, State] = {}
        self.named: dict[str, ir.Value] = {}
        self._last: Site | None = None

    def state(self, value: ir.Value | None) -> State:
        return FREE if value is None else self.states.get(value, FREE)

    def take(self, node: ir.Node) -> None:
        """Work out the states of what a node makes."""
        made = self._made(node)
        for value, state in zip(node.outputs, made, strict=False):
            self.states[value] = state

    def end(self, value: ir.Value) -> Finding | None:
        """What is wrong with an output."""
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

    def _made(self, node: ir.Node) -> Sequence[State]:
        states = [self.state(v) for v in node.inputs]
        count = len(node.outputs)
        if node.op_type in ("Shape", "Size") and node.domain == "":
            return (self._sizes(node, states[0]),)
        if draws(self._site(node)):
            return (self._sure(node, "draws random numbers, which chunks of the rows draw anew"),) * count
        if bodies(node):
            return self._with_bodies(node)
        found = [s for s in states if isinstance(s, Finding)]
        if found:
            return (next((s for s in found if s.sure), found[0]),) * count
        if all(s == FREE for s in states):
            return (FREE,) * count
        if not any(isinstance(s, Rows) for s in states):
            return (self._counted(node, states),) * count
        return self._of_rows(node, states)

    def _with_bodies(self, node: ir.Node) -> Sequence[State]:
        count, site = len(node.outputs), self._site(node)
        states = [self.state(v) for v in reads(node)]
        found = [s for s in states if isinstance(s, Finding)]
        if found:
            return (next((s for s in found if s.sure), found[0]),) * count
        if all(s == FREE for s in states):
            return (FREE,) * count
        made: Sequence[State | str] | str | None = None
        if node.op_type == "Scan" and self.opset >= 9:
            made = scanned(site, self.state, self._through)
        elif node.op_type == "If":
            made = branched(site, self.state, self._through)
        if isinstance(made, str):
            return (self._sure(node, made),) * count
        if not made:
            return (self._unknown(node, "has a body, which is not looked into"),) * count
        return [self._sure(node, s) if isinstance(s, str) else s for s in made]

    def _through(self, body: ir.Graph, states: Sequence[State]) -> Sequence[State]:
        """The states of a body's outputs."""
        self.states.update(zip(body.inputs, states, strict=True))
        own = [*body.inputs, *(v for node in body for v in node.outputs)]
        if any(self.named.setdefault(v.name or "", v) is not v for v in own):  # their types are by name
            return [Finding(False, "a value of a body has the name of another") for _ in body.outputs]
        for node in body:
            self.take(node)
        return [self.state(v) for v in body.outputs]

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
        site = self._site(node)
        return _counts(depends[site.attribute("start", 0) : site.attribute("end", None)])

    def _counted(self, node: ir.Node, states: Sequence[State]) -> State:
        """The state of what is made of sizes alone."""
        made = self._of_sizes(node, states)
        exact = node.op_type not in BY_ELEMENT and all(s.exact for s in states if isinstance(s, Counts))
        return made if exact or not isinstance(made, Counts) else Counts(made.depends, False)

    def _of_sizes(self, node: ir.Node, states: Sequence[State]) -> State:
        kind, site = node.op_type, self._site(node)
        if kind == "Range":
            return self._unknown(node, "numbers the rows of a chunk from 0")
        elements = [self._depends(node, i, s) for i, s in enumerate(states)]
        if kind in ("ConstantOfShape", "Expand", "Tile"):
            return self._filled(node, elements[-1])
        first = elements[0] if elements else None
        if kind in KEEPS_COUNTS:
            return _counts(first)
        if kind == "Gather" and first is not None:
            picked = site.constant(1)
            return _counts(None if picked is None else tuple(first[i] for i in picked))
        if kind == "Slice" and first is not None:
            return _counts(_sliced(first, site))
        if kind == "Concat":
            return _counts(None if None in elements else tuple(x for one in elements for x in one or ()))
        if kind in BY_ELEMENT:
            return _counts(_either(elements))
        if kind.startswith("Reduce") and first is not None:
            return _counts((any(first),))
        return Counts(None)

    def _depends(self, node: ir.Node, position: int, state: State) -> tuple[bool, ...] | None:
        if isinstance(state, Counts):
            return state.depends
        value = node.inputs[position]
        shape = () if value is None else type_of(value, self.types).shape
        if shape is None or not all(isinstance(d, int) for d in shape):
            return None
        return (False,) * prod(int(d or 0) for d in shape)

    def _filled(self, node: ir.Node, depends: tuple[bool, ...] | None) -> State:
        """The state of one value for every row, in a shape that is made of sizes."""
        if depends is None or sum(depends) != 1:
            return self._unknown(node, "makes a shape of the number of rows")
        dim, made = depends.index(True), type_of(node.outputs[0], self.types).shape
        if made is not None and isinstance(made[dim], int) and made[dim] != self.rows:
            return self._unknown(node, "makes a shape of the number of rows")
        if node.op_type != "ConstantOfShape":
            shape = type_of(node.inputs[0], self.types).shape if node.inputs[0] is not None else None
            if shape is None or (len(depends) - dim <= len(shape) and shape[dim - len(depends)] != 1):
                return self._unknown(node, "repeats what is no row")
        return Rows(dim)

    # Rows.

    def _of_rows(self, node: ir.Node, states: Sequence[State]) -> Sequence[State]:
        count, site = len(node.outputs), self._site(node)
        if node.domain == ML:
            made = ml_state(site, states)
            state = made if isinstance(made, Rows) else Finding(made.sure, f"node {_label(node)} {made.why}")
            return (state,) * count
        is_misplaced = misplaced(site, states)
        if is_misplaced is not False:
            return (self._by_count(node, sure=bool(is_misplaced)),) * count
        if node.op_type in RESHAPES:
            return (self._reshaped(node, states),) * count
        moved = self._moved(node, site, states)
        if moved is not None:
            return moved
        if node.op_type == "Slice" and isinstance(states[0], Rows):
            whole = slices_all(site, states[0], states[1:])
            if whole:
                return (states[0],)
            part = self._unknown if whole is None else self._sure
            return (part(node, "picks some by their number"),) * count
        rule = row_rule(site)
        if rule is None:
            sure, why = without_rule(site, states)
            return (Finding(sure, f"node {_label(node)} {why}"),) * count
        return self._by_rule(node, site, states, rule)

    def _by_rule(self, node: ir.Node, site: Site, states: Sequence[State], rule: Rule) -> Sequence[State]:
        count = len(node.outputs)
        labels: dict[tuple[str, int], None] = {}
        for i, state in enumerate(states):
            if isinstance(
                state, (Free, Counts)
            ):  # `misplaced` has seen to it that these are but lengths of the rows
                continue
            assert isinstance(state, Rows)
            dims = rule.inputs[i] if i < len(rule.inputs) else ()
            label = dims[state.dim] if state.dim < len(dims) else None
            if label is None:
                why = combines(site, i, state.dim)
                made = self._sure(node, why) if why else self._unknown(node, "may combine them")
                return (made,) * count
            labels[label, state.before] = None
        if len(labels) != 1:
            return (self._sure(node, "puts each of them together with the others"),) * count
        ((label, before),) = labels
        if any(s == FREE and label in dims for s, dims in zip(states, rule.inputs, strict=False)):
            return (self._unknown(node, "puts them together with as many numbers of the model"),) * count
        return [self._placed(node, rule.outputs, i, label, before) for i in range(count)]

    def _placed(self, node: ir.Node, outputs: Sequence[Dims], i: int, label: str, before: int) -> State:
        if i >= len(outputs):
            return self._sure(node, "counts through all of them")
        if label in outputs[i]:
            return Rows(outputs[i].index(label), before)
        return self._sure(node, "combines them all")

    def _by_count(self, node: ir.Node, *, sure: bool) -> Finding:
        if not sure:
            return self._unknown(node, "may compute with their number")
        return self._sure(node, "computes with their number")

    def _reshaped(self, node: ir.Node, states: Sequence[State]) -> State:
        """Where the rows lie after a reshape: at the same distance in the order of elements."""
        state = states[0]
        if not isinstance(state, Rows):
            return self._unknown(node, "takes its shape from them")
        before, after = (
            type_of(v, self.types).shape for v in (node.inputs[0], node.outputs[0]) if v is not None
        )
        if node.op_type == "Squeeze" and _squeezes_ones(node):
            return self._unknown(node, "takes the axis of the rows away where there is one")
        if _known(before) and _known(after):
            found = _relaid(before, after, state, self.rows)  # type: ignore[arg-type]
            return found or self._unknown(node, "takes them apart")
        shape = states[1] if len(states) > 1 else FREE
        if isinstance(shape, Counts) and shape.depends and shape.depends[0] and state == Rows(0):
            keeps = sum(shape.depends) == 1 and shape.exact  # half of their number puts two of them together
            return Rows(0) if keeps else self._unknown(node, "has a shape that is not known")
        wanted = self._site(node).constant(1) if len(states) > 1 else None
        if wanted and wanted[0] == -1 and state == Rows(0) and _known(before):
            whole = prod(before[1:])  # type: ignore[index, arg-type]
            if 0 not in wanted and min(wanted[1:], default=1) > 0 and whole % prod(wanted[1:]):
                return self._sure(node, "puts several of them together")
        if wanted and wanted[0] == 0 and state == Rows(0):  # a copy of the size on axis 0
            return Rows(0)
        return self._unknown(node, "has a shape that is not known")

    def _moved(self, node: ir.Node, site: Site, states: Sequence[State]) -> Sequence[State] | None:
        """Concat, Split, Tile along the rows: runs of all of them, one after another; None: no such node."""
        if node.op_type not in ("Concat", "Split", "Tile") or not site.is_known():
            return None
        state = states[0]
        if not isinstance(state, Rows):
            return None
        if node.op_type == "Tile":
            times = site.out_shape()[state.dim] // site.shape(0)[state.dim]
            return (Rows(state.dim, state.before * times) if times > 1 else state,)
        if site.axis(0) != state.dim:
            return None
        if node.op_type == "Concat":
            rows = [s for s in states if isinstance(s, Rows)]
            runs = {site.shape(i)[s.dim] // s.before for i, s in enumerate(states) if isinstance(s, Rows)}
            if len(rows) == len(states) and len(runs) == 1 and {s.dim for s in rows} == {state.dim}:
                return (Rows(state.dim, sum(s.before for s in rows)),)
            return (self._unknown(node, "puts others between them"),)
        run = site.shape(0)[state.dim] // state.before
        parts = [site.out_shape(i)[state.dim] for i in range(len(node.outputs))]
        if any(part % run for part in parts):
            return (self._sure(node, "picks some by their number"),) * len(parts)
        return [Rows(state.dim, part // run) for part in parts]

    # Words.

    def _site(self, node: ir.Node) -> Site:
        if self._last is None or self._last.node is not node:
            self._last = Site(node, self.types, self.opset)
        return self._last

    def _sure(self, node: ir.Node, why: str) -> Finding:
        return Finding(True, f"node {_label(node)} {why}")

    def _unknown(self, node: ir.Node, why: str) -> Finding:
        return Finding(False, f"node {_label(node)} {why}")


def _squeezes_ones(node: ir.Node) -> bool:
    """Whether a Squeeze names no axes, so that it takes all that have the size 1."""
    return "axes" not in node.attributes and (len(node.inputs) < 2 or node.inputs[1] is None)


def _label(node: ir.Node) -> str:
    name = node.name or (node.outputs[0].name if node.outputs else "")
    return f"{name!r} ({node.op_type})"


def _counts(depends: tuple[bool, ...] | None) -> State:
    return Counts(depends) if depends is None or any(depends) else FREE


def _either(elements: Sequence[tuple[bool, ...] | None]) -> tuple[bool, ...] | None:
    """Element by element whether one of them depends; None where sizes do not broadcast."""
    size = max((len(e) for e in elements if e is not None), default=0)
    if any(e is None or len(e) not in (1, size) for e in elements):
        return None
    return tuple(any(e[i if len(e) > 1 else 0] for e in elements if e) for i in range(size))


def _sliced(depends: tuple[bool, ...], site: Site) -> tuple[bool, ...] | None:
    starts, ends = (site.constant(1), site.constant(2)) if site.has(1) else (None, None)
    steps = site.constant(4) if site.has(4) else (1,)
    if not starts or not ends or not steps or len(starts) > 1:
        return None
    return depends[starts[0] : ends[0] : steps[0]]


def _known(shape: Sequence[Any] | None) -> bool:
    return shape is not None and all(isinstance(d, int) for d in shape) and 0 not in shape


def _relaid(before: Sequence[int], after: Sequence[int], state: Rows, rows: int) -> Rows | None:
    """Return where rows lie after a reshape.

    Examples
    --------
    >>> _relaid((8, 251, 6), (8 * 251, 6), Rows(1), 251)
    Rows(dim=0, before=8)
    >>> _relaid((8 * 251, 6), (8, 251, 2, 3), Rows(0, 8), 251)
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
