"""Dtypes of tensors: conversion to ONNX's, promotion, and the array-API standard's functions for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.dtypes import ARITHMETIC_FLOATS, COMPLEX, SIGNED_INTS, UNSIGNED_INTS
from dask_ferro.graph.tensor.rows import example

DTypeLike: TypeAlias = npt.DTypeLike | ir.DataType | None

_KINDS: dict[str, frozenset[ir.DataType]] = {
    "bool": frozenset({ir.DataType.BOOL}),
    "signed integer": SIGNED_INTS,
    "unsigned integer": UNSIGNED_INTS,
    "integral": SIGNED_INTS | UNSIGNED_INTS,
    "real floating": ARITHMETIC_FLOATS,
    "complex floating": COMPLEX,
    "numeric": SIGNED_INTS | UNSIGNED_INTS | ARITHMETIC_FLOATS | COMPLEX,
}


def dtype_of(dtype: DTypeLike) -> ir.DataType:
    if isinstance(dtype, ir.DataType):
        return dtype
    try:
        return ir.DataType.from_numpy(np.dtype(dtype))
    except TypeError:
        raise InputError(f"dtype: ONNX has no {dtype!r}; take a numpy dtype of numbers or bool") from None


def common_dtype(dtypes: Sequence[ir.DataType], where: str) -> ir.DataType:
    """Return the dtype that holds the values of all, by the array-API standard's rules."""
    names = " with ".join(d.numpy().name for d in dtypes)
    kinds = {"f" if d in ARITHMETIC_FLOATS else "b" if d == ir.DataType.BOOL else "i" for d in dtypes}
    common = None
    if len(kinds) == 1:
        # numpy and ml_dtypes may have no dtype that holds both.
        with suppress(TypeError):
            common = ir.DataType.from_numpy(np.result_type(*(d.numpy() for d in dtypes)))
    # numpy promotes uint64 and int64 to float64, which the standard leaves undefined.
    if common is None or ("i" in kinds and common in ARITHMETIC_FLOATS):
        raise InputError(f"{where}: {names} do not mix; use astype on one")
    return common


def _dtype(value: object) -> ir.DataType:
    # A numpy dtype class has a descriptor named `dtype`.
    dtype = value if isinstance(value, type) else getattr(value, "dtype", value)
    return dtype_of(dtype)  # type: ignore[arg-type]  # refused there


@example('result_type("int8", "int16")', "dtype('int16')")
def result_type(*arrays_and_dtypes: object) -> np.dtype[np.generic]:
    """Return the dtype to which tensors and dtypes promote."""
    if not arrays_and_dtypes:
        raise InputError("result_type: got nothing; pass at least one tensor or dtype")
    dtypes = list(dict.fromkeys(_dtype(value) for value in arrays_and_dtypes))
    return (dtypes[0] if len(dtypes) == 1 else common_dtype(dtypes, "result_type")).numpy()


@example('can_cast("int8", "int16"), ft.can_cast("int64", "int8")', "(True, False)")
def can_cast(from_: object, to: DTypeLike, /) -> bool:
    """Return whether promotion keeps every value of a dtype (or of a tensor's dtype) unchanged in another dtype."""
    try:
        return result_type(from_, to) == dtype_of(to).numpy()
    except InputError:
        # Kinds that do not mix; a wrong name is an error all the same.
        dtype_of(to), _dtype(from_)
        return False


@example('isdtype("float32", ("integral", "real floating"))', "True")
def isdtype(dtype: DTypeLike, kind: DTypeLike | tuple[DTypeLike, ...]) -> bool:
    """Return whether a dtype is of a kind, or of one of several.

    A kind is "bool", "signed integer", "unsigned integer", "integral", "real floating", "complex floating", "numeric"
    or another dtype.
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, one) for one in kind)
    if not isinstance(kind, str):
        return dtype_of(dtype) == dtype_of(kind)
    if kind not in _KINDS:
        raise InputError(f"isdtype: kind: got {kind!r}, wanted one of {', '.join(_KINDS)}, or a dtype")
    return dtype_of(dtype) in _KINDS[kind]


@example('finfo("float32").eps', "np.float32(1.1920929e-07)")
def finfo(type: object, /) -> ml_dtypes.finfo:
    """Return the limits of a floating point dtype, or of a tensor's: bits, eps, max, min, smallest_normal, dtype."""
    if (dtype := _dtype(type)) not in ARITHMETIC_FLOATS:
        raise InputError(f"finfo: got {dtype.numpy().name}, wanted a floating point dtype; see iinfo")
    return ml_dtypes.finfo(dtype.numpy())  # type: ignore[no-untyped-call]


@example('iinfo("int16").max', "32767")
def iinfo(type: object, /) -> np.iinfo[np.signedinteger]:
    """Return the limits of an integer dtype, or of a tensor's: bits, max, min, dtype."""
    if (dtype := _dtype(type)) not in _KINDS["integral"]:
        raise InputError(f"iinfo: got {dtype.numpy().name}, wanted an integer dtype; see finfo")
    return np.iinfo(dtype.numpy())


__all__ = ["can_cast", "finfo", "iinfo", "isdtype", "result_type"]
