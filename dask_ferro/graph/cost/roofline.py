"""The cost of a node: FLOPs, bytes read and written, and from them its seconds on a device.

FLOPs come from `graph.ops`.  A node reads the bytes of all inputs, weights included, and writes the bytes of all
outputs; but a node that only renames data (Reshape) touches none, and one that selects (Gather) reads as much as it
selects.  Types belong to the batch to run, so costs are functions of the batch; an unknown dimension counts as 1.

An If costs as much as its most expensive branch; a Loop or Scan as its body times the trip count if the model has it
(a constant, or the length of a scanned value), else once.  Seconds follow the roofline model: the longer of arithmetic
and memory traffic, plus a fixed time per node.  Durations are seconds, sizes bytes; all figures are projections, for
one thread of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.nodes import Operands, Types, bodies, sizes, type_of, value_bytes
from dask_ferro.graph.ops.table import facts_of


class Cost(NamedTuple):
    """FLOPs, bytes read (weights included) and bytes written."""

    flops: float
    read_bytes: float
    write_bytes: float


NO_COST = Cost(0.0, 0.0, 0.0)

# A Loop with a larger trip count runs until its condition ends it: exporters write INT64_MAX.
_LONGEST_LOOP = 1_000_000


def node_cost(node: ir.Node, types: Types) -> Cost:
    """Return the cost of one node, its bodies included.

    Parameters
    ----------
    node : onnx_ir.Node
    types : mapping of str to ValueType
        Types of the values that it reads and writes, from `inference.infer`; a missing value has its declared type.
    """
    read = [value_bytes(type_of(v, types)) if v is not None else 0 for v in node.inputs]
    written = sum(value_bytes(type_of(v, types)) for v in node.outputs)
    facts, operands = facts_of(node), Operands(node, types)
    if facts.touches == "none":
        read, written = [0], 0
    elif facts.touches == "type":
        read[:1] = [0]
    elif facts.touches == "picked" and read:
        read[0] = min(read[0], written)
    flops = facts.flops(operands) if callable(facts.flops) else facts.flops * operands.out_total()
    return _sum((Cost(float(flops), float(sum(read)), float(written)), _body_cost(node, types)))


class ModelCost(NamedTuple):
    """The cost of each node of the main graph, in order, and the projected seconds of each on one thread."""

    nodes: tuple[Cost, ...]
    seconds: tuple[float, ...]


def model_cost(model: ir.Model, types: Types) -> ModelCost:
    """Return costs and seconds of the nodes of a model on the CPU."""
    each = tuple(node_cost(node, types) for node in model.graph)
    times = (seconds(n, cost, types=types) for n, cost in zip(model.graph, each, strict=True))
    return ModelCost(each, tuple(times))


# Bodies of control flow.


def _body_cost(node: ir.Node, types: Types) -> Cost:
    each = [_sum(node_cost(inner, types) for inner in body) for body in bodies(node)]
    if not each:
        return NO_COST
    if node.op_type == "If":
        return max(each, key=lambda cost: (cost.flops, cost.read_bytes + cost.write_bytes))
    times, once = _trips(node, types), _sum(each)
    return Cost(*(times * part for part in once))


def _sum(each: Iterable[Cost]) -> Cost:
    return Cost(*(sum(column) for column in zip(NO_COST, *each, strict=True)))


def _trips(node: ir.Node, types: Types) -> int:
    """Return the trip count of a Loop or Scan; 1 if it is not known."""
    if node.op_type == "Loop":
        limit = _constant(node.inputs[0]) if node.inputs else None
        if limit is not None and limit <= _LONGEST_LOOP:
            return max(0, limit)
        # Each iteration of a Loop appends one element to a scanned output.
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
    """The speed of one thread of a device.

    Parameters
    ----------
    name : str
    flops_per_s : float
        FLOP/s of a large float32 matrix product.
    bytes_per_s : float
        Memory bandwidth, read and written bytes together.
    node_overhead_s : float
        The time to start a node in a running session.
    efficiency : mapping of str to float
        The share of `flops_per_s` that an operator reaches, with FLOPs counted as in `graph.ops`.
    other : float
        The same for all other operators.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    node_overhead_s: float
    efficiency: Mapping[str, float] = field(default_factory=dict)
    other: float = 1.0


# Share of a matrix product's FLOP/s that ONNX Runtime's kernels reach; all other kernels are bound by memory.
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
    node: ir.Node, cost: Cost, profile: DeviceProfile = CPU, *, types: Types = MappingProxyType({})
) -> float:
    """Return the projected seconds of a node of this cost, on one thread of a device.

    Parameters
    ----------
    node : onnx_ir.Node
        A Sleep takes the seconds of its attribute, a node with bodies the seconds of their nodes, whatever its cost is.
    cost : Cost
    profile : DeviceProfile
    types : mapping of str to ValueType, optional
        Types of values inside bodies; default: the declared types.
    """
    if node.domain == OWN_DOMAIN and node.op_type == "Sleep":
        return float(Operands(node, types).attribute("seconds", 0.0))
    if inside := bodies(node):
        each = [sum(seconds(n, node_cost(n, types), profile, types=types) for n in body) for body in inside]
        longest = max(each) if node.op_type == "If" else _trips(node, types) * sum(each)
        return longest + profile.node_overhead_s
    efficiency = profile.efficiency.get(_kind(node, types), profile.other)
    arithmetic = cost.flops / (profile.flops_per_s * efficiency)
    memory = (cost.read_bytes + cost.write_bytes) / profile.bytes_per_s
    return max(arithmetic, memory) + profile.node_overhead_s


def _kind(node: ir.Node, types: Types) -> str:
    """Return the operator; a depthwise convolution, which reuses no data, has its own name."""
    if node.op_type != "Conv":
        return node.op_type
    o = Operands(node, types)
    return "DepthwiseConv" if o.attribute("group", 1) > 1 and o.shape(1)[1:2] == (1,) else "Conv"
