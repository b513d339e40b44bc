"""The kernel table, which declares the nodes that array kernels compute.

Support is declared, never tried: the table has no case that its kernel computes wrongly.  `selection` calls `supports`
ahead of time and takes another engine for an unsupported node.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dask_ferro.engines.array import custom_ops
from dask_ferro.engines.array.kernel import Kernel
from dask_ferro.engines.array.ops import (
    activation,
    attention,
    convolution,
    elementwise,
    indexing,
    layout,
    linear,
    normalization,
    pooling,
    quantize,
    recurrent,
    reductions,
)
from dask_ferro.graph.ir.domain import OWN_DOMAIN, STANDARD_DOMAINS

_FAMILIES = (
    *(elementwise, activation, linear, reductions, layout, indexing),
    *(normalization, convolution, pooling, attention, recurrent, quantize),
)
KERNELS: Mapping[str, Kernel] = {op: kernel for family in _FAMILIES for op, kernel in family.TABLE.items()}


def find(node: ir.Node, opset: int) -> Kernel | None:
    """Return the row for a node of this opset, ignoring dtypes; None if there is none."""
    if node.domain == OWN_DOMAIN:
        return custom_ops.TABLE.get(node.op_type)
    row = KERNELS.get(node.op_type) if node.domain in STANDARD_DOMAINS else None
    if row is None or opset not in row.opsets:
        return None
    return row if row.when is None or row.when(node, opset) else None


def supports(node: ir.Node, opset: int) -> bool:
    """Return whether the array kernels compute this node correctly.

    Parameters
    ----------
    node : onnx_ir.Node
        Its attributes, its outputs, and the types and constant values of its inputs decide.  An input of unknown dtype
        is not supported.
    opset : int
        Version of the default operator set.
    """
    row = find(node, opset)
    if row is None:
        return False
    for i, value in enumerate(node.inputs):
        if value is None or not value.name:
            continue
        # No row takes a sequence, an optional or a sparse tensor.
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            return False
        if value.dtype not in row.dtypes[min(i, len(row.dtypes) - 1)]:
            return False
    return True
