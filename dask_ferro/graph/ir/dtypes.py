"""Groups of dtypes, derived from the properties that `onnx_ir` and numpy give them; no other module lists dtypes.

    FLOAT    float16 float32 float64         of ml_dtypes: bfloat16, and STORED: float8, float6, float4, int4, int2
    INTEGER  SIGNED | UNSIGNED               texts, as Python objects
    BOOL                                     COMPLEX

A dtype that ONNX adds is in the groups that its properties put it in, so most need no line here.  Engines and the
lazy tensors declare the dtypes that they accept with these groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir

D = ir.DataType


def array_dtype(dtype: ir.DataType) -> np.dtype[np.generic]:
    """Return the dtype of the numpy arrays that hold a tensor; texts have any length, so their arrays hold objects."""
    return np.dtype(object) if dtype == D.STRING else dtype.numpy()


def _native_dtypes(kinds: str) -> frozenset[ir.DataType]:
    """The dtypes of these kinds that numpy itself has."""
    # float8e5m2 of ml_dtypes has kind "f", like numpy's own floats.
    arrays = {d: array_dtype(d) for d in TENSOR}
    return frozenset(d for d, array in arrays.items() if array.kind in kinds and array.isbuiltin == 1)


TENSOR = frozenset(D) - {D.UNDEFINED}
FLOAT, SIGNED_INTS, UNSIGNED_INTS, BOOL, COMPLEX = map(_native_dtypes, "fiubc")
INTEGER = SIGNED_INTS | UNSIGNED_INTS
NUMERIC = FLOAT | INTEGER
# The dtypes of every array namespace, and so of devices.  ONNX's operators move complex numbers and compute with none.
DTYPES = NUMERIC | BOOL | COMPLEX
# Dtypes that an ONNX Runtime session takes and returns as numpy arrays.
SESSION = NUMERIC | BOOL | {D.STRING}
# Sizes and positions.
INDEX = frozenset({D.INT32, D.INT64})
WIDE = frozenset({D.INT64})

# Extensions of 8 bits and less: tensors are stored as these, and cast before anything is computed with them.
STORAGE = frozenset(d for d in TENSOR - SESSION - COMPLEX if d.bitwidth <= 8)
# Dtypes that operators compute with, the floats among them, and the floats of two bytes, whose sums are widened.
ARITHMETIC_FLOATS = frozenset(d for d in TENSOR - STORAGE if d.is_floating_point())
ARITHMETIC = INTEGER | ARITHMETIC_FLOATS
HALVES = frozenset(d for d in ARITHMETIC_FLOATS if d.bitwidth == 16)

# The array API's names.
NAMES = {d: d.numpy().name for d in DTYPES}
HALF_NAMES = frozenset(d.numpy().name for d in HALVES)
_INTEGERS = frozenset(d.numpy() for d in TENSOR - {D.STRING} if d.is_integer())


def is_integer(dtype: np.dtype[np.generic]) -> bool:
    """Return whether arrays of a dtype hold whole numbers, of 4 and 2 bits too."""
    return dtype in _INTEGERS


@cache
def _allowed_types(domain: str, op_type: str, opset: int) -> tuple[frozenset[str], ...]:
    """Return the types that an operator's parameters accept; the last types hold for all further operands."""
    try:
        return tuple(frozenset(p.types) for p in onnx.defs.get_schema(op_type, opset, domain).inputs)
    except onnx.defs.SchemaError:
        return ()


def takes(domain: str, op_type: str, opset: int, given: Sequence[ir.DataType | None]) -> bool:
    """Return whether an operator has a form for operands of these dtypes; None is an omitted operand.

    An operator that ONNX does not know accepts all.
    """
    known = _allowed_types(domain, op_type, opset)
    return not known or all(
        dtype is None or f"tensor({dtype.name.lower()})" in known[min(i, len(known) - 1)]
        for i, dtype in enumerate(given)
    )


@cache
def first_cast_opset(dtype: ir.DataType) -> int:
    """Return the first operator set whose Cast takes a dtype; the newest if none does."""
    newest = int(onnx.defs.onnx_opset_version())
    name = f"tensor({dtype.name.lower()})"
    takes = (n for n in range(6, newest) if name in onnx.defs.get_schema("Cast", n, "").inputs[0].types)
    return next(takes, newest)
