"""What a node costs: FLOPs, bytes read and written, and from them its seconds on a device.

FLOPs are those of `graph.ops`.  Bytes are those that a node touches: all inputs, weights included, and all
outputs; but a node that only renames data (Reshape) touches none, and one that picks (Gather) reads what it
picks.  Types are those at the batch that is to be run, so costs are functions of the batch; a dimension that
is not known counts as 1.

An If costs its dearest branch; a Loop or Scan its body times the trip count where the model tells it (a
constant, or the length of a scanned value), else once.  Seconds follow the roofline: the slower of arithmetic
and memory, and a fixed time a node.  Durations are seconds, sizes bytes; all figures are projections, for one
thread of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.nested import with_bodies
from dask_ferro.graph.ir.nodes import Operands, Types, bodies, reads, sizes, type_of, value_bytes
from dask_ferro.graph.ops.lookup import flops
from dask_ferro.graph.ops.table import facts_of

__all__ = ["CPU", "Cost", "DeviceProfile", "costs", "node_cost", "peak_bytes", "seconds", "value_bytes"]


class Cost(NamedTuple):
    """FLOPs; bytes read (weights included) and written; and bytes of the weights that have to be there."""

    flops: float
    read_bytes: float
    write_bytes: float
    weight_bytes: float


NOTHING = Cost(0.0, 0.0, 0.0, 0.0)

# A Loop that is to run longer runs until its condition ends it: exporters write INT64_MAX.
_LONGEST_LOOP = 1_000_000


def node_cost(node: ir.Node, types: Types) -> Cost:
    """Return the cost of one node, its bodies included.

    Parameters
    ----------
    node : onnx_ir.Node
    types : mapping of str to ValueType
        Of the values that it reads and writes, from `inference.infer`; a value that is missing has its declared
        type.
    """
    read = [value_bytes(type_of(v, types)) if v is not None else 0 for v in node.inputs]
    written = sum(value_bytes(type_of(v, types)) for v in node.outputs)
    weights = sum(size for v, size in zip(node.inputs, read, strict=True) if v is not None and _is_weight(v))
    touches = facts_of(node).touches
    if touches == "none":
        read, written = [0], 0
    elif touches == "type":
        read[:1] = [0]
    elif touches == "picked" and read:
        read[0] = min(read[0], written)
    inner = _body_cost(node, types)
    return Cost(
        flops(Operands(node, types)) + inner.flops,
        float(sum(read)) + inner.read_bytes,
        float(written) + inner.write_bytes,
        float(weights) + inner.weight_bytes,
    )


def costs(model: ir.Model, types: Types) -> list[Cost]:
    """Return the cost of each node of the main graph, in order."""
    known = with_bodies(model, types)
    return [node_cost(node, known) for node in model.graph]


def peak_bytes(model: ir.Model, types: Types) -> int:
    """Return the most bytes of inputs and intermediates alive at once, nodes run one by one in order.

    Weights and what bodies make inside do not count; graph outputs stay alive.
    """
    last: dict[ir.Value, int] = {}
    for position, node in enumerate(model.graph):
        last.update(dict.fromkeys(reads(node), position))
    last.update(dict.fromkeys(model.graph.outputs, len(model.graph)))
    dies: list[list[ir.Value]] = [[] for _ in range(len(model.graph) + 1)]
    for value, position in last.items():
        dies[position].append(value)
    alive = {value: value_bytes(type_of(value, types)) for value in model.graph.inputs}
    now = peak = sum(alive.values())
    for position, node in enumerate(model.graph):
        made = {value: value_bytes(type_of(value, types)) for value in node.outputs}
        now += sum(made.values())
        peak = max(peak, now)
        alive.update((value, size) for value, size in made.items() if value in last)
        now -= sum(size for value, size in made.items() if value not in last)
        now -= sum(alive.pop(value, 0) for value in dies[position])
    return peak


def _is_weight(value: ir.Value) -> bool:
    return value.is_initializer() or value.const_value is not None


# Bodies of control flow.


def _body_cost(node: ir.Node, types: Types) -> Cost:
    each = [_sum(node_cost(inner, types) for inner in body) for body in bodies(node)]
    if not each:
        return NOTHING
    if node.op_type == "If":
        return max(each, key=lambda cost: (cost.flops, cost.read_bytes + cost.write_bytes))
    times, once = _trips(node, types), _sum(each)
    return Cost(times * once.flops, times * once.read_bytes, times * once.write_bytes, once.weight_bytes)


def _sum(each: Iterable[Cost]) -> Cost:
    return Cost(*(sum(column) for column in zip(NOTHING, *each, strict=True)))


def _trips(node: ir.Node, types: Types) -> int:
    """How often the body of a node runs, 1 where that is not known."""
    if node.op_type == "Loop":
        limit = _constant(node.inputs[0]) if node.inputs else None
        if limit is not None and limit <= _LONGEST_LOOP:
            return max(0, limit)
        stacked = (type_of(v, types).shape for v in node.outputs[max(0, len(node.inputs) - 2) :])
        return next((shape[0] for shape in stacked if shape and isinstance(shape[0], int)), 1)
    if node.op_type == "Scan":
        count = Operands(node, types).attribute("num_scan_inputs", 0)
        axes = Operands(node, types).attribute("scan_input_axes", ())
        for value, axis in zip(node.inputs[-count:] if count else (), axes or (0,) * count, strict=False):
            shape = sizes(type_of(value, types)) if value is not None else ()
            if -len(shape) <= axis < len(shape):
                return int(shape[axis])
    return 1


def _constant(value: ir.Value | None) -> int | None:
    tensor = None if value is None else value.const_value
    return int(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None


# Seconds.


@dataclass(frozen=True)
class DeviceProfile:
    """How fast one thread of a device is.

    Parameters
    ----------
    name : str
    flops_per_s : float
        Of a large float32 matrix product.
    bytes_per_s : float
        Of streaming through memory, read and written bytes together.
    node_overhead_s : float
        Of starting a node inside a running session.
    efficiency : mapping of str to float
        Share of `flops_per_s` that an operator reaches, counted as in `graph.ops`.
    other : float
        The same for operators that are not named.
    passes : mapping of str to float
        How often an operator goes through the bytes that it touches, where that is more than once: one that is
        made of several kernels starts each of them.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    node_overhead_s: float
    efficiency: Mapping[str, float] = field(default_factory=dict)
    other: float = 1.0
    passes: Mapping[str, float] = field(default_factory=dict)


# Share of a matrix product's FLOP/s that ONNX Runtime's kernels reach; the rest of them is bound by memory.
_CPU_EFFICIENCY = {
    **dict.fromkeys(("MatMul", "Gemm", "Conv", "Einsum", "Attention", "LSTM", "GRU", "RNN"), 1.0),
    "ConvTranspose": 0.93,
    "DepthwiseConv": 0.38,
    "Exp": 0.56,
    "Softmax": 0.49,
    "LogSoftmax": 0.49,
    "Sigmoid": 0.42,
    "Tanh": 0.37,
    "Gelu": 0.22,
    "Erf": 0.19,
    "LayerNormalization": 0.17,
    "InstanceNormalization": 0.24,
    "AveragePool": 0.20,
    "MaxPool": 0.09,
    "TopK": 0.063,
    "Resize": 0.059,
    **dict.fromkeys(("Sin", "Cos", "Tan"), 0.052),
    "DFT": 0.031,
    "Pow": 0.023,
    "ArgMax": 0.012,
    "ArgMin": 0.012,
    "CumSum": 0.003,
}

# One core of an AMD EPYC (family 25, model 17; AVX-512), ONNX Runtime 1.31.1, float32, medians of 7 rounds;
# `benchmarks/device_profile.py` measures them again.
CPU = DeviceProfile(
    name="cpu",
    flops_per_s=99e9,
    bytes_per_s=24e9,
    node_overhead_s=2.2e-7,
    efficiency=_CPU_EFFICIENCY,
    other=0.1,
)


def seconds(
    node: ir.Node | str, cost: Cost, profile: DeviceProfile = CPU, *, types: Types = MappingProxyType({})
) -> float:
    """Return the projected seconds of a node of this cost, on one thread of a device.

    Parameters
    ----------
    node : onnx_ir.Node or str
        Or its operator type.  A node with bodies reaches the efficiency of what is in them; a Sleep takes the
        seconds that it says.
    cost : Cost
    profile : DeviceProfile
    types : mapping of str to ValueType, optional
        Those of values inside bodies weigh their operators; without it the declared ones do.
    """
    if isinstance(node, str):
        share, nodes, asleep = profile.efficiency.get(node, profile.other), 1.0, 0.0
    elif _sleeps(node):
        return _asleep(node, types)
    elif bodies(node):
        share, nodes, asleep = _share(node, profile, types), _nodes(node, types), _asleep(node, types)
    else:
        share, nodes, asleep = profile.efficiency.get(_kind(node, types), profile.other), 1.0, 0.0
    passes = profile.passes.get(node if isinstance(node, str) else node.op_type, 1.0)
    arithmetic = cost.flops / (profile.flops_per_s * share)
    memory = passes * (cost.read_bytes + cost.write_bytes) / profile.bytes_per_s
    return max(arithmetic, memory) + nodes * passes * profile.node_overhead_s + asleep


def _share(node: ir.Node, profile: DeviceProfile, types: Types) -> float:
    """Share of the device's FLOP/s: of one operator, or of all inside a node by their FLOPs."""
    inner = [n for body in bodies(node) for n in body]
    if not inner:
        return profile.efficiency.get(_kind(node, types), profile.other)
    each = [(node_cost(n, types).flops, _share(n, profile, types)) for n in inner]
    total = sum(count for count, _ in each)
    return total / sum(count / share for count, share in each) if total else profile.other


def _kind(node: ir.Node, types: Types) -> str:
    """The operator, but a depthwise convolution by its own name: it reuses nothing."""
    if node.op_type != "Conv":
        return node.op_type
    o = Operands(node, types)
    return "DepthwiseConv" if o.attribute("group", 1) > 1 and o.shape(1)[1:2] == (1,) else "Conv"


def _nodes(node: ir.Node, types: Types) -> float:
    """Nodes that are started when this one runs."""
    return 1 + _repeated(node, [sum(_nodes(n, types) for n in body) for body in bodies(node)], types)


def _asleep(node: ir.Node, types: Types) -> float:
    if _sleeps(node):
        return float(Operands(node, types).attribute("seconds", 0.0))
    return _repeated(node, [sum(_asleep(n, types) for n in body) for body in bodies(node)], types)


def _sleeps(node: ir.Node) -> bool:
    return node.domain == OWN_DOMAIN and node.op_type == "Sleep"


def _repeated(node: ir.Node, each: Sequence[float], types: Types) -> float:
    """A sum over bodies as often as they run, or the larger of two branches."""
    if not each:
        return 0.0
    return max(each) if node.op_type == "If" else _trips(node, types) * sum(each)
