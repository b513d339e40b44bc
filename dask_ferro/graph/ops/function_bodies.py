"""The standard's own definition of an operator as nodes of other operators, for one node and the types of its operands.

    Mish(x) = Mul(x, Tanh(Softplus(x)))         SwiGLU(a, b) = Mul(Swish(a), b)

An operator without a row in the table is priced, split and followed through these nodes.  Their labels are joined:
dimensions that have one label in any of the nodes are one dimension, and it can be split if

1. each node that reads it has a label for it, and no node or value has it twice;
2. no number but a shape is computed from its length: a division by it would be wrong on each rank;
3. the whole body, inferred anew with operands twice as long, is twice as long along it and nowhere else: a shape
   that is spelled out would not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import inf
from typing import Any, NamedTuple, TypeAlias

import onnx
import onnx_ir as ir
from onnx import inliner, numpy_helper

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.dtypes import INDEX
from dask_ferro.graph.ir.inference import ValueType, from_type, infer_model, types_of
from dask_ferro.graph.ir.nodes import bodies, sizes, type_of
from dask_ferro.graph.ops.labels import Dims, Labels, Rule, TypedNode

# Bodies and joined labels are kept for as many nodes that differ in types or attributes: a network has a few shapes.
_KEPT = 256
# Operands that say axes or sizes have a number for each dimension; longer ones are data.
_SETTING = 64

# One dimension of a value of a body.
Place: TypeAlias = tuple[str, int]


class Body(NamedTuple):
    """The nodes of a body, the types of their values, and the operator set that they are of."""

    graph: ir.Graph
    types: Mapping[str, ValueType]
    opset: int

    def typed_nodes(self) -> Iterator[TypedNode]:
        """Yield the nodes with the types of their values, in order."""
        for node in self.graph:
            yield TypedNode(node, self.types, self.opset)


class _BodyKey(NamedTuple):
    """All that a body depends on.

    Attributes
    ----------
    op : str
    opset : int
        That the body is of.
    attributes : tuple of bytes
        Those that the node has, serialized.
    inputs : tuple of ValueType or None
        None: left out.
    settings : tuple
        Position and serialized elements of operands that say axes or sizes.
    outputs : tuple of bool
        Whether each is asked for.
    """

    op: str
    opset: int
    attributes: tuple[bytes, ...]
    inputs: tuple[ValueType | None, ...]
    settings: tuple[tuple[int, bytes], ...]
    outputs: tuple[bool, ...]

    def input_names(self) -> list[str]:
        """Return the name of each input in the body, "" for one that is left out."""
        return ["" if type_ is None else f"i{k}" for k, type_ in enumerate(self.inputs)]

    def output_names(self) -> list[str]:
        """Return the name of each output in the body, "" for one that is not asked for."""
        return [f"o{k}" if asked else "" for k, asked in enumerate(self.outputs)]


def body_of(o: TypedNode) -> Body | None:
    """Return the body of a node's operator.

    None if the standard gives none, it has control flow in it, or a shape in it is only known when it runs.
    """
    key = _key(o)
    return None if key is None else _body(key)


def total(o: TypedNode, each: Callable[[TypedNode], float]) -> float | None:
    """Return the sum of a figure over the nodes of a body; None where `body_of` is None."""
    key = _key(o)
    return None if key is None else _total(key, each)


@lru_cache(_KEPT)
def _total(key: _BodyKey, each: Callable[[TypedNode], float]) -> float | None:
    body = _body(key)
    return None if body is None else sum(map(each, body.typed_nodes()))


@lru_cache(_KEPT)
def _schema(op: str, opset: int) -> tuple[onnx.defs.OpSchema, int] | None:
    """The schema of an operator whose body the standard gives, and the operator set that the body is of.

    Bodies were added late: up to then the first later one holds, if attributes and operands are still the same.
    """
    first = _at(op, opset)
    if first is None:
        return None
    for later in range(opset, onnx.defs.onnx_opset_version() + 1):
        schema = _at(op, later)
        if schema is None or _signature(schema) != _signature(first):
            return None
        if _first_body(schema) <= later:
            return schema, later
    return None


def _at(op: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return None


def _first_body(schema: Any) -> float:
    """The first operator set whose nodes a body of this schema is made of."""
    return min(
        (*schema.function_opset_versions, *schema.context_dependent_function_opset_versions), default=inf
    )


def _signature(schema: onnx.defs.OpSchema) -> tuple[object, ...]:
    defaults = {name: a.default_value.SerializeToString() for name, a in schema.attributes.items()}
    return defaults, [i.name for i in schema.inputs], [o.name for o in schema.outputs]


def _key(o: TypedNode) -> _BodyKey | None:
    # Asked for every node, so nothing is made here that most nodes do without.
    node = o.node
    if node.domain not in STANDARD_DOMAINS:
        return None
    found = _schema(node.op_type, o.opset)
    if found is None or bodies(node):
        return None
    attributes = [ir.to_proto(attribute).SerializeToString() for attribute in node.attributes.values()]
    inputs = tuple(_tensor_type(v, o) for v in node.inputs)
    settings = [(k, _setting(v, t)) for k, (v, t) in enumerate(zip(node.inputs, inputs, strict=True))]
    outputs = tuple(bool(v.name) for v in node.outputs)
    told = tuple((k, elements) for k, elements in settings if elements)
    return _BodyKey(node.op_type, found[1], tuple(attributes), inputs, told, outputs)


def _tensor_type(value: ir.Value | None, o: TypedNode) -> ValueType | None:
    """The type of an operand, its unknown sizes 1."""
    if value is None or not value.name:
        return None
    found = type_of(value, o.types)
    return found._replace(shape=sizes(found)) if found.kind == "tensor" else found


def _setting(value: ir.Value | None, type_: ValueType | None) -> bytes:
    """An operand that says axes or sizes, serialized; empty for data."""
    if value is None or type_ is None or type_.dtype not in INDEX:
        return b""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > _SETTING:
        return b""
    return bytes(numpy_helper.from_array(tensor.numpy()).SerializeToString())


@lru_cache(_KEPT)
def _body(key: _BodyKey) -> Body | None:
    proto = _written_out(key)
    if proto is None:
        return None
    # The inliner wants settings typed as inputs; inference wants their elements.
    settings = {f"i{position}": elements for position, elements in key.settings}
    inputs = [info for info in proto.graph.input if info.name not in settings]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    for name, elements in settings.items():
        proto.graph.initializer.append(onnx.TensorProto.FromString(elements))
        proto.graph.initializer[-1].name = name
    body = inferred(proto, key.opset)
    return body if _is_typed(body) else None


def inferred(proto: onnx.ModelProto, opset: int) -> Body:
    """Return the nodes of a model with the types that inference gives their values."""
    typed = infer_model(proto)
    types = {name: from_type(type_) for name, type_ in types_of(typed.graph).items()}
    return Body(ir.from_proto(typed).graph, types, opset)


def _written_out(key: _BodyKey) -> onnx.ModelProto | None:
    """A model of the nodes of the body alone; None where they have bodies of their own."""
    names = key.input_names()
    node = onnx.NodeProto(op_type=key.op, input=names, output=key.output_names())
    node.attribute.extend(map(onnx.AttributeProto.FromString, key.attributes))
    # ONNX's inliner forgets the defaults of a function's attributes.
    given = {attribute.name for attribute in node.attribute}
    schema = onnx.defs.get_schema(key.op, key.opset, "")
    defaults = [a.default_value for name, a in schema.attributes.items() if name not in given]
    node.attribute.extend(default for default in defaults if default.type)
    graph = onnx.GraphProto(name="body", node=[node])
    pairs = zip(names, key.inputs, strict=True)
    graph.input.extend(_declared(name, type_) for name, type_ in pairs if type_ is not None)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    opset = onnx.helper.make_opsetid("", key.opset)
    proto = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)
    try:
        proto = inliner.inline_selected_functions(proto, [("", key.op)], inline_schema_functions=True)
    except Exception:  # noqa: BLE001 - its C++ raises several kinds, of operands that the operator cannot have
        return None
    is_whole = any(inner.op_type == key.op for inner in proto.graph.node)
    attributes = chain.from_iterable(inner.attribute for inner in proto.graph.node)
    return None if is_whole or any(attribute.HasField("g") for attribute in attributes) else proto


def _declared(name: str, type_: ValueType) -> onnx.ValueInfoProto:
    info = onnx.ValueInfoProto(name=name)
    if type_.kind == "tensor" and type_.dtype is not None:
        info.type.CopyFrom(onnx.helper.make_tensor_type_proto(type_.dtype.value, type_.shape))
    return info


# Labels.


def joined_labels(o: TypedNode, rule: Labels) -> Rule | None:
    """Return the labels of a node as those of its body say; None if there are none.

    Parameters
    ----------
    o : TypedNode
        With all shapes known.
    rule : callable
        The labels of a node of the body.
    """
    key = _key(o)
    return None if key is None else _joined(key, rule)


@lru_cache(_KEPT)
def _joined(key: _BodyKey, rule: Labels) -> Rule | None:
    body, names = _body(key), key.input_names()
    if body is None:
        return None

    def retyped(types: Mapping[str, ValueType]) -> Body | None:
        inputs = [types.get(name, type_) for name, type_ in zip(names, key.inputs, strict=True)]
        return _body(key._replace(inputs=tuple(inputs)))

    labels = labels_in(body, rule, retyped)
    operands = tuple(labels.get(name, ()) for name in names)
    results = tuple(labels.get(name, ()) for name in key.output_names())
    return Rule(operands, results) if any(map(any, operands)) else None


def labels_in(
    body: Body, rule: Labels, retyped: Callable[[Mapping[str, ValueType]], Body | None]
) -> dict[str, Dims]:
    """Return the labels of all values of a body, by the three rules of this module.

    Parameters
    ----------
    body : Body
        With all shapes known.
    rule : callable
        The labels of one of its nodes.
    retyped : callable
        Given types by name, the body inferred anew with operands of these types; None: it cannot have them.
    """
    classes = _Classes(body)
    for o in body.typed_nodes():
        classes.take(o, rule(o))
    split = [root for root in classes.splittable() if _is_twice_as_long(classes, root, retyped)]
    labels = {root: str(i) for i, root in enumerate(split)}
    return {name: tuple(map(labels.get, classes.of(name))) for name in body.types}


def _is_typed(body: Body) -> bool:
    """Whether all shapes in a body are known."""
    made = chain.from_iterable(node.outputs for node in body.graph)
    return all(v.name in body.types and _is_known(body.types[v.name]) for v in made if v.name)


def _is_known(type_: ValueType) -> bool:
    return type_.shape is not None and all(isinstance(size, int) for size in type_.shape)


class _Classes:
    """Which dimensions of the values of a body are one and the same, and which of these cannot be split."""

    def __init__(self, body: Body) -> None:
        self.types = body.types
        self.inputs = [v.name for v in body.graph.inputs if v.name]
        self.outputs = [v.name for v in body.graph.outputs if v.name]
        self.parent: dict[Place, Place] = {}
        self.blocked: set[Place] = set()
        # Dimensions whose length a value is computed from.
        self.lengths: dict[str, frozenset[Place]] = {}
        for name in body.graph.initializers:
            self.blocked.update(self.of(name))

    def of(self, name: str) -> list[Place]:
        """Return the class of each dimension of a value, by the one that stands for it."""
        shape = self.types[name].shape if name in self.types else ()
        return [self.root((name, dim)) for dim in range(len(shape or ()))]

    def root(self, place: Place) -> Place:
        """Return the dimension that stands for all that are one with it."""
        while self.parent.get(place, place) != place:
            place = self.parent[place]
        return place

    def take(self, o: TypedNode, found: Rule | None) -> None:
        """Join the dimensions that have one label, and block those that have none."""
        read = [v.name if v is not None and v.name else "" for v in o.node.inputs]
        made = [v.name or "" for v in o.node.outputs]
        if o.node.op_type in ("Shape", "Size"):
            self.lengths[made[0]] = frozenset((read[0], dim) for dim in range(o.rank()))
            return
        lengths = frozenset[Place]().union(*(self.lengths.get(name, ()) for name in read))
        if lengths and all(name in self.lengths or not self._carries(name) for name in read):
            self.lengths.update(dict.fromkeys(made, lengths))
            return
        for position, name in enumerate(read):
            if found is None or position != found.shape:
                self.blocked |= self.lengths.get(name, frozenset())
        found = found or Rule((), ())
        read = ["" if position in found.ignored else name for position, name in enumerate(read)]
        places: dict[str, Place] = {}
        self._join(read, found.inputs, places)
        self._join(made, found.outputs, places)
        # A label that a result lacks is reduced over.
        self.blocked |= {place for label, place in places.items() if not _is_in_all(label, found.outputs)}

    def splittable(self) -> list[Place]:
        """Return the classes of dimensions of operands that may be split, in order."""
        given_away = chain.from_iterable(self.lengths.get(name, ()) for name in self.outputs)
        stopped = {self.root(place) for place in chain(self.blocked, given_away)}
        for name in self.types:
            roots = self.of(name)
            stopped |= {root for root in roots if roots.count(root) > 1}
        given = dict.fromkeys(chain.from_iterable(self.of(name) for name in self.inputs))
        return [root for root in given if root not in stopped]

    def _carries(self, name: str) -> bool:
        """Whether a value has a dimension of an operand that could be split."""
        return any(place not in self.blocked for place in self.of(name))

    def _join(self, names: Sequence[str], labelled: Sequence[Dims], places: dict[str, Place]) -> None:
        for position, name in enumerate(names):
            dims = labelled[position] if position < len(labelled) else ()
            for dim, place in enumerate(self.of(name)):
                label = dims[dim] if dim < len(dims) else None
                if label is None:
                    self.blocked.add(place)
                else:
                    self.parent[self.root(place)] = self.root(places.setdefault(label, place))


def _is_in_all(label: str, outputs: Sequence[Dims]) -> bool:
    return all(label in dims for dims in outputs)


def _is_twice_as_long(
    classes: _Classes, root: Place, retyped: Callable[[Mapping[str, ValueType]], Body | None]
) -> bool:
    """Whether operands that are twice as long along a class make all values so, and change no other dimension."""
    wanted = {name: _doubled(type_, classes.of(name), root) for name, type_ in classes.types.items()}
    longer = retyped(wanted)
    return longer is not None and all(
        longer.types.get(name) == type_ for name, type_ in wanted.items() if name not in classes.lengths
    )


def _doubled(type_: ValueType, roots: Sequence[Place], root: Place) -> ValueType:
    if type_.shape is None:
        return type_
    pairs = zip(type_.shape, roots, strict=True)
    return type_._replace(shape=tuple(2 * size if one == root else size for size, one in pairs))  # type: ignore[operator]
