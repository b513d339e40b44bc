"""What a node costs: FLOPs, bytes read and written, and from them seconds on a device.

FLOPs are exact for matrix products, convolutions, attention and recurrent nodes (a multiply-add is two), and
`_PER_ELEMENT` times the output elements for the rest; bytes are those of all inputs, weights included, and all
outputs.  Types come from `shapes.infer` at the batch that is to be run, so costs are functions of the batch; a
dimension that is not known counts as 1.  An If costs its dearer branch, a Loop or Scan its body times the trip
count where that is a constant, else once.  Seconds follow the roofline: the slower of arithmetic and memory,
plus a fixed cost a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.graph.lean import OWN_DOMAIN
from dask_ferro.graph.shapes import UNKNOWN, ValueType


class Cost(NamedTuple):
    """FLOPs, bytes of all inputs (weights included), bytes of all outputs, bytes of weights alone."""

    flops: float
    read_bytes: float
    write_bytes: float
    weight_bytes: float


@dataclass(frozen=True)
class DeviceProfile:
    """How fast one thread of a device is.

    Attributes
    ----------
    flops_per_s : float
        Of a large float32 matrix product.
    bytes_per_s : float
        Of streaming through memory.
    node_overhead_s : float
        Of starting a node.
    efficiency : mapping of str to float
        Share of `flops_per_s` that an operator reaches; operators not named reach `other`.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    node_overhead_s: float
    efficiency: Mapping[str, float] = field(default_factory=dict)
    other: float = 1.0


# One thread of a two-core cloud machine with ONNX Runtime 1.31; `benchmarks/profile.py` measures it again.
CPU = DeviceProfile(
    name="cpu",
    flops_per_s=70e9,
    bytes_per_s=8e9,
    node_overhead_s=2e-6,
    efficiency={"MatMul": 1.0, "Gemm": 1.0, "Conv": 0.8, "ConvTranspose": 0.4, "Attention": 0.6},
    other=0.1,
)

# FLOPs per output element of operators that are no plain arithmetic (an exponential counts as ten).
_PER_ELEMENT = {
    **dict.fromkeys(("Exp", "Log", "Erf", "Sin", "Cos", "Tan", "Tanh", "Sigmoid", "Pow", "Softplus"), 10.0),
    **dict.fromkeys(("Gelu", "Mish", "Swish", "HardSwish", "Elu", "Selu", "Celu"), 15.0),
    **dict.fromkeys(("Softmax", "LogSoftmax"), 13.0),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization", "InstanceNormalization"), 8.0),
    **dict.fromkeys(("RMSNormalization", "BatchNormalization", "LRN"), 5.0),
}
# Operators that only move or describe data.
_NO_FLOPS = frozenset(
    "Reshape Transpose Concat Split Slice Gather GatherElements GatherND Squeeze Unsqueeze Flatten Identity Expand"
    " Tile Pad Shape Size Constant ConstantOfShape Cast CastLike DepthToSpace SpaceToDepth ScatterND"
    " ScatterElements Where".split()
)

Types = Mapping[str, ValueType]


def value_bytes(value: ValueType) -> int:
    """Return the bytes of a value; unknown dimensions count as 1, an unknown dtype or a non-tensor as none."""
    if value.dtype is None or value.kind not in ("tensor", "optional") or value.dtype == ir.DataType.STRING:
        return 0
    return ceil(_elements(value) * value.dtype.bitwidth / 8)


def node_cost(node: ir.Node, types: Types) -> Cost:
    """Return the cost of one node.

    Parameters
    ----------
    node : onnx_ir.Node
    types : mapping of str to ValueType
        Of the values that it reads and writes, from `shapes.infer`.
    """
    inputs = [v for v in node.inputs if v is not None]
    inner = _body_cost(node)
    return Cost(
        flops=_flops(node, types) + inner.flops,
        read_bytes=float(sum(value_bytes(_type(v, types)) for v in inputs)) + inner.read_bytes,
        write_bytes=float(sum(value_bytes(_type(v, types)) for v in node.outputs)) + inner.write_bytes,
        weight_bytes=float(sum(value_bytes(_type(v, types)) for v in inputs if v.const_value is not None))
        + inner.weight_bytes,
    )


def costs(model: ir.Model, types: Types) -> list[Cost]:
    """Return the cost of each node of the main graph, in order."""
    return [node_cost(node, types) for node in model.graph]


def seconds(node: ir.Node, cost: Cost, profile: DeviceProfile = CPU) -> float:
    """Return the projected seconds of a node on one thread of a device."""
    if node.domain == OWN_DOMAIN and node.op_type == "Sleep":
        return _float(node, "seconds", 0.0)
    speed = profile.flops_per_s * profile.efficiency.get(node.op_type, profile.other)
    moved = cost.read_bytes + cost.write_bytes
    return max(cost.flops / speed, moved / profile.bytes_per_s) + profile.node_overhead_s


def peak_bytes(model: ir.Model, types: Types) -> int:
    """Return the most bytes of inputs and intermediates that are alive at once, executing in order."""
    last: dict[str, int] = {}
    for position, node in enumerate(model.graph):
        last.update({v.name: position for v in node.inputs if v is not None and v.name})
    kept = {v.name for v in model.graph.outputs}
    alive = {v.name: value_bytes(_type(v, types)) for v in model.graph.inputs if v.name}
    now = peak = sum(alive.values())
    for position, node in enumerate(model.graph):
        for value in node.outputs:
            if value.name:
                alive[value.name] = value_bytes(_type(value, types))
                now += alive[value.name]
        peak = max(peak, now)
        for read in node.inputs:
            name = None if read is None else read.name
            if name in alive and name not in kept and last[name] == position:
                now -= alive.pop(name)
    return peak


def _type(value: ir.Value, types: Types) -> ValueType:
    found = types.get(value.name or "")
    if found is not None:
        return found
    if value.dtype is None or value.shape is None:
        return UNKNOWN
    dims = tuple(d if isinstance(d, int) else None for d in value.shape)
    return ValueType("tensor", value.dtype, dims)


def _elements(value: ValueType) -> int:
    return prod(d if isinstance(d, int) else 1 for d in value.shape or ())


def _shape(node: ir.Node, position: int, types: Types) -> tuple[int, ...]:
    """Return an input's shape with unknown dimensions as 1; () when there is no such input."""
    if position >= len(node.inputs) or (value := node.inputs[position]) is None:
        return ()
    return tuple(d if isinstance(d, int) else 1 for d in _type(value, types).shape or ())


def _out_elements(node: ir.Node, types: Types) -> int:
    return _elements(_type(node.outputs[0], types)) if node.outputs else 0


def _int(node: ir.Node, name: str, default: int) -> int:
    found = node.attributes.get(name)
    return default if found is None or found.is_ref() else int(found.value)


def _float(node: ir.Node, name: str, default: float) -> float:
    found = node.attributes.get(name)
    return default if found is None or found.is_ref() else float(found.value)


def _flops(node: ir.Node, types: Types) -> float:
    if node.domain not in ("", "ai.onnx") or node.op_type in _NO_FLOPS:
        return 0.0
    exact = _EXACT.get(node.op_type)
    if exact is not None:
        return float(exact(node, types))
    if node.op_type.startswith(("Reduce", "Arg", "Global", "CumSum", "TopK")):
        return float(prod(_shape(node, 0, types)))
    return _PER_ELEMENT.get(node.op_type, 1.0) * _out_elements(node, types)


def _matmul(node: ir.Node, types: Types) -> float:
    inner = _shape(node, 0, types)[-1:] or (1,)
    return 2.0 * _out_elements(node, types) * inner[0]


def _gemm(node: ir.Node, types: Types) -> float:
    a = _shape(node, 0, types)
    inner = a[0 if _int(node, "transA", 0) else -1] if a else 1
    bias = len(node.inputs) > 2 and node.inputs[2] is not None
    return _out_elements(node, types) * (2.0 * inner + bias)


def _conv(node: ir.Node, types: Types) -> float:
    weight = _shape(node, 1, types)  # [M, C/group, *kernel]
    bias = len(node.inputs) > 2 and node.inputs[2] is not None
    return _out_elements(node, types) * (2.0 * prod(weight[1:]) + bias)


def _conv_transpose(node: ir.Node, types: Types) -> float:
    weight = _shape(node, 1, types)  # [C, M/group, *kernel]: each input element meets the rest of it
    return 2.0 * prod(_shape(node, 0, types)) * prod(weight[1:])


def _pool(node: ir.Node, types: Types) -> float:
    found = node.attributes.get("kernel_shape")
    kernel = prod(found.as_ints()) if found is not None and not found.is_ref() else 1
    return float(_out_elements(node, types) * kernel)


def _einsum(node: ir.Node, types: Types) -> float:
    """Every combination of index values is one multiply-add per factor."""
    found = node.attributes.get("equation")
    if found is None or found.is_ref():
        return float(_out_elements(node, types))
    terms = str(found.value).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for position, term in enumerate(terms):
        letters = term.replace("...", "")
        shape = _shape(node, position, types)
        sizes.update(zip(reversed(letters), reversed(shape), strict=False))
    return float(max(1, len(terms)) * prod(sizes.values()))


def _attention(node: ir.Node, types: Types) -> float:
    """Q K^T and P V are matrix products of [q_len, kv_len] by the head size; softmax on their elements."""
    q, k, v = (_shape(node, i, types) for i in range(3))
    past = _shape(node, 4, types)
    kv_length = (k[-2] if len(k) > 1 else 1) + (past[-2] if len(past) > 1 else 0)
    if len(q) == 4:
        batch, heads, length, size = q
        v_size = v[-1] if v else size
    else:
        batch, length, hidden = (*q, 1, 1, 1)[:3]
        heads = _int(node, "q_num_heads", 1)
        size = hidden // heads
        v_size = (v[-1] if v else 1) // max(1, _int(node, "kv_num_heads", 1))
    scores = batch * heads * length * kv_length
    return scores * (2.0 * size + 2.0 * v_size + _PER_ELEMENT["Softmax"])


def _recurrent(gates: int) -> Callable[[ir.Node, Types], float]:
    def flops(node: ir.Node, types: Types) -> float:
        x, w, r = (_shape(node, i, types) for i in range(3))
        if len(x) < 3 or len(w) < 3 or len(r) < 3:
            return float(_out_elements(node, types))
        steps, directions, hidden = x[0] * x[1], w[0], r[2]
        return directions * steps * hidden * gates * (2.0 * w[2] + 2.0 * hidden + _PER_ELEMENT["Tanh"])

    return flops


_EXACT: dict[str, Callable[[ir.Node, Types], float]] = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvInteger": _conv,
    "QLinearConv": lambda node, types: _out_elements(node, types) * 2.0 * prod(_shape(node, 3, types)[1:]),
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Attention": _attention,
    "RNN": _recurrent(1),
    "GRU": _recurrent(3),
    "LSTM": _recurrent(4),
    "MaxPool": _pool,
    "AveragePool": _pool,
    "LpPool": _pool,
}


def _graphs(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if not attribute.is_ref() and attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()


def _body_cost(node: ir.Node) -> Cost:
    """Return what the bodies of a control flow node cost; nothing for any other node."""
    each = [_graph_cost(body) for body in _graphs(node)]
    if not each:
        return Cost(0.0, 0.0, 0.0, 0.0)
    dearest = max(each, key=lambda cost: (cost.flops, cost.read_bytes + cost.write_bytes))
    times = _trips(node)
    return Cost(*(times * part for part in dearest))


def _graph_cost(graph: ir.Graph) -> Cost:
    parts = [node_cost(node, {}) for node in graph]
    return Cost(*(sum(column) for column in zip(*parts, strict=True))) if parts else Cost(0.0, 0.0, 0.0, 0.0)


def _trips(node: ir.Node) -> int:
    if node.op_type == "Loop" and node.inputs and (limit := node.inputs[0]) is not None:
        return _constant(limit.const_value)
    if node.op_type == "Scan":
        count = _int(node, "num_scan_inputs", 0)
        scanned = node.inputs[-1] if count and node.inputs else None
        shape = None if scanned is None else scanned.shape
        return shape[0] if shape and isinstance(shape[0], int) else 1
    return 1


def _constant(tensor: Any) -> int:
    return max(1, int(tensor.numpy().reshape(-1)[0])) if tensor is not None and tensor.size == 1 else 1
