"""The units of a program that are bookkeeping about shapes are computed on the host.

Exported models compute shapes with tensors: Shape, Gather, Concat, Reshape.  On a device each of those would be a
kernel of one element, and the Reshape that reads it would wait for all that is queued.  What follows from shapes and
small weights alone is therefore computed by numpy beside the device, and handed as numpy where a kernel reads
integers on the host anyway (`READ`).  Everything else is the device's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from dask_ferro.engines.array.passes.unit import Unit
from dask_ferro.graph.ir.domain import STANDARD_DOMAINS

# Input positions whose values a kernel reads as Python integers: `kernel.late` names them.
READ: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Squeeze", "Unsqueeze", "Split", "CenterCropPad"), (1,)),
    **dict.fromkeys(("TopK", "OneHot", "Trilu", "CumSum", "CumProd"), (1,)),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin"), (1,)),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"), (1,)),
    "Slice": (1, 2, 3, 4),
    "Pad": (1, 3),
    "ConstantOfShape": (0,),
}
_ABOUT_SHAPES = frozenset({"Shape", "Size"})
# Ops that exported models compute shapes with.
_BOOKKEEPING = frozenset(
    {"Gather", "Concat", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity", "Range"}
    | {"ReduceProd", "Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Min", "Max", "Floor", "Ceil", "Sqrt"}
    | {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "Where"}
)
# A weight up to this size may be read on the host as well as on the device.
SMALL_BYTES = 64 * 1024


def mark(units: Sequence[Unit], weights: Mapping[str, ir.TensorProtocol]) -> list[Unit]:
    """Return the units, with `on_host` set for those that the host computes."""
    small = {name for name, tensor in weights.items() if tensor.nbytes <= SMALL_BYTES}
    values: set[str] = set()  # on the host
    marked = []
    for unit in units:
        on_host = _is_hosts(unit, values, small)
        if on_host:
            values.update(unit.outputs)
        marked.append(unit._replace(on_host=on_host))
    return marked


def _is_hosts(unit: Unit, values: set[str], small: set[str]) -> bool:
    op, given = unit.node.op_type, [name for name in unit.inputs if name is not None]
    if unit.several or unit.node.domain not in STANDARD_DOMAINS:
        return False
    # A shape is known on the host, wherever the array lies.
    if op in _ABOUT_SHAPES:
        return True
    follows = any(name in values for name in given) and all(name in values or name in small for name in given)
    # A mask is computed from positions too, but it is a matrix, and the device's.
    flat = all(v.shape is None or len(v.shape) <= 1 for v in unit.node.outputs)
    return op in _BOOKKEEPING and follows and flat


def read_on_host(units: Sequence[Unit], inputs: Sequence[str], outputs: Sequence[str]) -> frozenset[str]:
    """Return the inputs whose values only the host reads, so that they stay there."""
    reads: defaultdict[str, set[bool]] = defaultdict(set)
    for unit in units:
        if unit.node.op_type in _ABOUT_SHAPES and unit.on_host:
            # It takes the shape, wherever the array lies.
            continue
        for position, name in enumerate(unit.inputs):
            reads[name or ""].add(unit.on_host or is_read(unit, position))
    return frozenset(name for name in inputs if reads[name] == {True} and name not in outputs)


def is_read(unit: Unit, position: int) -> bool:
    """Return whether a unit reads an input's values on the host."""
    return not unit.several and position in READ.get(unit.node.op_type, ())
