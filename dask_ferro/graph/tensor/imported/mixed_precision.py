"""Half precision in a loaded model, whose nodes and constants are written for float32: mixed, as PyTorch's autocast is.

    products          in half precision: engines add up in float32
    what moves or picks elements, and sums of two   in half precision where all of its inputs are; scalars follow
    all others        in float32: exponentials, means, variances and normalizations

Scalars of the file follow if half precision has them: the lowest float32 of a mask is -inf in float16, and 1e-12 is 0.
Source: Micikevicius et al., "Mixed precision training" (2018), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.ir.dtypes import ARITHMETIC_FLOATS, HALVES, takes
from dask_ferro.graph.tensor.tensor import Tensor, TensorType, cast, constant_of

# The dtypes for which a model may be written that computes in half precision.
WIDE = ARITHMETIC_FLOATS - HALVES

_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
_FOLLOWERS = frozenset({
    "Abs", "Add", "Clip", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements",
    "GatherND", "Identity", "LeakyRelu", "Max", "MaxPool", "Min", "Mul", "Neg", "PRelu", "Pad", "Relu",
    "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze",
    "Where",
})  # fmt: skip

Types: TypeAlias = Sequence[TensorType | None]


def narrowed(
    operator: tuple[str, str, int],
    inputs: Sequence[Tensor | None],
    wanted: Types,
    results: Types,
    half: ir.DataType,
) -> tuple[tuple[Tensor | None, ...], tuple[TensorType | None, ...]]:
    """Return the inputs of a node behind casts, and the types of its outputs, in a model of mixed precision.

    The operator is its domain, its name and the operator set; `wanted` and `results` are the types of inputs and
    outputs in the model, and some of the inputs have the half precision instead.
    """
    floats = [
        x for x, t in zip(inputs, wanted, strict=True) if x is not None and t is not None and t.dtype in WIDE
    ]
    is_narrow = bool(floats) and _is_narrow(operator[1], floats, half)
    to = [half if t is not None and is_narrow and t.dtype in WIDE else t and t.dtype for t in wanted]
    if is_narrow and not takes(*operator, to):
        is_narrow, to = False, [t and t.dtype for t in wanted]
    given = tuple(x if x is None or d is None else cast(x, d) for x, d in zip(inputs, to, strict=True))
    if not is_narrow:
        return given, tuple(results)
    narrow = (t._replace(dtype=half) if t is not None and t.dtype in WIDE else t for t in results)
    return given, tuple(narrow)


def _is_narrow(name: str, floats: Sequence[Tensor], half: ir.DataType) -> bool:
    """Return whether a node with these inputs, all of which are floats in the model, computes in half precision."""
    if name in _PRODUCTS:
        return True
    are_half = [x.type.dtype == half for x in floats]
    others = (x for x, is_half in zip(floats, are_half, strict=True) if not is_half)
    return name in _FOLLOWERS and any(are_half) and all(_follows(x, half) for x in others)


def _follows(x: Tensor, half: ir.DataType) -> bool:
    """Return whether a tensor is a scalar of the file that half precision has."""
    value = constant_of(x) if x.size == 1 else None
    if value is None:
        return False
    with np.errstate(over="ignore"):
        rounded = value.astype(half.numpy())
    return bool((np.isfinite(rounded) == np.isfinite(value)).all() and ((rounded == 0) == (value == 0)).all())
